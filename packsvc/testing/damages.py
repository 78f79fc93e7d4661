"""Batches damaged on purpose, each in one way: what a team's own checks should see failing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from packsvc.stream import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One way to be wrong."""

    name: str
    what: str
    seen_by: str
    """Name of the assertion of this room that fails on it."""
    apply: Callable[[PackedBatch], PackedBatch]
    """Gives the damaged batch; the other stays as it was. Needs two segments of at least three tokens."""


def _boundary_off_by_one(batch: PackedBatch) -> PackedBatch:
    cu = batch.cu_seqlens.clone()
    cu[1] += 1
    return replace(batch, cu_seqlens=cu, max_seqlen=int(cu.diff().max()))


def _boundary_lost(batch: PackedBatch) -> PackedBatch:
    cu = torch.cat([batch.cu_seqlens[:1], batch.cu_seqlens[2:]])
    return replace(batch, cu_seqlens=cu, max_seqlen=int(cu.diff().max()))


def _empty_segment(batch: PackedBatch) -> PackedBatch:
    return replace(batch, cu_seqlens=torch.cat([batch.cu_seqlens[:2], batch.cu_seqlens[1:]]))


def _tail_not_covered(batch: PackedBatch) -> PackedBatch:
    cu = batch.cu_seqlens.clone()
    cu[-1] -= 1
    return replace(batch, cu_seqlens=cu)


def _positions_run_on(batch: PackedBatch) -> PackedBatch:
    return replace(batch, position_ids=torch.arange(len(batch.input_ids), dtype=torch.int32))


def _segment_numbers_lost(batch: PackedBatch) -> PackedBatch:
    return replace(batch, seq_idx=torch.zeros_like(batch.seq_idx))


def _max_seqlen_is_capacity(batch: PackedBatch) -> PackedBatch:
    return replace(batch, max_seqlen=len(batch.input_ids))


def _loss_on_start(batch: PackedBatch) -> PackedBatch:
    labels, at = batch.labels.clone(), int(batch.cu_seqlens[1])
    labels[at] = batch.input_ids[at]
    return replace(batch, labels=labels, num_loss_tokens=batch.num_loss_tokens + 1)


def _loss_on_padding(batch: PackedBatch) -> PackedBatch:
    pad = torch.full((2,), -1, dtype=torch.int32)
    end = int(batch.cu_seqlens[-1])
    tail = torch.cat([batch.cu_seqlens, torch.tensor([end + 2], dtype=torch.int32)])
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, torch.zeros_like(pad)]),
        position_ids=torch.cat([batch.position_ids, torch.arange(2, dtype=torch.int32)]),
        labels=torch.cat([batch.labels, pad.new_tensor([-100, 0])]),
        cu_seqlens=tail,
        max_seqlen=int(tail.diff().max()),
        seq_idx=torch.cat([batch.seq_idx, pad.new_full((2,), len(tail) - 2)]),
        padding_mask=torch.cat([batch.padding_mask, torch.ones(2, dtype=torch.bool)]),
        num_loss_tokens=batch.num_loss_tokens + 1,
    )


def _labels_shifted(batch: PackedBatch) -> PackedBatch:
    shifted = torch.full_like(batch.labels, -100)
    shifted[:-1] = batch.labels[1:]
    return replace(batch, labels=shifted)


def _segment_without_target(batch: PackedBatch) -> PackedBatch:
    labels, end = batch.labels.clone(), int(batch.cu_seqlens[1])
    lost = int((labels[:end] != -100).sum())
    labels[:end] = -100
    return replace(batch, labels=labels, num_loss_tokens=batch.num_loss_tokens - lost)


def _count_wrong(batch: PackedBatch) -> PackedBatch:
    return replace(batch, num_loss_tokens=batch.num_loss_tokens + 1)


_ALL = [
    ("boundary_off_by_one", "a boundary one token late", "assert_boundaries", _boundary_off_by_one),
    ("boundary_lost", "the first boundary missing from cu_seqlens", "assert_boundaries", _boundary_lost),
    ("empty_segment", "a boundary twice", "assert_boundaries", _empty_segment),
    ("tail_not_covered", "the last token beyond the last boundary", "assert_boundaries", _tail_not_covered),
    ("positions_run_on", "position_ids that do not restart", "assert_boundaries", _positions_run_on),
    ("segment_numbers_lost", "seq_idx all 0", "assert_boundaries", _segment_numbers_lost),
    ("max_seqlen_is_capacity", "the row's length as the longest segment", "assert_boundaries", _max_seqlen_is_capacity),
    ("loss_on_start", "a target on a segment's first token", "assert_mask", _loss_on_start),
    ("loss_on_padding", "a target on the padding tail", "assert_mask", _loss_on_padding),
    ("labels_shifted", "labels moved by one, to be shifted again by the model", "assert_mask", _labels_shifted),
    ("segment_without_target", "a segment that trains nothing", "assert_mask", _segment_without_target),
    ("count_wrong", "one target more stated than there is", "assert_mask", _count_wrong),
]
DAMAGES: dict[str, Damage] = {
    name: Damage(name=name, what=what, seen_by=seen_by, apply=apply) for name, what, seen_by, apply in _ALL
}
"""Every damage by its name."""
