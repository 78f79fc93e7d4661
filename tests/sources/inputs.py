"""Inputs for the tests of the sources room, and its slow, obvious twins."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packsvc.config import Format, PackJob, Source, parse_job
from packsvc.sources import Reading, cut_input, read_example, read_piece, recognise, recut_input
from packsvc.sources.counting import InputCount
from packsvc.storage import Store
from packsvc.types import Example, InputFile, Piece, PieceKind, RawRow, Reject

WHOLE = Piece(file=0, kind=PieceKind.WHOLE)


def chat(user: str = "a", assistant: str = "b", **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}],
        **more,
    }


def input_at(path: Path, data: bytes | None = None) -> InputFile:
    """A file as an input, written first if `data` is given."""
    if data is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return InputFile(path=path.name, url=str(path), source="s", size_bytes=path.stat().st_size)


def jsonl(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def packed(data: bytes, suffix: str) -> bytes:
    """Compressed as the suffix says, by something other than what the product reads with where there is one."""
    if suffix == "gz":
        return gzip.compress(data)
    return pa.compress(data, codec="zstd", asbytes=True) if suffix == "zst" else data


def parquet(path: Path, rows: Sequence[dict[str, Any]], **options: Any) -> InputFile:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **options)
    return input_at(path)


def rows_of(file: InputFile, piece: Piece = WHOLE, store: Store | None = None) -> list[RawRow]:
    return list(read_piece(piece, file, store=store))


def records_of(file: InputFile) -> list[Any]:
    return [row.record for row in rows_of(file)]


def cut_and_read(
    file: InputFile, count: InputCount, store: Store, *, max_rows: int, max_bytes: int = 1 << 30
) -> list[RawRow]:
    """All rows by way of pieces."""
    pieces = cut_input(0, file, count, max_rows=max_rows, max_bytes=max_bytes)
    recut_input(0, file, pieces, store)
    return [row for piece in pieces for row in rows_of(file, piece, store)]


def job_with(folder: Path, *sources: dict[str, Any] | str) -> PackJob:
    trees = [{"path": s} if isinstance(s, str) else s for s in sources]
    return parse_job({"tokenizer": "t", "sources": trees}, base=folder)


def source(**values: Any) -> Source:
    return Source(**{"path": "x.jsonl", "name": "s", **values})


def row(record: Any, number: int = 0) -> RawRow:
    return RawRow(file=0, row=number, record=record)


def example_of(record: Any, format: Format | str = Format.AUTO, **columns: str) -> Example | Reject:
    """The record read as the format that is recognised in it, or named."""
    reading = recognise([row(record)], source(format=Format(format), columns=columns))
    return read_example(row(record), reading, source_name="s")


def read_as(record: Any, format: Format | str, **columns: str) -> Example | Reject:
    """The record read as a named format, whatever it holds."""
    reading = Reading(format=Format(format), columns=columns, why="")
    return read_example(row(record), reading, source_name="s")


def good(result: Example | Reject) -> Example:
    assert isinstance(result, Example), result
    return result


def bad(result: Example | Reject) -> Reject:
    assert isinstance(result, Reject), result
    return result
