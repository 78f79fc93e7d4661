"""Packs of a finished output, taken apart into their segments again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packsvc.encode import merge_batches
from packsvc.errors import StateError
from packsvc.run.planfile import Plan
from packsvc.shards import Manifest, ShardReader
from packsvc.storage import Store
from packsvc.types import Counts, EncodedBatch, PackColumns, Piece


def take_apart(packs: PackColumns, *, split: int) -> EncodedBatch:
    """The real segments of packs, in pack order, without padding.

    Args:
        packs: P packs, S segments.
        split: Index of the split that they belong to.
    """
    real = np.arange(packs.input_ids.shape[1]) < packs.num_tokens[:, None]
    within_pack = np.arange(len(packs.cu_seqlens)) - np.repeat(packs.cu_offsets[:-1], np.diff(packs.cu_offsets))
    starts = within_pack < np.repeat(packs.num_segments, np.diff(packs.cu_offsets))
    lengths = np.diff(packs.cu_seqlens, append=0)[starts]
    num_segments = len(packs.segment_file)
    return EncodedBatch(
        input_ids=packs.input_ids[real],
        loss_mask=packs.loss_mask[real],
        loss_weight=None if packs.loss_weight is None else packs.loss_weight[real],
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        file=packs.segment_file,
        row=packs.segment_row,
        part=packs.segment_part,
        split=np.full(num_segments, split, np.int16),
        rejects=[],
        counts=Counts(),
    )


def read_packs(
    plan: Plan, pieces: Sequence[Piece], *, storage_options: Mapping[str, Any] | None = None
) -> EncodedBatch:
    """The segments of the packs that the pieces name.

    Raises:
        StateError: The other output is not what the plan was made from.
    """
    assert plan.repacked is not None
    store = Store(plan.repacked["url"], storage_options=storage_options)
    manifest = Manifest.load(store)
    if manifest.digest != plan.repacked["digest"]:
        raise StateError(f"{store.url}: its shards changed since the plan to pack them again was made")
    splits = plan.job.split_names

    def read(piece: Piece) -> EncodedBatch:
        entry = manifest.shards[piece.file]
        with ShardReader.of(store, entry, manifest) as reader:
            packs = reader.read(piece.start, piece.stop)
        return take_apart(packs, split=splits.index(entry.split))

    return merge_batches(map(read, pieces))
