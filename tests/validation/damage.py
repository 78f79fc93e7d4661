"""Damage made on purpose, with page checksums, hashes and names made right again afterwards.

Else every damage would be caught by its hash, and no other check would ever be seen failing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.validation.outputs import sha

Rows = list[dict[str, Any]]


def manifest_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())


def edit_manifest(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest in place."""
    tree = manifest_of(out)
    change(tree)
    (out / "manifest.json").write_text(json.dumps(tree))


def edit_plan(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change plan.json in place."""
    tree = json.loads((out / "plan.json").read_text())
    change(tree)
    (out / "plan.json").write_text(json.dumps(tree))


def edit_table(
    out: Path, shard: int, change: Callable[[pa.Table], pa.Table], *, metadata: dict[bytes, bytes] | None = None
) -> str:
    """Rewrite a shard's table, row groups as they were, and name it right; returns its new path."""
    entry = manifest_of(out)["shards"][shard]
    old = pq.ParquetFile(out / entry["path"])
    table = change(old.read())
    keep = {**old.schema_arrow.metadata, **(metadata or {})}
    table = table.replace_schema_metadata(keep)
    size = old.metadata.row_group(0).num_rows
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=size, compression="zstd", write_page_checksum=True, use_dictionary=False)
    data = sink.getvalue().to_pybytes()
    path = f"{entry['path'].rsplit('-', 1)[0]}-{sha(data)[:12]}.parquet"
    (out / entry["path"]).unlink()
    (out / path).write_bytes(data)
    edit_manifest(out, lambda m: m["shards"][shard].update(path=path, size_bytes=len(data), sha256=sha(data)))
    rename_in_packs_table(out, entry["path"], path)
    return path


def edit_rows(out: Path, shard: int, change: Callable[[Rows], Any]) -> str:
    """Change a shard's packs as plain Python values; returns its new path."""

    def rewrite(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        change(rows)
        return pa.Table.from_pylist(rows, schema=table.schema)

    return edit_table(out, shard, rewrite)


def edit_named(out: Path, key: Callable[[dict[str, Any]], dict[str, Any]], change: Callable[[Rows], Any]) -> None:
    """Change the rows of a reject file or a table and make its entry right; `key` finds the entry."""
    path = key(manifest_of(out))["path"]
    table = pq.read_table(out / path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), out / path)
    data = (out / path).read_bytes()
    edit_manifest(out, lambda m: key(m).update(size_bytes=len(data), sha256=sha(data)))


def rename_in_packs_table(out: Path, old: str, new: str) -> None:
    """The packs table names shards by path; let it follow."""

    def change(rows: Rows) -> None:
        for row in rows:
            row["shard"] = new if row["shard"] == old else row["shard"]

    edit_named(out, lambda m: m["tables"]["packs"], change)
