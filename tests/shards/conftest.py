"""Small packs, shards and manifests made on the spot."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packsvc.assemble import assemble
from packsvc.plan import place
from packsvc.shards import ShardEntry, ShardMeta, packs_per_row_group, shard_file_name, write_shard
from packsvc.storage import Store
from packsvc.types import Counts, EncodedBatch, PackColumns

PLAN_ID = "p" * 64


def make_batch(lengths: list[int], *, loss_weights: bool = False, seed: int = 0) -> EncodedBatch:
    """Segments of these lengths; every token has an id of its own kind, so that a shift by one is seen."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    num_tokens, num_segments = int(offsets[-1]), len(lengths)
    mask = rng.random(num_tokens) < 0.6
    mask[offsets[:-1]] = False
    weight = np.where(mask, rng.random(num_tokens), 0).astype(np.float32) if loss_weights else None
    return EncodedBatch(
        input_ids=np.arange(1, num_tokens + 1, dtype=np.int32),
        loss_mask=mask,
        loss_weight=weight,
        offsets=offsets,
        file=rng.integers(0, 3, num_segments).astype(np.int32),
        row=rng.integers(0, 2**40, num_segments).astype(np.int64),
        part=rng.integers(0, 4, num_segments).astype(np.int32),
        split=np.zeros(num_segments, dtype=np.int16),
        rejects=[],
        counts=Counts(),
    )


def make_packs(lengths: list[int], seq_len: int, *, loss_weights: bool = False) -> PackColumns:
    """The packs of segments of these lengths."""
    batch, placement = make_batch(lengths, loss_weights=loss_weights), place(lengths, seq_len)
    return assemble(batch, placement, start=0, stop=placement.num_packs, seq_len=seq_len, pad_id=0)


def put_shard(store: Store, data: bytes, packs: list[PackColumns], *, shard: str = "train-000000-000") -> ShardEntry:
    """Publish a shard and give its line in the manifest."""
    digest = hashlib.sha256(data).hexdigest()
    path = shard_file_name(shard, digest)
    store.publish(path, data)
    return ShardEntry(
        path=path,
        split=shard.split("-")[0],
        size_bytes=len(data),
        sha256=digest,
        num_packs=sum(chunk.num_packs for chunk in packs),
        num_segments=sum(int(chunk.num_segments.sum()) for chunk in packs),
        num_tokens=sum(int(chunk.num_tokens.sum()) for chunk in packs),
        num_loss_tokens=sum(int(chunk.num_loss_tokens.sum()) for chunk in packs),
    )


@pytest.fixture
def batch_of() -> Callable[..., EncodedBatch]:
    return make_batch


@pytest.fixture
def packs_of() -> Callable[..., PackColumns]:
    return make_packs


@pytest.fixture
def shard_in(tmp_path: Path) -> Callable[..., tuple[Store, ShardEntry, PackColumns, bytes]]:
    """Makes a shard of small row groups in a folder: store, entry, its packs, its bytes."""

    def make(
        lengths: list[int], seq_len: int, *, loss_weights: bool = False, compression: str = "zstd:1", group: int = 0
    ) -> tuple[Store, ShardEntry, PackColumns, bytes]:
        batch, placement = make_batch(lengths, loss_weights=loss_weights), place(lengths, seq_len)
        size = group or packs_per_row_group(seq_len)

        def cut(start: int, stop: int) -> PackColumns:
            return assemble(batch, placement, start=start, stop=stop, seq_len=seq_len, pad_id=0)

        chunks = [cut(i, min(i + size, placement.num_packs)) for i in range(0, placement.num_packs, size)]
        meta = ShardMeta(plan_id=PLAN_ID, seq_len=seq_len, shard="train-000000-000")
        data = write_shard(chunks, meta=meta, compression=compression, loss_weights=loss_weights)
        store = Store(str(tmp_path / "out"))
        return store, put_shard(store, data, chunks), cut(0, placement.num_packs), data

    return make


def same_packs(one: PackColumns, other: PackColumns) -> bool:
    """Equal in every array, dtype included."""
    pairs: list[tuple[Any, Any]] = [(getattr(one, name), getattr(other, name)) for name in PackColumns.__slots__]
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in pairs
    )


@pytest.fixture
def equal_packs() -> Callable[[PackColumns, PackColumns], bool]:
    return same_packs
