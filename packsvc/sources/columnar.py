"""Parquet and Arrow IPC: records from row groups and record batches, a bounded number at a time.

Columns of structs unify: every struct gets the fields of all others, as nulls that nobody wrote. So null fields
of structs are dropped on the way to Python, at every depth; nulls in lists and maps are kept, since Arrow does
not invent those. Chunks are never combined: list offsets of 32 bits would overflow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from packsvc.sources.opening import BLOCK_BYTES, Compression, Container, InputHandle, Shape, blocks, python_file
from packsvc.types import RawRow

ROWS_AT_A_TIME = 1024
BATCH_BYTES = 32 << 20
"""Rows of a Parquet row group are decoded in batches of about this size."""


class ColumnarFile(Protocol):
    """A table in a file."""

    def marks(self) -> Iterator[tuple[int, int]]:
        """(rows, bytes) of each row group or record batch, in order."""

    def batches(self, start: int, stop: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches that hold rows [start, stop), each with the number of its first row."""


def open_columnar(handle: InputHandle, shape: Shape) -> ColumnarFile:
    """The table in an open input; one that is compressed whole is decompressed into memory."""
    if shape.compression is Compression.NONE:
        handle.seek(0)
        source: Any = python_file(handle)
    else:
        source = pa.BufferReader(b"".join(blocks(handle, shape.compression)))
    if shape.container is Container.PARQUET:
        return _ParquetFile(source)
    return _ArrowFile(source) if shape.container is Container.ARROW_FILE else _ArrowStream(source)


class _ParquetFile:
    def __init__(self, source: Any) -> None:
        # With a buffer, a column chunk is read page by page instead of whole.
        self._file = pq.ParquetFile(source, buffer_size=BLOCK_BYTES, page_checksum_verification=True)

    def marks(self) -> Iterator[tuple[int, int]]:
        meta = self._file.metadata
        for index in range(meta.num_row_groups):
            group = meta.row_group(index)
            yield group.num_rows, group.total_byte_size

    def batches(self, start: int, stop: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        first = 0
        for index, (num_rows, num_bytes) in enumerate(self.marks()):
            last = first + num_rows
            if last > start and (stop is None or first < stop) and num_rows:
                size = max(1, min(ROWS_AT_A_TIME, BATCH_BYTES * num_rows // max(1, num_bytes)))
                at = first
                for batch in self._file.iter_batches(batch_size=size, row_groups=[index]):
                    yield at, batch
                    at += batch.num_rows
                    if stop is not None and at >= stop:
                        break
            first = last


class _ArrowFile:
    def __init__(self, source: Any) -> None:
        self._reader = pa.ipc.open_file(source)

    def marks(self) -> Iterator[tuple[int, int]]:
        for index in range(self._reader.num_record_batches):
            batch = self._reader.get_batch(index)
            yield batch.num_rows, batch.nbytes

    def batches(self, start: int, stop: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        at = 0
        for index in range(self._reader.num_record_batches):
            if stop is not None and at >= stop:
                return
            batch = self._reader.get_batch(index)
            yield at, batch
            at += batch.num_rows


class _ArrowStream:
    def __init__(self, source: Any) -> None:
        self._reader = pa.ipc.open_stream(source)

    def marks(self) -> Iterator[tuple[int, int]]:
        for batch in self._reader:
            yield batch.num_rows, batch.nbytes

    def batches(self, start: int, stop: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        at = 0
        for batch in self._reader:
            yield at, batch
            at += batch.num_rows
            if stop is not None and at >= stop:
                return


def footer_hash(handle: InputHandle) -> str:
    """sha256 of a Parquet file's footer."""
    size = handle.seek(0, 2)
    handle.seek(max(0, size - 8))
    length = int.from_bytes(handle.read(8)[:4], "little")
    start = size - 8 - length
    if start < 0:
        raise pa.ArrowInvalid("the Parquet footer is longer than the file")
    handle.seek(start)
    digest = hashlib.sha256()
    while block := handle.read(BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def columnar_rows(table: ColumnarFile, *, file: int, start: int, stop: int | None) -> Iterator[RawRow]:
    """Rows [start, stop) of a table."""
    for at, batch in table.batches(start, stop):
        low = max(0, start - at)
        high = batch.num_rows if stop is None else min(batch.num_rows, stop - at)
        for first in range(low, high, ROWS_AT_A_TIME):
            part = batch.slice(first, min(ROWS_AT_A_TIME, high - first))
            yield from _part_rows(part, file=file, first_row=at + first)


def _part_rows(part: pa.RecordBatch, *, file: int, first_row: int) -> Iterator[RawRow]:
    try:
        records = _records(part)
    except (ValueError, OverflowError, pa.ArrowException):
        if part.num_rows > 1:  # only the rows that cannot be read are lost
            for index in range(part.num_rows):
                yield from _part_rows(part.slice(index, 1), file=file, first_row=first_row + index)
            return
        yield RawRow(file=file, row=first_row, raw=_bytes_shown(part), error="a value cannot be read; not UTF-8 text?")
        return
    for row, record in enumerate(records, first_row):
        yield RawRow(file=file, row=row, record=record)


def _records(part: pa.RecordBatch) -> list[dict[str, Any]]:
    names = part.schema.names
    columns = [_values(column) for column in part.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] if columns else []


def _values(column: Any) -> list[Any]:
    convert = _converter(column.type)
    values: list[Any] = _readable(column).to_pylist()
    return values if convert is None else [None if v is None else convert(v) for v in values]


def _readable(column: Any) -> Any:
    """Times and decimals as text: Python's own types hold no nanoseconds, and JSON neither."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.int64()).cast(pa.timestamp(kind.unit)).cast(pa.string())
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return column.cast(pa.int64() if pa.types.is_duration(kind) else pa.string())
    return column.cast(pa.string()) if pa.types.is_decimal(kind) else column


def _converter(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What drops the null fields of structs in values of this type; None where there are none to drop."""
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _converter(kind.value_type)
    if pa.types.is_struct(kind):
        fields = {f.name: _converter(f.type) for f in kind}
        return lambda value: _present(value, fields)
    if pa.types.is_map(kind):
        inner = _converter(kind.item_type)
        return lambda value: {k: v if inner is None or v is None else inner(v) for k, v in value}
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        item = _converter(kind.value_type)
        return None if item is None else lambda value: [None if v is None else item(v) for v in value]
    return None


def _present(value: Mapping[str, Any], fields: Mapping[str, Callable[[Any], Any] | None]) -> dict[str, Any]:
    out = {}
    for name, item in value.items():
        if item is not None:
            convert = fields[name]
            out[name] = item if convert is None else convert(item)
    return out


def _bytes_shown(part: pa.RecordBatch) -> str:
    """One unreadable row, for its reject record."""
    shown = []
    for name, column in zip(part.schema.names, part.columns, strict=True):
        try:
            value = column.cast(pa.binary())[0].as_py() if pa.types.is_string(column.type) else column[0].as_py()
            text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else repr(value)
        except (ValueError, OverflowError, pa.ArrowException):
            text = "(unreadable)"
        shown.append(f"{name}={text}")
    return ", ".join(shown)
