"""JSON lines: rows are numbered by line, and a blank line is no row but counts as a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from packsvc.sources.opening import BOM
from packsvc.sources.parsing import NotJson, parse_json, shown
from packsvc.types import RawRow


def split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their newline; a file that ends in one has no line after it. Memory: one block and one line."""
    tail: list[bytes] = []
    for block in blocks:
        head, *rest = block.split(b"\n")
        tail.append(head)
        if rest:
            yield b"".join(tail)
            yield from rest[:-1]
            tail = [rest[-1]]
    last = b"".join(tail)
    if last:
        yield last


def is_blank(line: bytes) -> bool:
    """Whether a line holds nothing but white space."""
    return not line.strip()


def line_rows(lines: Iterable[bytes], *, file: int, first_row: int) -> Iterator[RawRow]:
    """The rows of JSON lines, numbered from `first_row`."""
    for row, line in enumerate(lines, first_row):
        if row == 0:
            line = line.removeprefix(BOM)
        if is_blank(line):
            continue
        yield line_row(line, file=file, row=row)


def line_row(line: bytes, *, file: int, row: int) -> RawRow:
    """One line as a row, parsed or with the reason why not."""
    try:
        record = parse_json(line)
    except NotJson as error:
        return RawRow(file=file, row=row, raw=shown(line), error=str(error))
    return RawRow(file=file, row=row, record=record, raw=line.decode("utf-8"))


def lines_between(blocks: Iterable[bytes], *, start: int, stop: int) -> Iterator[bytes]:
    """The lines whose first byte lies in [start, stop), in a file whose bytes from `max(start - 1, 0)` come in blocks.

    Any cuts give every line exactly once: a range that does not begin at a line start leaves the line that it
    begins in to the range before.
    """
    lines = split_lines(blocks)
    at = 0
    if start > 0:
        at = start + len(next(lines, b""))  # up to and with the first newline at or after start - 1
    while at < stop:  # asks for no line beyond, which would read another block
        line = next(lines, None)
        if line is None:
            return
        yield line
        at += len(line) + 1
