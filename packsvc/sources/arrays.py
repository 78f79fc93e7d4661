"""One JSON array of records, read as a stream: memory holds a block and the longest record."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from packsvc.errors import SourceError
from packsvc.sources.opening import BOM
from packsvc.sources.parsing import NotJson, check_text, shown
from packsvc.types import InputFile, RawRow

_BLANK = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"[-+0-9.eE]*")
_NEAR_END = 16
"""A parse error this close to the end of what was read may only mean that more must be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One record of the array."""

    text: str
    """As written; bytes that are not UTF-8 are surrogate escapes."""
    value: Any
    error: str | None

    @property
    def data(self) -> bytes:
        """The bytes it was read from."""
        return self.text.encode("utf-8", "surrogateescape")


def array_rows(blocks: Iterable[bytes], *, file: int, name: InputFile) -> Iterator[RawRow]:
    """The records of a JSON array, numbered from 0."""
    for row, element in enumerate(elements(blocks, name=name)):
        if element.error is not None:
            yield RawRow(file=file, row=row, raw=shown(element.data), error=element.error)
        else:
            yield RawRow(file=file, row=row, record=element.value)


def elements(blocks: Iterable[bytes], *, name: InputFile) -> Iterator[Element]:
    """The records of a JSON array. A record with a value that cannot be kept is an element with an error; where
    the array itself is broken, no later record can be trusted: SourceError."""
    window = _Window(blocks, name)
    window.take("[")
    if not window.peek("]"):
        yield window.element()
        while window.peek(","):
            window.take(",")
            yield window.element()
    window.take("]")
    window.end()


class _Window:
    """The part of the text that is in memory, and the place in it where parsing stands."""

    def __init__(self, blocks: Iterable[bytes], name: InputFile) -> None:
        self._blocks = iter(blocks)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._name = name
        self._text = ""
        self._at = 0
        self._passed = 0
        self._num_elements = 0
        self._complete = False
        self._refused: str | None = None
        self._quick = json.JSONDecoder(parse_constant=self._constant, parse_float=self._float)
        self._careful = json.JSONDecoder(
            parse_constant=self._constant, parse_float=self._float, parse_int=self._integer
        )
        self._fill(1)
        self._at = len(BOM.decode()) if self._text.startswith(BOM.decode()) else 0

    def _fill(self, num_blocks: int) -> None:
        parts = [self._text[self._at :]]
        self._passed += self._at
        self._at = 0
        for _ in range(num_blocks):
            block = next(self._blocks, None)
            parts.append(self._decoder.decode(block or b"", final=block is None))
            if block is None:
                self._complete = True
                break
        self._text = "".join(parts)

    def _skip_blank(self) -> None:
        while True:
            match = _BLANK.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or self._complete:
                return
            self._fill(1)

    def peek(self, sign: str) -> bool:
        self._skip_blank()
        return self._text.startswith(sign, self._at)

    def take(self, sign: str) -> None:
        if not self.peek(sign):
            found = self._text[self._at : self._at + 20]
            raise self._broken(f"expected {sign!r}, found {found!r}" if found else f"it ends before {sign!r}")
        self._at += 1

    def end(self) -> None:
        self._skip_blank()
        if self._at < len(self._text):
            raise self._broken("more text after the end of the array")

    def element(self) -> Element:
        """Parse one value; read on, twice as far each time, while it may only be cut by the end of the window."""
        self._skip_blank()
        num_blocks = 1
        while True:
            start = self._at
            try:
                value, stop = self._parse(start)
                if self._complete or self._is_whole(start, stop):
                    break
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - _NEAR_END or error.msg.startswith("Unterminated string")
                if self._complete or not cut:
                    raise self._broken(error.msg, error.pos - start) from None
            except RecursionError:
                raise self._broken("nested too deeply") from None
            self._fill(num_blocks)
            num_blocks *= 2
        self._at = stop
        self._num_elements += 1
        error_text = self._refused
        if error_text is None:
            try:
                check_text(value)
            except NotJson as error:
                error_text = str(error)
        return Element(text=self._text[start:stop], value=value, error=error_text)

    def _is_whole(self, start: int, stop: int) -> bool:
        """Whether a value ends before the window does; of a number, the next sign may belong to it ("0" of "0.5")."""
        number = _NUMBER.match(self._text, start)
        assert number is not None
        return max(stop, number.end()) < len(self._text)

    def _parse(self, start: int) -> tuple[Any, int]:
        self._refused = None
        try:
            return self._quick.raw_decode(self._text, start)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer of more digits than Python converts
            self._refused = None
            return self._careful.raw_decode(self._text, start)

    def _constant(self, name: str) -> None:
        self._refused = f"{name} is not JSON"

    def _float(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            self._refused = f"the number {text[:40]} is too large to be kept"
        return value

    def _integer(self, text: str) -> int:
        try:
            return int(text)
        except ValueError as error:
            self._refused = str(error)
            return 0

    def _broken(self, why: str, offset: int = 0) -> SourceError:
        at = self._passed + self._at + offset
        return SourceError(
            f"{self._name.path}: not a whole JSON array: {why} (record {self._num_elements}, character {at}); "
            "mend the file, or write one object a line (.jsonl), where a broken line costs only itself"
        )
