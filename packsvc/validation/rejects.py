"""Reject files: read with distrust, and as arrays of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.shards import Manifest
from packsvc.storage import Store
from packsvc.types import Reason
from packsvc.validation.digests import ROW_BITS, row_keys
from packsvc.validation.report import Failure, Findings
from packsvc.validation.shard_file import fetch, one_line

REASONS = [reason.value for reason in Reason]
COLUMNS = {
    "file": pa.int32(),
    "row": pa.int64(),
    "part": pa.int32(),
    "source": pa.string(),
    "reason": pa.string(),
    "detail": pa.string(),
    "record": pa.string(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectKeys:
    """All reject records that could be read, R of them."""

    row_key: NDArray[np.int64]
    """(R,)"""
    part: NDArray[np.int32]
    """(R,) -1 for a whole row."""
    reason: NDArray[np.int64]
    """(R,) index into `REASONS`."""
    complete: bool
    """False when some could not be read: counts over the rest would only repeat that."""

    @property
    def file(self) -> NDArray[np.int64]:
        return self.row_key >> ROW_BITS


def read_reject_keys(store: Store, manifest: Manifest, row_limits: NDArray[np.int64], findings: Findings) -> RejectKeys:
    """Check every reject file by itself and gather the keys."""
    keys, parts, reasons = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    complete = True
    sources = [entry.source for entry in manifest.inputs]
    for entry in manifest.rejects:
        data = fetch(store, entry.path, entry.size_bytes, entry.sha256, findings)
        table = None if data is None else _read(data, entry.path, findings)
        if table is None:
            complete = False
            continue
        findings.saw("rejects", table.num_rows, "records")
        findings.equal("rejects", "num_rows", table.num_rows, entry.num_rows, shard=entry.path)
        good = _records(table, entry.path, sources, row_limits, findings)
        complete &= bool(good.all())
        file, row = np.asarray(table["file"]), np.asarray(table["row"])
        keys.append(row_keys(file[good], row[good]))
        parts.append(_parts(table, -1)[good])
        names = [str(name) for name in table["reason"].to_pylist()]
        reasons.append(np.array([REASONS.index(n) for n, ok in zip(names, good, strict=True) if ok], dtype=np.int64))
    return RejectKeys(
        row_key=np.concatenate(keys), part=np.concatenate(parts), reason=np.concatenate(reasons), complete=complete
    )


def _read(data: pa.Buffer, path: str, findings: Findings) -> pa.Table | None:
    try:
        table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        findings.fail("rejects", f"cannot be read: {one_line(error)}", shard=path)
        return None
    for name, type_ in COLUMNS.items():
        index = table.schema.get_field_index(name)
        if index < 0 or table.schema.field(index).type != type_:
            found = "missing" if index < 0 else table.schema.field(index).type
            findings.fail("rejects", f"column {name} is {found}, must be {type_}", shard=path)
            return None
        if name != "part" and table.column(index).null_count:
            findings.fail("rejects", f"column {name} holds nulls", shard=path)
            return None
    return table


def _parts(table: pa.Table, whole: int) -> NDArray[np.int32]:
    """The column `part`, with `whole` in place of nulls."""
    filled = [whole if part is None else part for part in table["part"].to_pylist()]
    return np.array(filled, dtype=np.int32)


def _records(
    table: pa.Table, path: str, sources: Sequence[str], row_limits: NDArray[np.int64], findings: Findings
) -> NDArray[np.bool_]:
    """Which records are possible by themselves."""
    file, row = np.asarray(table["file"]), np.asarray(table["row"])
    part = _parts(table, 0)
    source, reason = table["source"].to_pylist(), table["reason"].to_pylist()
    known = (file >= 0) & (file < len(sources))
    safe = np.where(known, file, 0)
    possible = known & (row >= 0) & (row < row_limits[safe]) & (part >= 0) if len(sources) else known

    def fail(wrong: NDArray[np.bool_], message: str) -> None:
        findings.each(
            "rejects",
            wrong,
            lambda i: Failure(
                check="rejects", message=f"record {i} (file {file[i]}, row {row[i]}): {message}", shard=path
            ),
        )

    fail(~possible, "there is no such row")
    own = np.array([k and sources[f] == s for k, f, s in zip(known, safe, source, strict=True)], dtype=np.bool_)
    fail(possible & ~own, "the source is not that of the input")
    named = np.array([r in REASONS for r in reason], dtype=np.bool_)
    fail(~named, "the reason is none of the known ones")
    return possible & own & named
