"""Small packed outputs for tests, written through shards and assemble alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packsvc.assemble import assemble
from packsvc.plan import place
from packsvc.shards import (
    PACK_KEYS,
    TOTAL_KEYS,
    Manifest,
    ShardEntry,
    ShardMeta,
    shard_file_name,
    shard_name,
    write_shard,
)
from packsvc.types import Counts, EncodedBatch, PackColumns, Placement, TokenizerFacts

PAD = 3
VOCAB = 500


@dataclass
class Written:
    """An output, and what was put into it."""

    path: str
    manifest: Manifest
    packs: list[PackColumns]
    """One pack each, in manifest order."""


def encoded(lengths: list[int], *, seed: int = 0, weights: bool = False, trained: float = 0.5) -> EncodedBatch:
    """Random segments; token values are above PAD, the first token is never trained, the last always is."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    mask = rng.random(offsets[-1]) < trained
    mask[offsets[1:] - 1] = True
    mask[offsets[:-1]] = False
    return EncodedBatch(
        input_ids=rng.integers(PAD + 1, VOCAB, offsets[-1], dtype=np.int32),
        loss_mask=mask,
        loss_weight=np.where(mask, rng.choice([0.25, 1.0], offsets[-1]), 0).astype(np.float32) if weights else None,
        offsets=offsets,
        file=np.zeros(len(lengths), dtype=np.int32),
        row=np.arange(len(lengths), dtype=np.int64),
        part=np.zeros(len(lengths), dtype=np.int32),
        split=np.zeros(len(lengths), dtype=np.int16),
        rejects=[],
        counts=Counts(),
    )


def write_output(
    path: Path,
    shards: list[int],
    *,
    seq_len: int = 24,
    seed: int = 0,
    split: str = "train",
    weights: bool = False,
    align: int = 1,
    rows_per_group: int = 4,
    mean_length: int = 8,
    trained: float = 0.5,
    fingerprint: str = "a" * 64,
) -> Written:
    """An output with so many packs in each shard, made of random segments."""
    rng = np.random.default_rng(seed)
    wanted = sum(shards)
    lengths = [
        int(n) for n in rng.integers(2, max(3, min(seq_len, 2 * mean_length)), wanted * (seq_len // mean_length + 2))
    ]
    placement = place(lengths, seq_len, strategy="next_fit", align=align, seed=seed)
    assert placement.num_packs >= wanted
    batch = encoded(lengths, seed=seed, weights=weights, trained=trained)
    return write_packs(
        path,
        batch,
        placement,
        shards,
        seq_len=seq_len,
        split=split,
        align=align,
        rows_per_group=rows_per_group,
        fingerprint=fingerprint,
    )


def write_packs(
    path: Path,
    batch: EncodedBatch,
    placement: Placement,
    shards: list[int],
    *,
    seq_len: int,
    split: str = "train",
    align: int = 1,
    rows_per_group: int = 4,
    fingerprint: str = "a" * 64,
) -> Written:
    """An output of the first packs of a placement, so many in each shard."""
    plan_id = hashlib.sha256(f"{path.name}{len(batch.file)}".encode()).hexdigest()
    (path / "shards").mkdir(parents=True, exist_ok=True)
    entries, packs, first = [], [], 0
    for group, size in enumerate(shards):
        columns = [
            assemble(batch, placement, start=i, stop=i + 1, seq_len=seq_len, pad_id=PAD)
            for i in range(first, first + size)
        ]
        first += size
        packs += columns

        def chunks(columns: list[PackColumns] = columns) -> Iterator[PackColumns]:
            for i in range(0, len(columns), rows_per_group):
                yield joined(columns[i : i + rows_per_group])

        name = shard_name(split, group, 0)
        meta = ShardMeta(plan_id=plan_id, seq_len=seq_len, shard=name)
        data = write_shard(chunks(), meta=meta, compression="zstd:1", loss_weights=batch.loss_weight is not None)
        digest = hashlib.sha256(data).hexdigest()
        file_name = shard_file_name(name, digest)
        (path / file_name).write_bytes(data)
        entries.append(
            ShardEntry(
                path=file_name,
                split=split,
                size_bytes=len(data),
                sha256=digest,
                num_packs=size,
                num_segments=sum(int(c.num_segments[0]) for c in columns),
                num_tokens=sum(int(c.num_tokens[0]) for c in columns),
                num_loss_tokens=sum(int(c.num_loss_tokens[0]) for c in columns),
            )
        )
    manifest = _manifest(entries, plan_id=plan_id, seq_len=seq_len, align=align, split=split, fingerprint=fingerprint)
    written = Written(str(path), manifest, packs)
    write_manifest(written)
    return written


def write_manifest(written: Written, **changes: object) -> None:
    """Write `manifest.json`, with some fields changed."""
    manifest = replace(written.manifest, **changes)  # type: ignore[arg-type]
    Path(written.path, "manifest.json").write_text(json.dumps(manifest.to_json()))


def joined(columns: list[PackColumns]) -> PackColumns:
    """Packs of one each as one record."""

    def offsets(name: str) -> np.ndarray:
        sizes = [getattr(c, name)[1] for c in columns]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    names = [name for name in PackColumns.__slots__ if name not in ("cu_offsets", "segment_offsets", "loss_weight")]
    values = {name: np.concatenate([getattr(c, name) for c in columns]) for name in names}
    weight = None if columns[0].loss_weight is None else np.concatenate([c.loss_weight for c in columns])
    return PackColumns(
        loss_weight=weight, cu_offsets=offsets("cu_offsets"), segment_offsets=offsets("segment_offsets"), **values
    )


def _manifest(
    entries: list[ShardEntry], *, plan_id: str, seq_len: int, align: int, split: str, fingerprint: str
) -> Manifest:
    sums = {
        key: sum(getattr(e, f"num_{key}") for e in entries) for key in ("packs", "segments", "tokens", "loss_tokens")
    }
    packs = sums | {
        "padding_tokens": sums["packs"] * seq_len - sums["tokens"],
        "efficiency": sums["tokens"] / max(1, sums["packs"] * seq_len),
        "max_segments": 1,
        "max_segment_tokens": 1,
        "min_pack_tokens": 1,
        "sum_squared_lengths": 1,
    }
    rows = {key: 0 for key in TOTAL_KEYS if key not in PACK_KEYS}
    return Manifest(
        name="test",
        packsvc_version="0",
        plan_id=plan_id,
        seq_len=seq_len,
        align=align,
        seed=0,
        config={},
        versions={},
        tokenizer=TokenizerFacts(
            id="toy",
            revision=None,
            fingerprint=fingerprint,
            files_sha256={},
            template_sha256="",
            vocab_size=VOCAB,
            pad_id=PAD,
            stop_ids=[2],
            backend="test",
        ),
        inputs=(),
        shards=tuple(entries),
        rejects=(),
        totals=rows | {"rejected_by_reason": {}} | packs,
        splits={split: packs},
        sources={},
    )
