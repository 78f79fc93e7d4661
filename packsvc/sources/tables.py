"""CSV: a header, then records of strings. Quoting as in RFC 4180, with newlines inside quotes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator

from packsvc.errors import SourceError
from packsvc.sources.lines import split_lines
from packsvc.sources.opening import BOM
from packsvc.types import InputFile, RawRow, Reason

LONGEST_FIELD = 1 << 29


def csv_rows(blocks: Iterable[bytes], *, file: int, name: InputFile) -> Iterator[RawRow]:
    """The records below the header, numbered from 0. A quote that is never closed swallows what follows, so it
    is a SourceError; a record that is wrong in itself is a row with an error."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    text = _TextLines(blocks)
    reader = csv.reader(text, strict=True)
    header: list[str] | None = None
    row = 0
    while True:
        opened_at = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if text.exhausted or header is None or "field larger" in str(error):
                raise SourceError(f"{name.path}: not CSV from line {opened_at} on: {error}") from error
            raw = text.last.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").rstrip("\r\n")
            yield RawRow(file=file, row=row, raw=raw, error=f"not CSV: {error}")
            row += 1
            continue
        if not fields:
            continue
        if header is None:
            header = _checked(fields, name)
            continue
        yield _record(header, fields, file=file, row=row)
        row += 1


class _TextLines:
    """Lines with their newline, as the csv module wants them; bytes that are not UTF-8 become surrogates."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._lines = split_lines(blocks)
        self.exhausted = False
        self.last = ""
        self._first = True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None:
            self.exhausted = True
            raise StopIteration
        if self._first:
            self._first = False
            line = line.removeprefix(BOM)
        self.last = line.decode("utf-8", "surrogateescape") + "\n"
        return self.last


def _checked(header: list[str], name: InputFile) -> list[str]:
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice:
        raise SourceError(f"{name.path}: column {twice[0]!r} stands twice in the CSV header")
    return header


def _record(header: list[str], fields: list[str], *, file: int, row: int) -> RawRow:
    raw = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if len(fields) != len(header):
        error = f"{len(fields)} fields, but the header has {len(header)}"
        return RawRow(file=file, row=row, raw=raw, error=error, error_reason=Reason.WRONG_TYPE)
    record = dict(zip(header, fields, strict=True))
    try:
        "".join(fields).encode("utf-8")
    except UnicodeEncodeError:
        return RawRow(file=file, row=row, raw=raw, error="not UTF-8")
    return RawRow(file=file, row=row, record=record)
