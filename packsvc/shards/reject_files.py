"""Reject files: every row that is not packed, with its origin, the reason and the raw record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from packsvc.errors import DamageError
from packsvc.types import Reason, Reject

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


def write_rejects(rejects: Sequence[Reject]) -> bytes:
    """A whole Parquet file of rejects, in the order given."""
    columns = {
        "file": [reject.file for reject in rejects],
        "row": [reject.row for reject in rejects],
        "part": [reject.part for reject in rejects],
        "source": [_utf8(reject.source) for reject in rejects],
        "reason": [reject.reason.value for reject in rejects],
        "detail": [_utf8(reject.detail) for reject in rejects],
        "record": [_utf8(reject.record) for reject in rejects],
    }
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns, schema=REJECT_SCHEMA),
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=cast(bool, ["source", "reason"]),  # the stubs know only booleans
        write_statistics=["file", "row", "reason"],
        write_page_checksum=True,
    )
    return sink.getvalue().to_pybytes()


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
