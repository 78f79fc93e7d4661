"""Reject files: every row that is not packed, with its origin, the reason and the raw record.

Raw records are far larger than what is made of a packed row, so a file is written while its rejects come in: a row
group ends at the reject that fills it, and only its compressed bytes stay.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from packsvc.errors import DamageError
from packsvc.types import Reason, Reject

ROW_GROUP_CHARACTERS = 8_000_000
"""A row group ends at the reject that brings its text to so many."""

_TYPES: dict[str, pa.DataType] = {
    "file": pa.int32(),
    "row": pa.int64(),
    "part": pa.int32(),
    "source": pa.string(),
    "reason": pa.string(),
    "detail": pa.string(),
    "record": pa.string(),
}
REJECT_SCHEMA = pa.schema([pa.field(name, type_, nullable=name == "part") for name, type_ in _TYPES.items()])


class RejectWriter:
    """Rejects, in the order given, to a whole Parquet file in memory."""

    def __init__(self) -> None:
        self.num_rows = 0
        """Rejects so far."""
        self._sink = io.BytesIO()
        self._writer = pq.ParquetWriter(
            self._sink,
            REJECT_SCHEMA,
            compression="zstd",
            compression_level=1,
            use_dictionary=cast(bool, ["source", "reason"]),  # the stubs know only booleans
            write_statistics=["file", "row", "reason"],
            write_page_checksum=True,
        )
        self._waiting: list[Reject] = []
        self._characters = 0

    def add(self, rejects: Iterable[Reject]) -> None:
        """More rejects, behind those that are in."""
        for reject in rejects:
            self.num_rows += 1
            self._waiting.append(reject)
            self._characters += len(reject.record) + len(reject.detail)
            if self._characters >= ROW_GROUP_CHARACTERS:
                self._write()

    def finish(self) -> bytes:
        """The file; nothing can be added after that."""
        if self._waiting or not self.num_rows:
            self._write()
        self._writer.close()
        return self._sink.getvalue()

    def _write(self) -> None:
        rejects = self._waiting
        columns: dict[str, list[Any]] = {
            "file": [reject.file for reject in rejects],
            "row": [reject.row for reject in rejects],
            "part": [reject.part for reject in rejects],
            "source": [_utf8(reject.source) for reject in rejects],
            "reason": [reject.reason.value for reject in rejects],
            "detail": [_utf8(reject.detail) for reject in rejects],
            "record": [_utf8(reject.record) for reject in rejects],
        }
        self._writer.write_table(pa.table(columns, schema=REJECT_SCHEMA))
        self._waiting, self._characters = [], 0


def write_rejects(rejects: Iterable[Reject]) -> bytes:
    """A whole Parquet file of rejects, in the order given."""
    writer = RejectWriter()
    writer.add(rejects)
    return writer.finish()


def read_rejects(data: bytes, *, where: str = "rejects") -> list[Reject]:
    """The rejects of a file. Raises DamageError."""
    try:
        table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(use_threads=False)
        return [Reject(**{**row, "reason": Reason(row["reason"])}) for row in table.to_pylist()]
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise DamageError(f"{where}: cannot be read: {' '.join(str(error).split())[:300]}") from error


def _utf8(text: str) -> str:
    r"""Text that UTF-8 can hold: a lone surrogate, which JSON may carry, is written as JSON writes it (\ud800)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
