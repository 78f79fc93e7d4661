"""Packs to one flattened batch: pure functions from arrays to arrays, no loop over tokens.

Every array is new, so that a batch kept in a list stays as it was. Positions and segment numbers are made from
the boundaries, one call for the whole batch: cheaper than decoding the stored column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from packsvc.stream.batch import PackedBatch, PackIndex
from packsvc.stream.options import Layout
from packsvc.stream.source import PackRow

IGNORED = -100
"""The label that PyTorch's cross entropy leaves out by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """What the row looks like, the same for every batch of a stream."""

    layout: Layout
    align: int
    seq_len: int
    pad_id: int


def collate(
    rows: Sequence[PackRow],
    *,
    shape: RowShape,
    pack_indices: Sequence[PackIndex],
    num_repeated_packs: int,
    num_loss_tokens_global: int,
) -> PackedBatch:
    """Flatten packs into one batch on the CPU.

    Args:
        rows: The packs, in order.
        shape: Layout and alignment.
        pack_indices: How the caller names the packs, in order.
        num_repeated_packs: So many packs at the end get no targets.
        num_loss_tokens_global: Targets of the global batch.
    """
    bounds = np.concatenate([row.boundaries for row in rows])
    sizes = [len(row.boundaries) - 1 for row in rows]
    ends = np.cumsum(sizes)
    # Between one pack's last boundary and the next one's first there is no segment.
    is_segment = np.ones(len(bounds) - 1, dtype=np.bool_)
    is_segment[(ends + np.arange(len(rows)))[:-1]] = False
    lengths = np.subtract(bounds[1:], bounds[:-1], dtype=np.int64)[is_segment]
    logical, physical = lengths, lengths
    if shape.align > 1:
        physical = -(-lengths // shape.align) * shape.align
    if shape.layout is Layout.PADDED:
        tails = shape.seq_len - np.add.reduceat(physical, ends - np.array(sizes))
        at, tails = ends[tails > 0], tails[tails > 0]
        physical, logical = np.insert(physical, at, tails), np.insert(logical, at, 0)
    cu = boundaries(physical)
    total = int(cu[-1])

    num_tokens = [int(row.boundaries[-1]) for row in rows]
    ids = np.concatenate([row.input_ids[:n] for row, n in zip(rows, num_tokens, strict=True)])
    on = np.concatenate([row.loss_mask[:n] for row, n in zip(rows, num_tokens, strict=True)])
    if num_repeated_packs:
        on[sum(num_tokens[: len(rows) - num_repeated_packs]) :] = False
    weights = None
    if all(row.loss_weight is not None for row in rows):
        stored = [row.loss_weight[:n] for row, n in zip(rows, num_tokens, strict=True) if row.loss_weight is not None]
        weights = np.where(on, np.concatenate(stored), np.float32(0))
    labels = ids - np.int32(IGNORED)
    labels *= on
    labels += np.int32(IGNORED)
    places = _places(cu, logical, len(ids))
    if isinstance(places, slice):
        padding, offsets = np.zeros(total, dtype=np.bool_), cu
    else:
        padding = np.ones(total, dtype=np.bool_)
        padding[places] = False
        # A tail is a segment of its own with no real token; for offsets it counts as long as it is.
        offsets = boundaries(np.where(logical == 0, physical, logical))
    return PackedBatch(
        input_ids=_tensor(_spread(ids, places, total, shape.pad_id)),
        position_ids=_tensor(position_ids(cu)),
        labels=_tensor(_spread(labels, places, total, IGNORED)),
        cu_seqlens=_tensor(cu),
        cu_seqlens_logical=None if offsets is cu or np.array_equal(offsets, cu) else _tensor(offsets),
        max_seqlen=int(physical.max()),
        seq_idx=_tensor(np.repeat(np.arange(len(physical), dtype=np.int32), physical)),
        padding_mask=_tensor(padding),
        loss_weights=None if weights is None else _tensor(_spread(weights, places, total, 0)),
        num_loss_tokens=int(np.count_nonzero(on)),
        num_loss_tokens_global=num_loss_tokens_global,
        num_segments=len(lengths),
        num_tokens=len(ids),
        num_repeated_packs=num_repeated_packs,
        pack_indices=tuple(pack_indices),
        fractional_weights=weights is not None and bool((weights[on] != 1).any()),
    )


def boundaries(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Offsets of segments: [3, 2] gives [0 3 5]."""
    cu = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu[1:])
    return cu


def position_ids(cu_seqlens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Number each token within its own segment: [0 3 5] gives [0 1 2 0 1]."""
    counting = np.arange(cu_seqlens[-1], dtype=np.int32)
    counting -= cu_seqlens[:-1].repeat(cu_seqlens[1:] - cu_seqlens[:-1])
    return counting


def _places(cu: NDArray[np.int32], logical: NDArray[np.int64], num_tokens: int) -> NDArray[np.int64] | slice:
    """Where in the row the real tokens stand."""
    if cu[-1] == num_tokens:
        return slice(None)
    shift: NDArray[np.int64] = cu[:-1] - (np.cumsum(logical) - logical)
    places: NDArray[np.int64] = np.arange(num_tokens) + np.repeat(shift, logical)
    return places


def _spread(
    values: NDArray[np.generic], places: NDArray[np.int64] | slice, total: int, filler: int
) -> NDArray[np.generic]:
    if isinstance(places, slice):
        return values
    row = np.full(total, filler, dtype=values.dtype)
    row[places] = values
    return row


def _tensor(array: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array)
