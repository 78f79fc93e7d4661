"""packs.parquet and lengths.parquet against what the shards hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.shards import Manifest, ShardEntry, shard_of_path
from packsvc.storage import Store
from packsvc.validation.report import Failure, Findings
from packsvc.validation.shard_check import ShardResult
from packsvc.validation.shard_file import fetch, one_line

PACK_COLUMNS: dict[str, pa.DataType] = {
    "pack": pa.int64(),
    "shard": pa.string(),
    "group": pa.int32(),
    "num_segments": pa.int32(),
    "num_tokens": pa.int32(),
    "num_loss_tokens": pa.int32(),
    "padding": pa.int32(),
    "efficiency": pa.float64(),
    "sum_squared_lengths": pa.int64(),
}
LENGTH_COLUMNS: dict[str, pa.DataType] = {
    "split": pa.string(),
    "source": pa.string(),
    "length": pa.int32(),
    "examples": pa.int64(),
}


class PackTable:
    """`packs.parquet`, read shard by shard in the order of the manifest; memory holds one row group."""

    def __init__(self, store: Store, manifest: Manifest, findings: Findings) -> None:
        self.findings = findings
        self.seq_len = manifest.seq_len
        self.file = _open(store, manifest, "packs", PACK_COLUMNS, findings)
        self.path = manifest.tables["packs"].path if "packs" in manifest.tables else ""
        self._group = 0
        self._rest: pa.Table | None = None
        if self.file is not None and self.file.metadata.num_rows != manifest.num_packs:
            findings.fail(
                "tables", f"{self.file.metadata.num_rows} rows, there are {manifest.num_packs} packs", shard=self.path
            )
            self.file = None

    def compare(self, entry: ShardEntry, result: ShardResult, *, first_pack: int) -> None:
        """The next `entry.num_packs` rows against what a shard holds."""
        if self.file is None:
            return
        try:
            table = self._take(entry.num_packs)
        except (pa.ArrowException, OSError, ValueError) as error:
            self.findings.fail("tables", f"cannot be read: {one_line(error)}", shard=self.path)
            self.file = None
            return
        self.findings.saw("tables", table.num_rows, "rows")
        name = shard_of_path(entry.path)
        group = int(name.rsplit("-", 2)[1]) if name else -1
        at = result.pack_number - first_pack
        inside = (at >= 0) & (at < table.num_rows)
        at, counts = at[inside], result.pack_counts[inside]
        expected: dict[str, Any] = {
            "pack": result.pack_number[inside],
            "group": np.full(len(at), group),
            "num_segments": counts[:, 0],
            "num_tokens": counts[:, 1],
            "num_loss_tokens": counts[:, 2],
            "padding": self.seq_len - counts[:, 1],
            "efficiency": counts[:, 1] / self.seq_len,
            "sum_squared_lengths": counts[:, 3],
        }
        for column, value in expected.items():
            self._fail(np.asarray(table[column])[at] != value, column, at + first_pack)
        paths = np.array(table["shard"].to_pylist(), dtype=object)[at]
        self._fail(paths != entry.path, "shard", at + first_pack)

    def _fail(self, wrong: NDArray[np.bool_], column: str, pack: NDArray[np.int64]) -> None:
        self.findings.each(
            "tables",
            wrong,
            lambda i: Failure(
                check="tables", message=f"{column} is not what the pack holds", shard=self.path, pack=int(pack[i])
            ),
        )

    def _take(self, rows: int) -> pa.Table:
        assert self.file is not None
        parts = [self._rest] if self._rest is not None else []
        while sum(t.num_rows for t in parts) < rows and self._group < self.file.metadata.num_row_groups:
            parts.append(self.file.read_row_group(self._group, columns=list(PACK_COLUMNS), use_threads=False))
            self._group += 1
        table = pa.concat_tables(parts) if parts else self.file.schema_arrow.empty_table()
        self._rest = table.slice(rows)
        return table.slice(0, rows)


def check_lengths_table(
    store: Store, manifest: Manifest, found: Mapping[tuple[str, str, int], int], findings: Findings
) -> None:
    """`lengths.parquet` against the lengths of all segments.

    Args:
        found: (split, source, length) to number of segments.
    """
    file = _open(store, manifest, "lengths", LENGTH_COLUMNS, findings)
    if file is None:
        return
    path = manifest.tables["lengths"].path
    try:
        rows = file.read(columns=list(LENGTH_COLUMNS), use_threads=False).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        findings.fail("tables", f"cannot be read: {one_line(error)}", shard=path)
        return
    findings.saw("tables", len(rows), "rows")
    stated: dict[tuple[str, str, int], int] = {}
    for row in rows:
        key = (row["split"], row["source"], row["length"])
        if key in stated:
            findings.fail("tables", f"{key} stands twice", shard=path)
        stated[key] = row["examples"]
    for key in sorted(stated.keys() | found.keys(), key=str):
        if stated.get(key) != found.get(key):
            message = f"{key}: {stated.get(key, 0)} examples, the shards hold {found.get(key, 0)}"
            findings.fail("tables", message, shard=path)


def _open(
    store: Store, manifest: Manifest, name: str, columns: Mapping[str, pa.DataType], findings: Findings
) -> pq.ParquetFile | None:
    entry = manifest.tables.get(name)
    if entry is None:
        findings.fail("tables", f"the manifest names no table {name!r}")
        return None
    data = fetch(store, entry.path, entry.size_bytes, entry.sha256, findings)
    if data is None:
        return None
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        found = file.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        findings.fail("tables", f"cannot be read: {one_line(error)}", shard=entry.path)
        return None
    for column, type_ in columns.items():
        index = found.get_field_index(column)
        if index < 0 or found.field(index).type != type_:
            is_ = "missing" if index < 0 else found.field(index).type
            findings.fail("tables", f"column {column} is {is_}, must be {type_}", shard=entry.path)
            return None
    return file
