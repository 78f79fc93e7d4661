"""From a counted input to pieces of bounded rows and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from packsvc.sources.counting import InputCount, Mark, count_input
from packsvc.types import InputFile, Piece, PieceKind


def cut_input(
    index: int,
    file: InputFile,
    count: InputCount,
    *,
    max_rows: int,
    max_bytes: int,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Piece]:
    """Pieces of an input, in order, together all of its rows.

    Args:
        index: Of the input, in the plan's list.
        max_rows: Rows of a piece at most.
        max_bytes: Uncompressed bytes of a piece at most; a row above that is a piece of its own.
        storage_options: Needed only where the pieces wanted are finer than the marks of `count`: the input is
            then counted once more.

    Returns:
        No piece for an input without rows; one WHOLE piece where it fits.
    """
    if max_rows < 1 or max_bytes < 1:
        raise ValueError(f"max_rows {max_rows} and max_bytes {max_bytes} must be at least 1")
    if count.num_rows == 0:
        return []
    if count.num_rows <= max_rows and count.size_bytes <= max_bytes:
        return [Piece(file=index, kind=PieceKind.WHOLE, num_rows=count.num_rows, size_bytes=count.size_bytes)]
    marks = list(count.marks)
    if count.kind is PieceKind.ROWS:
        marks = list(_refined(marks, max_rows, max_bytes))
    elif wide := [
        (a, b) for a, b in pairwise(marks) if b.num_rows - a.num_rows > 1 and not _fits(a, b, max_rows, max_bytes)
    ]:
        finer = max_rows if all(b.offset - a.offset <= max_bytes for a, b in wide) else 1
        marks = list(count_input(file, storage_options=storage_options, max_rows=finer).marks)
    cuts = _grouped(marks, max_rows, max_bytes)
    return [_piece(index, count.kind, number, a, b) for number, (a, b) in enumerate(cuts)]


def _fits(start: Mark, stop: Mark, max_rows: int, max_bytes: int) -> bool:
    return stop.num_rows - start.num_rows <= max_rows and stop.offset - start.offset <= max_bytes


def _refined(marks: list[Mark], max_rows: int, max_bytes: int) -> Iterator[Mark]:
    """Row groups that are too large, cut into even row ranges."""
    yield marks[0]
    for start, stop in pairwise(marks):
        rows, size = stop.row - start.row, stop.offset - start.offset
        parts = min(rows, max(-(-rows // max_rows), -(-size // max_bytes)))
        for part in range(1, parts + 1):
            row = start.row + rows * part // parts
            yield Mark(row, start.offset + size * part // parts, row)


def _grouped(marks: list[Mark], max_rows: int, max_bytes: int) -> Iterator[tuple[Mark, Mark]]:
    """As many neighbouring intervals at a time as fit; intervals without rows are left out at the edges."""
    start = marks[0]
    for before, after in pairwise(marks):
        if before.num_rows > start.num_rows and not _fits(start, after, max_rows, max_bytes):
            yield start, before
            start = before
    if marks[-1].num_rows > start.num_rows:
        yield start, marks[-1]


def _piece(index: int, kind: PieceKind, number: int, start: Mark, stop: Mark) -> Piece:
    in_bytes = kind is PieceKind.BYTES
    return Piece(
        file=index,
        kind=kind,
        start=start.offset if in_bytes else start.row,
        stop=stop.offset if in_bytes else stop.row,
        first_row=start.row,
        num_rows=stop.num_rows - start.num_rows,
        size_bytes=stop.offset - start.offset,
        path=f"recut/{index}-{number}.jsonl.zst" if kind is PieceKind.RECUT else None,
    )
