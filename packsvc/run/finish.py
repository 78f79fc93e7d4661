"""From the commits of all groups to the tables and the manifest, which is written last, once.

The manifest is made only when every group of the plan is committed, and only when the accounts close. Memory
is a few hundred bytes a shard and one count for each distinct length.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packsvc.errors import CheckError, ConflictError, DamageError
from packsvc.plan import permutation
from packsvc.run.group import commit_name
from packsvc.run.planfile import Plan
from packsvc.shards import Manifest, ShardReader
from packsvc.storage import Store

MANIFEST_NAME = "manifest.json"
PACKS_NAME = "packs.parquet"
LENGTHS_NAME = "lengths.parquet"
READ_THREADS = 16

_SUMS = ("segments", "tokens", "loss_tokens", "sum_squared_lengths")
_ROW_KEYS = (
    "rows",
    "packed",
    "rejected",
    "rejected_parts",
    "filtered",
    "left_out",
    "rejected_by_reason",
    "truncated",
    "split",
    "reasoning_dropped",
    "edge_tokens",
    "turns_without_stop",
)
_TOKEN_KEYS = ("encoded_tokens", "repeated_tokens", "cut_tokens", "rejected_tokens")


def read_commits(store: Store, groups: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The commit records of the groups, in order, a few at a time."""
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for start in range(0, len(groups), 256):
            names = [commit_name(group) for group in groups[start : start + 256]]
            for data in pool.map(store.read, names):
                yield json.loads(data)


def write_manifest(plan: Plan, groups: Sequence[int], store: Store) -> Manifest:
    """Sum the commits, write the tables, then the manifest.

    Args:
        groups: Every group of the run, those of the last round too; all are committed.

    Raises:
        CheckError: The accounts do not close: a bug, and no manifest is written.
        ConflictError: A manifest of other content is there.
    """
    plan = Plan.loads(plan.dumps())  # its keys in the order of the file, as a resumed run has them
    shards: list[dict[str, Any]] = []
    rejects: list[dict[str, Any]] = []
    sources: dict[str, dict[str, Any]] = {s.name: _empty_source() for s in plan.job.sources}
    lengths: dict[tuple[str, str, int], int] = {}
    audited = 0
    for commit in read_commits(store, groups):
        shards += [{**s, "group": commit["group"]} for s in commit["shards"]]
        rejects += [commit["rejects"]] if commit["rejects"] else []
        audited += commit["audited"]
        for name, counts in commit["sources"].items():
            _add(sources[name], counts)
        for split, source, length, examples in commit["lengths"]:
            lengths[split, source, length] = lengths.get((split, source, length), 0) + examples
    if plan.repacked is not None:
        # What became of rows was settled when the segments were made.
        sources = plan.repacked["sources"]
        rejects = list(plan.repacked["rejects"])
    order = permutation(len(shards), plan.job.seed, 2)
    shards = [shards[int(i)] for i in order]
    tree = _tree(plan, shards, rejects, sources, audited)
    check_accounts(tree["totals"])
    for name, source in tree["sources"].items():
        check_accounts(source, where=f"source {name}")
    manifest = Manifest.from_json(tree)
    tables = {
        "packs": _write_table(store, PACKS_NAME, _pack_tables(manifest, shards, store)),
        "lengths": _write_table(store, LENGTHS_NAME, [_length_table(lengths)]),
    }
    tree = {**tree, "tables": tables}
    data = json.dumps(tree, indent=1, ensure_ascii=False).encode() + b"\n"
    if not store.put_if_absent(MANIFEST_NAME, data) and json.loads(store.read(MANIFEST_NAME)) != tree:
        raise ConflictError(
            f"{store.describe(MANIFEST_NAME)}: a manifest with other content exists; it was not touched"
        )
    return Manifest.load(store)


def _tree(
    plan: Plan,
    shards: Sequence[Mapping[str, Any]],
    rejects: Sequence[Mapping[str, Any]],
    sources: Mapping[str, dict[str, Any]],
    audited: int,
) -> dict[str, Any]:
    facts = plan.encoder["facts"]
    seq_len = int(plan.config["seq_len"])
    totals = _empty_source()
    for source in sources.values():
        _add(totals, source)
    rows = {key: totals[key] for key in _ROW_KEYS}
    packs = pack_facts(shards, seq_len)
    return {
        "format": 1,
        "name": plan.config["name"],
        "packsvc_version": plan.versions["packsvc"],
        "plan_id": plan.plan_id,
        "seq_len": seq_len,
        "align": plan.config["packing"]["align"],
        "seed": plan.config["seed"],
        "limit": plan.limit,
        "config": plan.config,
        "versions": plan.versions,
        "tokenizer": facts,
        "encode": {key: value for key, value in plan.encoder.items() if key != "facts"},
        "audit": {"rows": audited, "differing": 0},
        "readings": plan.readings,
        **({} if plan.repacked is None else {"repacked": _from(plan.repacked)}),
        "inputs": [
            {
                "path": f.path,
                "source": f.source,
                "size_bytes": f.size_bytes,
                "etag": f.etag,
                "mtime": f.mtime,
                "num_rows": f.num_rows,
                "num_lines": f.num_lines,
            }
            for f in plan.inputs
        ],
        "shards": [{k: v for k, v in s.items() if k != "group"} for s in shards],
        "rejects": list(rejects),
        "totals": {**rows, **packs, **{key: totals[key] for key in _TOKEN_KEYS}},
        "splits": {
            name: pack_facts([s for s in shards if s["split"] == name], seq_len)
            for name in sorted(plan.config["splits"])
        },
        "sources": {name: dict(source) for name, source in sorted(sources.items())},
    }


def _from(repacked: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of the output that the segments came from."""
    return {key: value for key, value in repacked.items() if key not in ("sources", "rejects", "url")}


def pack_facts(shards: Sequence[Mapping[str, Any]], seq_len: int) -> dict[str, Any]:
    """The keys of totals that concern packs, from the entries of shards."""
    packs = sum(s["num_packs"] for s in shards)
    tokens = sum(s["num_tokens"] for s in shards)
    return {
        "packs": packs,
        "segments": sum(s["num_segments"] for s in shards),
        "tokens": tokens,
        "loss_tokens": sum(s["num_loss_tokens"] for s in shards),
        "padding_tokens": packs * seq_len - tokens,
        "efficiency": tokens / (packs * seq_len) if packs else 0.0,
        "max_segments": max((s["max_segments"] for s in shards), default=0),
        "max_segment_tokens": max((s["max_segment_tokens"] for s in shards), default=0),
        "min_pack_tokens": min((s["min_pack_tokens"] for s in shards), default=0),
        "sum_squared_lengths": sum(s["sum_squared_lengths"] for s in shards),
    }


def _empty_source() -> dict[str, Any]:
    out: dict[str, Any] = {key: {} if key == "rejected_by_reason" else 0 for key in _ROW_KEYS}
    return {**out, **dict.fromkeys((*_SUMS, "max_segment_tokens", *_TOKEN_KEYS), 0)}


def _add(into: dict[str, Any], counts: Mapping[str, Any]) -> None:
    for key in into:
        if key == "rejected_by_reason":
            for reason, n in counts[key].items():
                into[key][reason] = into[key].get(reason, 0) + n
            into[key] = dict(sorted(into[key].items()))
        elif key == "max_segment_tokens":
            into[key] = max(into[key], counts[key])
        else:
            into[key] += counts[key]


def check_accounts(totals: Mapping[str, Any], *, where: str = "totals") -> None:
    """Rows and tokens add up.

    Raises:
        CheckError: They do not, which only a bug can cause.
    """
    rows = totals["packed"] + totals["rejected"] + totals["filtered"] + totals["left_out"]
    made = totals["encoded_tokens"] + totals["repeated_tokens"]
    used = totals["tokens"] + totals["cut_tokens"] + totals["rejected_tokens"]
    reasons = sum(totals["rejected_by_reason"].values())
    if totals["rows"] != rows or totals["rejected"] != reasons:
        raise CheckError(
            f"{where}: {totals['rows']} rows were read, {rows} are accounted for ({reasons} rejected with a reason)"
        )
    if made != used:
        raise CheckError(f"{where}: {made} tokens were made, {used} are accounted for")


def _length_table(lengths: Mapping[tuple[str, str, int], int]) -> pa.Table:
    keys = sorted(lengths)
    return pa.table(
        {
            "split": pa.array([k[0] for k in keys], pa.string()),
            "source": pa.array([k[1] for k in keys], pa.string()),
            "length": pa.array([k[2] for k in keys], pa.int32()),
            "examples": pa.array([lengths[k] for k in keys], pa.int64()),
        }
    )


def _pack_tables(manifest: Manifest, shards: Sequence[Mapping[str, Any]], store: Store) -> Iterator[pa.Table]:
    """The `packs` table, a shard at a time, in manifest order, from the shards' small columns."""
    first = 0
    columns = ["num_segments", "num_tokens", "num_loss_tokens", "sum_squared_lengths"]
    for entry, shard in zip(manifest.shards, shards, strict=True):
        reader = ShardReader.of(store, entry, manifest)
        try:
            found = reader.table(columns)
        finally:
            reader.close()
        n = found.num_rows
        tokens = found.column("num_tokens").to_numpy()
        for key in ("num_segments", "num_tokens", "num_loss_tokens", "sum_squared_lengths"):
            if int(found.column(key).to_numpy().sum(dtype=np.int64)) != shard[key]:
                raise DamageError(f"{store.describe(entry.path)}: {key} is not what the commit of its group says")
        yield pa.table(
            {
                "pack": pa.array(np.arange(first, first + n, dtype=np.int64)),
                "shard": pa.array([entry.path] * n, pa.string()),
                "group": pa.array(np.full(n, shard["group"], np.int32)),
                "num_segments": found.column("num_segments"),
                "num_tokens": found.column("num_tokens"),
                "num_loss_tokens": found.column("num_loss_tokens"),
                "padding": pa.array((manifest.seq_len - tokens).astype(np.int32)),
                "efficiency": pa.array(tokens / manifest.seq_len, pa.float64()),
                "sum_squared_lengths": found.column("sum_squared_lengths"),
            }
        )
        first += n


def _write_table(store: Store, name: str, tables: Iterable[pa.Table]) -> dict[str, Any]:
    """Write a table through a local temporary file; returns path, size and sha256."""
    handle, path = tempfile.mkstemp(suffix=".tmp")
    os.close(handle)
    try:
        writer: pq.ParquetWriter | None = None
        for table in tables:
            if writer is None:
                writer = pq.ParquetWriter(path, table.schema, compression="zstd", write_page_checksum=True)
            writer.write_table(table)
        if writer is not None:
            writer.close()
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
        store.publish_file(name, path)
        return {"path": name, "size_bytes": os.path.getsize(path), "sha256": digest.hexdigest()}
    finally:
        os.unlink(path)
