"""What a group's commit says of its segments: counts by source, by length, and of the packs of a shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.config import PackJob
from packsvc.run.planfile import Plan
from packsvc.types import Counts, EncodedBatch, Placement

COUNT_TOKENS = 1 << 20


def source_records(
    plan: Plan,
    batch: EncodedBatch,
    repeats: NDArray[np.int64],
    counts: Mapping[str, Counts],
) -> dict[str, Any]:
    """Counts of rows, segments and tokens by source; what is sent to the last round is in them."""
    lengths = np.diff(batch.offsets)
    loss = loss_counts(batch)
    by_file = {i: f.source for i, f in enumerate(plan.inputs)}
    names = np.array([by_file[int(f)] for f in np.unique(batch.file)], dtype=object)
    which = names[np.searchsorted(np.unique(batch.file), batch.file)] if len(names) else np.zeros(0, object)
    out: dict[str, Any] = {}
    for name, c in sorted(counts.items()):
        mine = which == name
        out[name] = {
            **asdict(c),
            "rejected_by_reason": dict(sorted(c.rejected_by_reason.items())),
            "segments": int(repeats[mine].sum()),
            "tokens": int((repeats * lengths)[mine].sum()),
            "loss_tokens": int((repeats * loss)[mine].sum()),
            "max_segment_tokens": int(lengths[mine].max(initial=0)),
            "sum_squared_lengths": int((repeats * lengths * lengths)[mine].sum()),
        }
    return out


def loss_counts(batch: EncodedBatch) -> NDArray[np.int64]:
    """(S,) trained tokens of each segment; a part of the tokens at a time, since `reduceat` copies what it casts."""
    marks = np.searchsorted(batch.offsets, np.arange(0, batch.offsets[-1], COUNT_TOKENS))
    bounds = np.unique([0, *marks, batch.num_segments])
    out = np.zeros(batch.num_segments, np.int64)
    for start, stop in pairwise(bounds):
        at = batch.offsets[start : stop + 1]
        out[start:stop] = np.add.reduceat(batch.loss_mask[at[0] : at[-1]], at[:-1] - at[0], dtype=np.int64)
    return out


def length_rows(plan: Plan, job: PackJob, batch: EncodedBatch, order: NDArray[np.int64]) -> list[list[Any]]:
    """[split, source, length, examples] of all segments, sorted."""
    lengths = np.diff(batch.offsets)[order]
    names = sorted({f.source for f in plan.inputs})
    source_of_file = np.array([names.index(f.source) for f in plan.inputs], np.int64)
    keys = np.stack([batch.split[order].astype(np.int64), source_of_file[batch.file[order]], lengths], axis=1)
    found, examples = np.unique(keys, axis=0, return_counts=True) if len(keys) else (keys, np.zeros(0, np.int64))
    splits = job.split_names
    return [[splits[s], names[n], int(length), int(e)] for (s, n, length), e in zip(found, examples, strict=True)]


def shard_facts(
    lengths: NDArray[np.int64], loss: NDArray[np.int64], placement: Placement, start: int, stop: int
) -> dict[str, int]:
    """Counts of packs [start, stop), from the tokens and the trained tokens of every segment."""
    bounds = placement.pack_offsets[start : stop + 1]
    segments = placement.order[bounds[0] : bounds[-1]]
    lengths, loss = lengths[segments], loss[segments]
    tokens = np.add.reduceat(lengths, bounds[:-1] - bounds[0])
    return {
        "num_packs": stop - start,
        "num_segments": len(segments),
        "num_tokens": int(lengths.sum()),
        "num_loss_tokens": int(loss.sum()),
        "sum_squared_lengths": int((lengths * lengths).sum()),
        "max_segments": int(np.diff(bounds).max()),
        "max_segment_tokens": int(lengths.max()),
        "min_pack_tokens": int(tokens.min()),
    }
