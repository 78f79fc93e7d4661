"""Packs to one flattened batch: `lay` by compiled code, `collate` by numpy where that cannot.

Every array is new, so that a batch kept in a list stays as it was. Positions and segment numbers are made from
the boundaries: cheaper than decoding the stored column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from packsvc.compiled import native
from packsvc.stream.batch import PackedBatch, PackIndex
from packsvc.stream.options import Layout
from packsvc.stream.rows import Rows

if TYPE_CHECKING:
    from packsvc._native import PackContent

IGNORED = -100
"""The label that PyTorch's cross entropy leaves out by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """What the row looks like, the same for every batch of a stream."""

    layout: Layout
    align: int
    seq_len: int
    pad_id: int


def lay(
    packs: list[PackContent],
    counts: NDArray[np.int64],
    *,
    shape: RowShape,
    pack_indices: Sequence[PackIndex],
    num_repeated_packs: int,
    num_loss_tokens_global: int,
) -> PackedBatch | None:
    """As `collate`, from packs as `open_packs` gives them, and all that `check_packs` checks is checked.

    Args:
        counts: (packs, 4) their count columns, in the order of `COUNT_COLUMNS`.

    Returns:
        None where a pack contradicts itself or its counts: `check_packs` names it.
    """
    padded = shape.layout is Layout.PADDED
    laid = native.lay_row(packs, counts, shape.seq_len, shape.align, shape.pad_id, padded, num_repeated_packs)
    if laid is None:
        return None
    ids, positions, labels, segments, padding, cu, logical, weights, *numbers = laid
    max_seqlen, num_loss_tokens, num_segments, num_tokens, is_fractional = numbers
    return PackedBatch(
        input_ids=torch.frombuffer(ids, dtype=torch.int32),
        position_ids=torch.frombuffer(positions, dtype=torch.int32),
        labels=torch.frombuffer(labels, dtype=torch.int32),
        cu_seqlens=torch.frombuffer(cu, dtype=torch.int32),
        cu_seqlens_logical=None if logical is None else torch.frombuffer(logical, dtype=torch.int32),
        max_seqlen=max_seqlen,
        seq_idx=torch.frombuffer(segments, dtype=torch.int32),
        padding_mask=torch.frombuffer(padding, dtype=torch.bool),
        loss_weights=None if weights is None else torch.frombuffer(weights, dtype=torch.float32),
        num_loss_tokens=num_loss_tokens,
        num_loss_tokens_global=num_loss_tokens_global,
        num_segments=num_segments,
        num_tokens=num_tokens,
        num_repeated_packs=num_repeated_packs,
        pack_indices=tuple(pack_indices),
        fractional_weights=bool(is_fractional),
    )


def collate(
    rows: Rows,
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
    lengths = rows.lengths
    logical, physical = lengths, lengths
    if shape.align > 1:
        physical = -(-lengths // shape.align) * shape.align
    if shape.layout is Layout.PADDED:
        sizes = np.array(rows.num_segments)
        ends = np.cumsum(sizes)
        tails = shape.seq_len - np.add.reduceat(physical, ends - sizes)
        at, tails = ends[tails > 0], tails[tails > 0]
        physical, logical = np.insert(physical, at, tails), np.insert(logical, at, 0)
    cu = boundaries(physical)
    total = int(cu[-1])

    ids = rows.input_ids
    on = rows.loss_mask
    if num_repeated_packs:
        on = on.copy()
        on[sum(rows.num_tokens[: len(rows.num_tokens) - num_repeated_packs]) :] = False
    weights = None
    if rows.loss_weight is not None:
        weights = np.where(on, rows.loss_weight, np.float32(0))
    labels = np.empty_like(ids)
    labels.fill(IGNORED)
    np.copyto(labels, ids, where=on)  # targets stand in runs, which it copies whole; np.where looks at each token
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
        seq_idx=_tensor(_counting(len(physical)).repeat(physical)),
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


def boundaries(lengths: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """Offsets of segments: [3, 2] gives [0 3 5]."""
    cu = np.zeros(len(lengths) + 1, dtype=np.int32)
    lengths.cumsum(out=cu[1:])
    return cu


def position_ids(cu_seqlens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Number each token within its own segment: [0 3 5] gives [0 1 2 0 1]."""
    starts = cu_seqlens[:-1]
    numbers = starts.repeat(cu_seqlens[1:] - starts)
    return np.subtract(_counting(len(numbers)), numbers, out=numbers)


def _counting(size: int) -> NDArray[np.int32]:
    """0 to size - 1; not to be written to."""
    return _numbers(size.bit_length())[:size]


@lru_cache(32)
def _numbers(bits: int) -> NDArray[np.int32]:
    numbers = np.arange(1 << bits, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


def _places(cu: NDArray[np.int32], logical: NDArray[np.int32], num_tokens: int) -> NDArray[np.int64] | slice:
    """Where in the row the real tokens stand."""
    if cu[-1] == num_tokens:
        return slice(None)
    shift: NDArray[np.int64] = cu[:-1] - (np.cumsum(logical) - logical)
    places: NDArray[np.int64] = np.arange(num_tokens) + np.repeat(shift, logical)
    return places


def _spread(values: NDArray[Any], places: NDArray[np.int64] | slice, total: int, filler: int) -> NDArray[Any]:
    if isinstance(places, slice):
        return values
    row = np.full(total, filler, dtype=values.dtype)
    row[places] = values
    return row


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array)
