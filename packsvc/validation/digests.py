"""A 64-bit digest of every segment, so that a whole set is compared with its sources without random access.

Rows of an input are spread over all shards. To compare each with a fresh encode one would have to read shards at
random, or hold all tokens. Instead the one pass over the shards keeps a digest of each segment's ids, mask and
weights, and the pass over the sources keeps none: it looks up. The digest is a multilinear hash modulo 2^64 with
random odd multipliers by position: segments that differ in one token never collide, those that differ in several
with a chance below 2^-30. Price: 36 bytes a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from packsvc.validation.geometry import Layout
from packsvc.validation.shard_file import Chunk, offsets_of

ROW_BITS = 40
"""Rows of an input fit these bits of a row key, inputs the ones above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which segments to digest."""

    row_keys: NDArray[np.int64] | None
    """Sorted keys of rows; None: all."""

    def choose(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys are wanted."""
        if self.row_keys is None:
            return np.ones(len(keys), dtype=np.bool_)
        return is_among(keys, self.row_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentDigests:
    """Digests of S segments and where they stand."""

    row_key: NDArray[np.int64]
    part: NDArray[np.int32]
    digest: NDArray[np.uint64]
    shard: NDArray[np.int32]
    """Number in the manifest."""
    pack: NDArray[np.int64]
    """Over all shards."""
    segment: NDArray[np.int32]
    """Inside the pack."""

    @staticmethod
    def join(parts: Sequence[SegmentDigests]) -> SegmentDigests:
        """Those of several chunks, in order."""
        return SegmentDigests(
            row_key=np.concatenate([np.zeros(0, np.int64)] + [p.row_key for p in parts]),
            part=np.concatenate([np.zeros(0, np.int32)] + [p.part for p in parts]),
            digest=np.concatenate([np.zeros(0, np.uint64)] + [p.digest for p in parts]),
            shard=np.concatenate([np.zeros(0, np.int32)] + [p.shard for p in parts]),
            pack=np.concatenate([np.zeros(0, np.int64)] + [p.pack for p in parts]),
            segment=np.concatenate([np.zeros(0, np.int32)] + [p.segment for p in parts]),
        )

    def sorted(self) -> SegmentDigests:
        """By row, then part, then place."""
        order = np.lexsort((self.part, self.row_key))
        return SegmentDigests(
            row_key=self.row_key[order],
            part=self.part[order],
            digest=self.digest[order],
            shard=self.shard[order],
            pack=self.pack[order],
            segment=self.segment[order],
        )


def row_keys(file: NDArray[np.int32], row: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each (file, row)."""
    return (file.astype(np.int64) << ROW_BITS) | row


def is_among(values: NDArray[np.int64], ordered: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the values stand in a sorted array."""
    if not len(ordered):
        return np.zeros(len(values), dtype=np.bool_)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    found: NDArray[np.bool_] = ordered[at] == values
    return found


def digests_of(chunk: Chunk, layout: Layout, wanted: Wanted, *, known: NDArray[np.bool_], shard: int) -> SegmentDigests:
    """Digests of a chunk's wanted segments; `known` marks those whose origin exists."""
    packs = chunk.packs
    keys = row_keys(packs.segment_file, packs.segment_row)
    chosen = known & wanted.choose(keys)
    starts, lengths = layout.starts[layout.real][chosen], layout.lengths[layout.real][chosen]
    at = np.repeat(starts - offsets_of(lengths)[:-1], lengths) + np.arange(int(lengths.sum()))
    weight = packs.loss_weight
    return SegmentDigests(
        row_key=keys[chosen],
        part=packs.segment_part[chosen],
        digest=segment_digests(
            packs.input_ids.reshape(-1)[at],
            packs.loss_mask.reshape(-1)[at],
            None if weight is None else weight.reshape(-1)[at],
            offsets_of(lengths),
        ),
        shard=np.full(len(starts), shard, dtype=np.int32),
        pack=chunk.numbers[layout.pack[layout.real][chosen]],
        segment=layout.number[layout.real][chosen].astype(np.int32),
    )


def segment_digests(
    ids: NDArray[np.int32],
    mask: NDArray[np.bool_],
    weight: NDArray[np.float32] | None,
    offsets: NDArray[np.int64],
) -> NDArray[np.uint64]:
    """(S,) digests of segments that stand back to back; none may be empty."""
    lengths = np.diff(offsets)
    if not len(lengths):
        return np.zeros(0, dtype=np.uint64)
    value = (ids.view(np.uint32).astype(np.uint64) << np.uint64(1)) | mask
    if weight is not None:
        value ^= weight.view(np.uint32).astype(np.uint64) << np.uint64(32)
    position = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    factors = _factors(int(2 ** np.ceil(np.log2(max(2, lengths.max() + 1)))))
    sums: NDArray[np.uint64] = np.add.reduceat(value * factors[position], offsets[:-1])
    sums += lengths.astype(np.uint64) * factors[-1]
    return sums


@lru_cache(maxsize=4)
def _factors(size: int) -> NDArray[np.uint64]:
    """Random odd multipliers; those of a smaller size are the first of a larger one's, the last aside."""
    out = np.random.Generator(np.random.PCG64(0x5EED)).integers(0, 2**64, size=2**20, dtype=np.uint64) | np.uint64(1)
    while len(out) < size:
        out = np.concatenate((out, out * np.uint64(0x9E3779B97F4A7C15)))
    return np.append(out[:size], np.uint64(0xD1B54A32D192ED03))
