"""A plan and encoded segments to the arrays of packs: one gather, no loop over packs or segments.

Every token of the output knows the segment it belongs to (`repeat` of segment numbers by their lengths, the
padding tail being a segment without a source), hence its position in it and where it stands in the flat input.
Price: about 20 bytes of scratch a token of the packs asked for; callers ask for a row group at a time.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from packsvc.assemble.positions import position_ids
from packsvc.types import EncodedBatch, PackColumns, Placement

T = TypeVar("T", bound=np.generic)


def assemble(
    batch: EncodedBatch, placement: Placement, *, start: int, stop: int, seq_len: int, pad_id: int
) -> PackColumns:
    """Packs [start, stop) of a placement as arrays.

    Args:
        batch: The segments, flat.
        placement: Which segments stand in which pack, in order.
        start: First pack.
        stop: One past the last pack.
        seq_len: Tokens in a pack, tail included.
        pad_id: What the tail is filled with.

    Returns:
        The packs, with tails that have the pad id, positions from 0, mask and weight 0, and a last segment of
        their own in `cu_seqlens`; a full pack has no tail. With seq_len 8, segments of 3 and 2 tokens in one
        pack give cu_seqlens [0 3 5 8] and positions [0 1 2 0 1 0 1 2].

    Raises:
        ValueError: A pack is empty or over `seq_len`, a segment is empty, or a mask is not as long as its ids:
            none of our stages does that, and a shift by one token would spoil every mask after it.
    """
    _check_aligned(batch)
    if not 0 <= start <= stop <= placement.num_packs:
        raise ValueError(f"packs {start} to {stop} of {placement.num_packs}")
    num_packs = stop - start
    bounds = placement.pack_offsets[start : stop + 1]
    chosen = placement.order[bounds[0] : bounds[-1]]
    segment_offsets = (bounds - bounds[0]).astype(np.int64)
    num_segments = np.diff(segment_offsets)
    lengths = batch.offsets[chosen + 1] - batch.offsets[chosen]
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"segment {int(chosen[lengths.argmin()])} is empty")
    if num_packs and num_segments.min() < 1:
        raise ValueError(f"pack {start + int(num_segments.argmin())} is empty")
    num_tokens = _sum_by_pack(lengths, segment_offsets)
    if num_packs and num_tokens.max() > seq_len:
        pack = int(num_tokens.argmax())
        raise ValueError(f"pack {start + pack} has {int(num_tokens[pack])} tokens, seq_len is {seq_len}")

    first_token = np.cumsum(lengths) - lengths
    ends = first_token + lengths - np.repeat(np.cumsum(num_tokens) - num_tokens, num_segments)
    cu_seqlens, cu_offsets = _boundaries(ends, segment_offsets, num_tokens, seq_len)

    # Real tokens fill every pack from its start, so in pack order they are one run of the flat output.
    source = np.arange(int(lengths.sum()), dtype=np.int64)
    source += np.repeat(batch.offsets[chosen] - first_token, lengths)
    real = np.arange(seq_len) < num_tokens[:, None]

    def spread(values: NDArray[T], fill: int) -> NDArray[T]:
        out = np.full((num_packs, seq_len), fill, dtype=values.dtype)
        out[real] = values[source]
        return out

    loss_mask = spread(batch.loss_mask, 0)
    return PackColumns(
        input_ids=spread(batch.input_ids, pad_id),
        position_ids=position_ids(cu_seqlens, cu_offsets, seq_len=seq_len),
        loss_mask=loss_mask,
        loss_weight=None if batch.loss_weight is None else spread(batch.loss_weight, 0),
        cu_seqlens=cu_seqlens,
        cu_offsets=cu_offsets,
        segment_file=batch.file[chosen],
        segment_row=batch.row[chosen],
        segment_part=batch.part[chosen],
        segment_offsets=segment_offsets,
        num_segments=num_segments.astype(np.int32),
        num_tokens=num_tokens.astype(np.int32),
        num_loss_tokens=np.count_nonzero(loss_mask, axis=1).astype(np.int32),
        sum_squared_lengths=_sum_by_pack(lengths * lengths, segment_offsets),
    )


def _check_aligned(batch: EncodedBatch) -> None:
    num_tokens = len(batch.input_ids)
    for name in ("loss_mask", "loss_weight"):
        values = getattr(batch, name)
        if values is not None and len(values) != num_tokens:
            raise ValueError(f"{name} has {len(values)} values, input_ids {num_tokens}")
    if batch.offsets[-1] != num_tokens:
        raise ValueError(f"segments end at {batch.offsets[-1]}, there are {num_tokens} tokens")


def _boundaries(
    ends: NDArray[np.int64], segment_offsets: NDArray[np.int64], num_tokens: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """`cu_seqlens` and `cu_offsets` of packs, from where each segment ends inside its pack.

    Per pack: a 0, the ends of its segments, and `seq_len` once more where a tail is left; never twice, since an
    empty last segment breaks kernels.
    """
    num_segments = np.diff(segment_offsets)
    cu_offsets = np.zeros(len(segment_offsets), dtype=np.int64)
    np.cumsum(num_segments + 1 + (num_tokens < seq_len), out=cu_offsets[1:])
    cu_seqlens = np.zeros(int(cu_offsets[-1]), dtype=np.int32)
    shift = cu_offsets[:-1] + 1 - segment_offsets[:-1]
    cu_seqlens[np.arange(len(ends)) + np.repeat(shift, num_segments)] = ends
    cu_seqlens[cu_offsets[1:] - 1] = seq_len
    return cu_seqlens, cu_offsets


def _sum_by_pack(values: NDArray[np.int64], segment_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of runs of `values`."""
    total = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=total[1:])
    return total[segment_offsets[1:]] - total[segment_offsets[:-1]]
