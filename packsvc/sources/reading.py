"""From a piece of an input to its raw rows, numbered as in the whole input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from packsvc.errors import SourceError
from packsvc.sources.arrays import array_rows
from packsvc.sources.columnar import columnar_rows, open_columnar
from packsvc.sources.lines import line_rows, lines_between, split_lines
from packsvc.sources.opening import (
    BLOCK_BYTES,
    Compression,
    Container,
    InputHandle,
    Shape,
    blocks,
    check_empty,
    open_input,
    sniff,
)
from packsvc.sources.recutting import read_recut
from packsvc.sources.tables import csv_rows
from packsvc.storage import Store
from packsvc.types import InputFile, Piece, PieceKind, RawRow

_TEXT = (Container.JSONL, Container.JSON_ARRAY, Container.CSV)


def read_piece(
    piece: Piece,
    file: InputFile,
    *,
    store: Store | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[RawRow]:
    """The rows of a piece, one at a time; memory is bounded by a block and the longest row.

    Args:
        store: The output, where RECUT pieces are.

    Raises:
        SourceError: Missing, damaged, or not the rows that were counted; the message names the file.
    """
    rows = _piece_rows(piece, file, store, storage_options)
    if piece.take is not None:
        yield from _taken(rows, piece.take)
        return
    num_rows = 0
    for row in rows:
        num_rows += 1
        yield row
    if piece.num_rows is not None and num_rows != piece.num_rows:
        raise SourceError(
            f"{file.path}: {piece.num_rows} rows were counted in this part and {num_rows} are there now: "
            "the file changed since the plan was made; pack into a new output"
        )


def sample_rows(
    file: InputFile, *, limit: int, index: int = 0, storage_options: Mapping[str, Any] | None = None
) -> list[RawRow]:
    """The first rows of an input; reads no more than it must."""
    return list(islice(_whole(index, file, storage_options), limit))


def sample_files(
    files: Sequence[InputFile], *, limit: int, storage_options: Mapping[str, Any] | None = None
) -> list[RawRow]:
    """First rows of up to eight evenly spaced inputs, and of the others in turn while no row was found."""
    spaced = [files[len(files) * k // 8] for k in range(8)] if len(files) > 8 else list(files)
    rows: list[RawRow] = []
    for file in spaced:
        rows += sample_rows(file, limit=max(1, limit // len(spaced)), storage_options=storage_options)
    for file in files:
        if rows:
            break
        rows += sample_rows(file, limit=limit, storage_options=storage_options)
    return rows


def _piece_rows(
    piece: Piece, file: InputFile, store: Store | None, options: Mapping[str, Any] | None
) -> Iterator[RawRow]:
    if piece.kind is PieceKind.WHOLE:
        return _whole(piece.file, file, options)
    if piece.kind is PieceKind.BYTES:
        return _bytes(piece, file, options)
    if piece.kind is PieceKind.ROWS:
        return _columnar(piece.file, file, piece.start, piece.stop, options)
    if store is None:
        raise ValueError("a RECUT piece is read from a store")
    return read_recut(piece, file, store)


def _whole(index: int, file: InputFile, options: Mapping[str, Any] | None) -> Iterator[RawRow]:
    with open_input(file, options) as handle:
        if handle.seek(0, 2) == 0:
            check_empty(file)
            return
        shape = sniff(handle, file)
        if shape.container in _TEXT:
            yield from text_rows(handle, shape, file, index=index)
        else:
            yield from columnar_rows(open_columnar(handle, shape), file=index, start=0, stop=None)


def text_rows(handle: InputHandle, shape: Shape, file: InputFile, *, index: int) -> Iterator[RawRow]:
    """The rows of an input that is text, from its start."""
    parts = blocks(handle, shape.compression)
    if shape.container is Container.JSONL:
        return line_rows(split_lines(parts), file=index, first_row=0)
    if shape.container is Container.JSON_ARRAY:
        return array_rows(parts, file=index, name=file)
    return csv_rows(parts, file=index, name=file)


def _bytes(piece: Piece, file: InputFile, options: Mapping[str, Any] | None) -> Iterator[RawRow]:
    with open_input(file, options) as handle:
        begin = max(piece.start - 1, 0)
        handle.seek(begin)
        size = min(BLOCK_BYTES, piece.stop - begin)
        lines = lines_between(blocks(handle, Compression.NONE, size=size), start=piece.start, stop=piece.stop)
        yield from line_rows(lines, file=piece.file, first_row=piece.first_row)


def _columnar(
    index: int, file: InputFile, start: int, stop: int, options: Mapping[str, Any] | None
) -> Iterator[RawRow]:
    with open_input(file, options) as handle:
        table = open_columnar(handle, sniff(handle, file))
        yield from columnar_rows(table, file=index, start=start, stop=stop)


def _taken(rows: Iterator[RawRow], take: tuple[int, ...]) -> Iterator[RawRow]:
    if not take:
        return
    wanted, last = set(take), max(take)
    for row in rows:
        if row.row in wanted:
            yield row
        if row.row >= last:
            return
