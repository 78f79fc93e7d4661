"""Packed outputs made directly from segments, without a run: shards, rejects, tables, plan and manifest.

Everything in the manifest is summed here the slow, obvious way, row by row and segment by segment, so that it is
independent of both the run and the validation.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packsvc.assemble import assemble
from packsvc.config import PackJob, parse_job
from packsvc.plan import place
from packsvc.shards import Manifest, ShardMeta, shard_file_name, shard_name, write_rejects, write_shard
from packsvc.types import Counts, EncodedBatch, InputFile, Placement, Reason, Reject, TokenizerFacts

VOCAB, PAD = 1000, 7
PACKS_PER_SHARD, PACKS_PER_ROW_GROUP = 6, 4
FACTS = TokenizerFacts(
    id="./tokenizer",
    revision=None,
    fingerprint="f" * 64,
    files_sha256={"tokenizer.json": "a" * 64},
    template_sha256="b" * 64,
    vocab_size=VOCAB,
    pad_id=PAD,
    stop_ids=[3],
    backend="none",
)


def job_of(folder: Path, **changes: Any) -> PackJob:
    """Three sources of three weights, two splits."""
    tree: dict[str, Any] = {
        "name": "made",
        "tokenizer": "./tokenizer",
        "sources": [
            {"path": "data/a*.jsonl", "name": "a"},
            {"path": "data/b.parquet", "name": "b", "weight": 2},
            {"path": "data/c.parquet", "name": "c", "weight": 1.5},
        ],
        "seq_len": 32,
        "splits": {"train": 0.8, "valid": 0.2},
        "output": "out",
        "limits": {"max_reject_fraction": 1.0},
    }
    return parse_job({**tree, **changes}, base=folder)


def make_output(root: Path, *, seed: int = 0, rows: int = 30, **changes: Any) -> Path:
    """A packed output of random segments under `root`/out; `changes` go into the job."""
    made = _make_once(seed, rows, json.dumps(changes, sort_keys=True))
    shutil.copytree(made, root / "out")
    return root / "out"


@functools.cache
def _make_once(seed: int, rows: int, changes: str) -> Path:
    folder = tempfile.mkdtemp(prefix="packsvc-made-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    root = Path(folder)
    job = job_of(root, **json.loads(changes))
    rng = np.random.default_rng(seed)
    inputs = [
        InputFile(
            path=path,
            url=str(root / path),
            source=source,
            size_bytes=100 * rows,
            num_rows=rows,
            num_lines=rows + 2 if path.endswith(".jsonl") else rows,
            mtime=1.0,
        )
        for source, path in (
            ("a", "data/a0.jsonl"),
            ("a", "data/a1.jsonl"),
            ("b", "data/b.parquet"),
            ("c", "data/c.parquet"),
        )
    ]
    batch, copies, counts, rejects = random_rows(rng, job, inputs)
    return write_output(
        root / "out", job=job, inputs=inputs, batch=batch, copies=copies, counts=counts, rejects=rejects
    )


def random_rows(
    rng: np.random.Generator, job: PackJob, inputs: Sequence[InputFile]
) -> tuple[EncodedBatch, list[int], dict[str, Counts], list[Reject]]:
    """Every row packed (in one to three parts), refused whole or in part, filtered or left out."""
    weights = {s.name: s.weight for s in job.sources}
    counts = {s.name: Counts() for s in job.sources}
    rejects: list[Reject] = []
    segments: list[dict[str, Any]] = []
    copies: list[int] = []
    for index, file in enumerate(inputs):
        count = counts[file.source]
        for row in range(file.num_rows or 0):
            count.rows += 1
            fate = rng.choice(["one", "parts", "reject", "filter", "leave"], p=[0.6, 0.2, 0.1, 0.05, 0.05])
            if fate == "filter":
                count.filtered += 1
            elif fate == "leave":
                count.left_out += 1
            elif fate == "reject":
                reason = [Reason.OVERLONG, Reason.EMPTY][int(rng.integers(2))]
                _reject(rejects, count, index, row, None, file.source, reason)
                tokens = int(rng.integers(33, 60)) if reason is Reason.OVERLONG else 0
                count.encoded_tokens += tokens
                count.rejected_tokens += tokens
            else:
                parts = 1 if fate == "one" else int(rng.integers(2, 4))
                refused = int(rng.integers(parts)) if fate == "parts" and rng.random() < 0.3 else None
                weight = weights[file.source]
                often = int(weight) + (rng.random() < weight % 1)
                split = int(rng.random() < 0.3) % len(job.splits)
                count.packed += 1
                for part in range(parts):
                    length = int(rng.integers(2, 20))
                    count.encoded_tokens += length
                    if part == refused:
                        _reject(rejects, count, index, row, part, file.source, Reason.NO_TRAINED_TOKENS)
                        count.rejected_tokens += length
                        continue
                    count.repeated_tokens += (often - 1) * length
                    copies.append(often)
                    segments.append(_segment(rng, index, row, part, split, length))
    return batch_of(segments, loss_weights=job.loss_weights), copies, counts, rejects


def _reject(
    rejects: list[Reject], count: Counts, file: int, row: int, part: int | None, source: str, reason: Reason
) -> None:
    rejects.append(
        Reject(file=file, row=row, part=part, source=source, reason=reason, detail="made", record='{"made": true}')
    )
    if part is None:
        count.rejected += 1
        count.rejected_by_reason[reason.value] = count.rejected_by_reason.get(reason.value, 0) + 1
    else:
        count.rejected_parts += 1


def _segment(rng: np.random.Generator, file: int, row: int, part: int, split: int, length: int) -> dict[str, Any]:
    mask = rng.random(length) < 0.5
    mask[0], mask[-1] = False, True
    weight = np.where(mask, rng.choice([0.25, 0.5, 1.0], length), 0).astype(np.float32)
    ids = rng.integers(0, VOCAB, length).astype(np.int32)
    return {"ids": ids, "mask": mask, "weight": weight, "file": file, "row": row, "part": part, "split": split}


def batch_of(segments: Sequence[Mapping[str, Any]], *, loss_weights: bool) -> EncodedBatch:
    """Segments as a batch."""
    lengths = [len(s["ids"]) for s in segments]
    return EncodedBatch(
        input_ids=np.concatenate([s["ids"] for s in segments]),
        loss_mask=np.concatenate([s["mask"] for s in segments]),
        loss_weight=np.concatenate([s["weight"] for s in segments]) if loss_weights else None,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        file=np.array([s["file"] for s in segments], np.int32),
        row=np.array([s["row"] for s in segments], np.int64),
        part=np.array([s["part"] for s in segments], np.int32),
        split=np.array([s["split"] for s in segments], np.int16),
        rejects=[],
        counts=Counts(),
    )


def write_output(
    out: Path,
    *,
    job: PackJob,
    inputs: Sequence[InputFile],
    batch: EncodedBatch,
    copies: Sequence[int],
    counts: Mapping[str, Counts],
    rejects: Sequence[Reject],
    facts: TokenizerFacts = FACTS,
    encoder: Mapping[str, Any] | None = None,
    readings: Mapping[str, Any] | None = None,
    groups: Sequence[Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    """Write everything that a finished run leaves behind. Rows go to two groups by their number's parity."""
    out.mkdir(parents=True)
    plan_id = hashlib.sha256(json.dumps(job.identity(), sort_keys=True).encode()).hexdigest()
    plan = {
        "format": 1,
        "plan_id": plan_id,
        "config": job.dump(),
        "base": job.base,
        "limit": None,
        "versions": {"packsvc": "0.1.0"},
        "encoder": dict(encoder or {"facts": asdict(facts)}),
        "readings": dict(readings or {}),
        "inputs": [asdict(file) for file in inputs],
        "groups": groups or [[{"file": i, "kind": "whole", "num_rows": f.num_rows} for i, f in enumerate(inputs)]],
    }
    (out / "plan.json").write_text(json.dumps(plan))
    order = np.repeat(np.arange(batch.num_segments), np.array(copies, np.int64))
    lengths = np.diff(batch.offsets)
    shards = []
    for split, name in enumerate(job.split_names):
        for group in range(2):
            mine = order[(batch.split[order] == split) & (batch.row[order] % 2 == group)]
            if len(mine):
                shards += _shards(out, job, plan_id, name, group, batch, mine, lengths, facts.pad_id)
    reject_entries = []
    (out / "rejects").mkdir()
    if rejects:
        data = write_rejects(rejects)
        (out / "rejects/000000.parquet").write_bytes(data)
        entry = {
            "path": "rejects/000000.parquet",
            "size_bytes": len(data),
            "sha256": sha(data),
            "num_rows": len(rejects),
        }
        reject_entries.append(entry)
    manifest = {
        "format": 1,
        "name": job.name,
        "packsvc_version": "0.1.0",
        "plan_id": plan_id,
        "seq_len": job.seq_len,
        "align": job.packing.align,
        "seed": job.seed,
        "config": job.dump(),
        "versions": plan["versions"],
        "tokenizer": asdict(facts),
        "inputs": [
            {
                k: v
                for k, v in asdict(file).items()
                if k in ("path", "source", "size_bytes", "etag", "mtime", "num_rows", "num_lines")
            }
            for file in inputs
        ],
        "shards": shards,
        "rejects": reject_entries,
        **sums(job, shards, batch, order, counts, inputs),
        "tables": tables(out, job, shards, batch, order, inputs),
    }
    (out / "manifest.json").write_text(json.dumps(manifest))
    Manifest.load(str(out))
    return out


def _shards(
    out: Path,
    job: PackJob,
    plan_id: str,
    split: str,
    group: int,
    batch: EncodedBatch,
    mine: np.ndarray,
    lengths: np.ndarray,
    pad_id: int,
) -> list[dict[str, Any]]:
    packing = job.packing
    placed = place(lengths[mine], job.seq_len, max_segments=packing.max_segments, align=packing.align, seed=group)
    placement = Placement(order=mine[placed.order], pack_offsets=placed.pack_offsets)
    (out / "shards").mkdir(exist_ok=True)
    entries = []
    for k, start in enumerate(range(0, placement.num_packs, PACKS_PER_SHARD)):
        stop = min(start + PACKS_PER_SHARD, placement.num_packs)
        chunks = [
            assemble(
                batch,
                placement,
                start=at,
                stop=min(at + PACKS_PER_ROW_GROUP, stop),
                seq_len=job.seq_len,
                pad_id=pad_id,
            )
            for at in range(start, stop, PACKS_PER_ROW_GROUP)
        ]
        name = shard_name(split, group, k)
        meta = ShardMeta(plan_id=plan_id, seq_len=job.seq_len, shard=name)
        data = write_shard(chunks, meta=meta, compression=job.compression, loss_weights=job.loss_weights)
        path = shard_file_name(name, sha(data))
        (out / path).write_bytes(data)
        entries.append({"path": path, "split": split, "size_bytes": len(data), "sha256": sha(data), **facts_of(data)})
    return entries


def facts_of(data: bytes) -> dict[str, int]:
    """Counts of a shard, from its small columns."""
    rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    longest = [
        b - a
        for r in rows
        for a, b in list(zip(r["cu_seqlens"], r["cu_seqlens"][1:], strict=False))[: r["num_segments"]]
    ]
    return {
        "num_packs": len(rows),
        "num_segments": sum(r["num_segments"] for r in rows),
        "num_tokens": sum(r["num_tokens"] for r in rows),
        "num_loss_tokens": sum(r["num_loss_tokens"] for r in rows),
        "sum_squared_lengths": sum(r["sum_squared_lengths"] for r in rows),
        "max_segments": max(r["num_segments"] for r in rows),
        "max_segment_tokens": max(longest),
        "min_pack_tokens": min(r["num_tokens"] for r in rows),
    }


def sums(
    job: PackJob,
    shards: Sequence[Mapping[str, Any]],
    batch: EncodedBatch,
    order: np.ndarray,
    counts: Mapping[str, Counts],
    inputs: Sequence[InputFile],
) -> dict[str, Any]:
    """`totals`, `splits` and `sources` of the manifest."""
    sources: dict[str, dict[str, Any]] = {}
    for name, count in counts.items():
        found = {"segments": 0, "tokens": 0, "loss_tokens": 0, "max_segment_tokens": 0, "sum_squared_lengths": 0}
        for i in order.tolist():
            if inputs[batch.file[i]].source == name:
                start, stop = int(batch.offsets[i]), int(batch.offsets[i + 1])
                found["segments"] += 1
                found["tokens"] += stop - start
                found["loss_tokens"] += int(batch.loss_mask[start:stop].sum())
                found["max_segment_tokens"] = max(found["max_segment_tokens"], stop - start)
                found["sum_squared_lengths"] += (stop - start) ** 2
        sources[name] = {**asdict(count), **found}
    total = Counts()
    for count in counts.values():
        total.add(count)
    return {
        "totals": {**asdict(total), **_pack_sums(job, shards)},
        "splits": {name: _pack_sums(job, [s for s in shards if s["split"] == name]) for name in job.split_names},
        "sources": sources,
    }


def _pack_sums(job: PackJob, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    packs, tokens = sum(s["num_packs"] for s in shards), sum(s["num_tokens"] for s in shards)
    return {
        "packs": packs,
        "segments": sum(s["num_segments"] for s in shards),
        "tokens": tokens,
        "loss_tokens": sum(s["num_loss_tokens"] for s in shards),
        "padding_tokens": packs * job.seq_len - tokens,
        "efficiency": tokens / (packs * job.seq_len) if packs else 0.0,
        "max_segments": max((s["max_segments"] for s in shards), default=0),
        "max_segment_tokens": max((s["max_segment_tokens"] for s in shards), default=0),
        "min_pack_tokens": min((s["min_pack_tokens"] for s in shards), default=0),
        "sum_squared_lengths": sum(s["sum_squared_lengths"] for s in shards),
    }


def tables(
    out: Path,
    job: PackJob,
    shards: Sequence[Mapping[str, Any]],
    batch: EncodedBatch,
    order: np.ndarray,
    inputs: Sequence[InputFile],
) -> dict[str, Any]:
    """packs.parquet and lengths.parquet, and their entries."""
    packs: list[dict[str, Any]] = []
    for shard in shards:
        for row in pq.read_table(out / shard["path"]).to_pylist():
            packs.append(
                {
                    "pack": len(packs),
                    "shard": shard["path"],
                    "group": int(shard["path"].split("-")[1]),
                    "num_segments": row["num_segments"],
                    "num_tokens": row["num_tokens"],
                    "num_loss_tokens": row["num_loss_tokens"],
                    "padding": job.seq_len - row["num_tokens"],
                    "efficiency": row["num_tokens"] / job.seq_len,
                    "sum_squared_lengths": row["sum_squared_lengths"],
                }
            )
    lengths: dict[tuple[str, str, int], int] = {}
    for i in order.tolist():
        key = (job.split_names[batch.split[i]], inputs[batch.file[i]].source, int(np.diff(batch.offsets)[i]))
        lengths[key] = lengths.get(key, 0) + 1
    types = {"pack": pa.int64(), "shard": pa.string(), "efficiency": pa.float64(), "sum_squared_lengths": pa.int64()}
    pack_table = pa.Table.from_pylist(packs, pa.schema([(k, types.get(k, pa.int32())) for k in packs[0]]))
    length_schema = pa.schema(
        [("split", pa.string()), ("source", pa.string()), ("length", pa.int32()), ("examples", pa.int64())]
    )
    rows = [{"split": k[0], "source": k[1], "length": k[2], "examples": n} for k, n in sorted(lengths.items())]
    entries = {}
    for name, table in (("packs", pack_table), ("lengths", pa.Table.from_pylist(rows, length_schema))):
        pq.write_table(table, out / f"{name}.parquet")
        entries[name] = table_entry(out, f"{name}.parquet")
    return entries


def table_entry(out: Path, path: str) -> dict[str, Any]:
    """How a manifest names a file."""
    data = (out / path).read_bytes()
    return {"path": path, "size_bytes": len(data), "sha256": sha(data)}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
