"""Large inputs that cannot be read from the middle (compressed, JSON arrays, CSV), recut into pieces that can.

A recut piece is zstd-compressed JSON lines, one line a row (or a blank line of the input), behind a skippable
frame with the content hash of the input and the rows it holds: a piece of other content is never taken for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from packsvc.errors import PacksvcError, SourceError
from packsvc.sources.arrays import elements
from packsvc.sources.lines import line_rows, split_lines
from packsvc.sources.opening import BLOCK_BYTES, Container, InputHandle, Shape, blocks, open_input, sniff
from packsvc.sources.tables import csv_rows
from packsvc.storage import Store
from packsvc.types import InputFile, Piece, PieceKind, RawRow

_FRAME = b"\x5a\x2a\x4d\x18"


def recut_input(
    index: int,
    file: InputFile,
    pieces: Sequence[Piece],
    store: Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write the RECUT pieces of one input that are not there yet, each whole, in one streaming pass."""
    recut = sorted((p for p in pieces if p.file == index and p.kind is PieceKind.RECUT), key=lambda piece: piece.start)
    missing = {p.path for p in recut if not _stands(p, file, store)}
    if not missing:
        return
    last = max(p.stop for p in recut if p.path in missing)
    with open_input(file, storage_options) as handle:
        lines = _lines(handle, sniff(handle, file), file)
        at = 0
        for piece in recut:
            if piece.start >= last:
                break
            for _ in islice(lines, piece.start - at):
                pass
            part = islice(lines, piece.stop - piece.start)
            if piece.path in missing:
                assert piece.path is not None
                store.publish(piece.path, _frame(piece, file) + _compressed(part))
            else:
                for _ in part:
                    pass
            at = piece.stop


def read_recut(piece: Piece, file: InputFile, store: Store) -> Iterator[RawRow]:
    """The rows of a recut piece."""
    assert piece.path is not None
    where = store.describe(piece.path)
    try:
        data = store.read(piece.path)
    except FileNotFoundError:
        raise SourceError(f"{where}: missing; it is made from {file.path} when the job starts again") from None
    frame = _frame(piece, file)
    if file.content_hash is not None and not data.startswith(frame):
        raise SourceError(f"{where}: not made from {file.path} as it was counted; remove it and start again")
    try:
        stream = pa.CompressedInputStream(pa.BufferReader(data), "zstd")
        parts = iter(lambda: stream.read(BLOCK_BYTES), b"")
        yield from line_rows(split_lines(parts), file=piece.file, first_row=piece.first_row)
    except PacksvcError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{where}: damaged or cut short: {error}; remove it and start again") from error


def _stands(piece: Piece, file: InputFile, store: Store) -> bool:
    """Whether the piece is there already, made from this content."""
    assert piece.path is not None
    info = store.info(piece.path)
    frame = _frame(piece, file)
    if info is None or file.content_hash is None or info.size_bytes < len(frame):
        return False
    return store.read_range(piece.path, 0, len(frame)) == frame


def _frame(piece: Piece, file: InputFile) -> bytes:
    stamp = json.dumps([file.content_hash, piece.start, piece.stop]).encode()
    return _FRAME + len(stamp).to_bytes(4, "little") + stamp


def _compressed(lines: Iterable[bytes]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        for line in lines:
            stream.write(line + b"\n")
    return sink.getvalue().to_pybytes()


def _lines(handle: InputHandle, shape: Shape, file: InputFile) -> Iterator[bytes]:
    """One line for each row number of the input; reading it back gives the same record, or the same fault."""
    parts = blocks(handle, shape.compression)
    if shape.container is Container.JSONL:
        yield from split_lines(parts)
    elif shape.container is Container.JSON_ARRAY:
        for element in elements(parts, name=file):
            # Newlines of a JSON text stand between its tokens only.
            yield element.data.replace(b"\n", b" ").replace(b"\r", b" ")
    else:
        for row in csv_rows(parts, file=0, name=file):
            text = json.dumps(row.record, ensure_ascii=False) if row.error is None else row.raw or ""
            yield text.replace("\n", " ").encode("utf-8")
