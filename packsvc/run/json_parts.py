"""Reading a large JSON object a part at a time, so that its tree never stands in memory as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class JsonParts:
    """A JSON object, read from its start to its end.

    After each key of `members` comes exactly one call: `value`, or `elements` for an array, read to its end.
    Anything that is not JSON raises ValueError.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def members(self) -> Iterator[str]:
        """The keys, each when its value is next."""
        for _ in self._items("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"a key at character {self._at} is no string")
            self._expect(":")
            yield key
        if self._space() != len(self._text):
            raise ValueError(f"something follows the end, at character {self._at}")

    def value(self) -> Any:
        """The next value, whole."""
        value, self._at = _DECODER.raw_decode(self._text, self._space())
        return value

    def elements(self) -> Iterator[Any]:
        """The elements of the array that is next, one by one."""
        for _ in self._items("[", "]"):
            yield self.value()

    def _items(self, first: str, last: str) -> Iterator[None]:
        """Once before each item of an array or object."""
        self._expect(first)
        if self._passes(last):
            return
        while True:
            yield
            if self._passes(last):
                return
            self._expect(",")

    def _space(self) -> int:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return self._at

    def _passes(self, mark: str) -> bool:
        there = self._text.startswith(mark, self._space())
        self._at += len(mark) if there else 0
        return there

    def _expect(self, mark: str) -> None:
        if not self._passes(mark):
            found = self._text[self._at : self._at + 10]
            raise ValueError(f"{mark!r} expected at character {self._at}, found {found!r}")
