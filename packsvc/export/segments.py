"""Packs taken apart: real tokens only, back to back, with the places where segments and packs begin.

What an exported file says about a pack comes from here, so here is where boundaries, mask and counts must agree:
a mask that is off by one token would be off for ever after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.types import PackColumns

IGNORED = -100
"""The label that PyTorch's cross entropy leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """P packs of S segments with N real tokens in all."""

    packs: PackColumns
    """As they stand in the shard, tails included."""
    ids: NDArray[np.int32]
    """(N,) no padding."""
    mask: NDArray[np.bool_]
    """(N,) aligned with `ids`, not shifted; False on each segment's first token."""
    weights: NDArray[np.float32] | None
    """(N,)"""
    offsets: NDArray[np.int64]
    """(S + 1,) where segments start in `ids`; last is N."""
    pack_segments: NDArray[np.int64]
    """(P + 1,) where packs start in the segments."""

    @property
    def num_packs(self) -> int:
        return self.packs.num_packs

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(S,) tokens of each segment."""
        return np.diff(self.offsets)

    @property
    def pack_offsets(self) -> NDArray[np.int64]:
        """(P + 1,) where packs start in `ids`."""
        return self.offsets[self.pack_segments]

    @property
    def labels(self) -> NDArray[np.int32]:
        """(N,) aligned with `ids`, -100 off target."""
        return np.where(self.mask, self.ids, np.int32(IGNORED)).astype(np.int32)


def take_apart(packs: PackColumns, *, where: str, first_pack: int) -> Segments:
    """The segments of packs, in order.

    Args:
        packs: With ids, mask and boundaries; weights where the output has them.
        where: The shard, for errors.
        first_pack: Number of the first pack inside it.

    Raises:
        DamageError: Boundaries, mask and counts of a pack contradict each other.
    """
    num_packs, seq_len = packs.input_ids.shape
    sizes = np.diff(packs.cu_offsets)
    starts, lasts = packs.cu_offsets[:-1], packs.cu_offsets[1:] - 1
    demand = _demanding(where, first_pack)
    demand(sizes == packs.num_segments + 1 + (packs.num_tokens < seq_len), "cu_seqlens and num_segments disagree")
    cu = packs.cu_seqlens.astype(np.int64)
    demand(np.logical_and(cu[starts] == 0, cu[lasts] == seq_len), "cu_seqlens does not span the row")
    steps = np.append(np.diff(cu), 1)
    steps[lasts] = 1  # from one pack's last boundary to the next one's first
    rising = np.ones(num_packs, dtype=np.bool_)
    rising[np.repeat(np.arange(num_packs), sizes)[steps < 1]] = False
    demand(rising, "cu_seqlens does not rise")
    demand(np.equal(cu[starts + packs.num_segments], packs.num_tokens), "cu_seqlens and num_tokens disagree")

    within = np.arange(len(cu)) - np.repeat(starts, sizes)
    lengths = np.append(np.diff(cu), 0)[within < np.repeat(packs.num_segments, sizes)]
    real = np.arange(seq_len) < packs.num_tokens[:, None]
    demand(np.equal((packs.loss_mask & ~real).sum(axis=1), 0), "the padding tail has loss")
    demand(np.equal(packs.loss_mask.sum(axis=1), packs.num_loss_tokens), "loss_mask and num_loss_tokens disagree")
    offsets = _starts(lengths)
    pack_segments = _starts(packs.num_segments)
    mask = packs.loss_mask[real]
    trained_first = np.zeros(num_packs, dtype=np.bool_)
    trained_first[np.repeat(np.arange(num_packs), packs.num_segments)[mask[offsets[:-1]]]] = True
    demand(~trained_first, "a segment's first token has loss")
    return Segments(
        packs=packs,
        ids=packs.input_ids[real],
        mask=mask,
        weights=None if packs.loss_weight is None else packs.loss_weight[real],
        offsets=offsets,
        pack_segments=pack_segments,
    )


def _starts(sizes: NDArray[np.integer]) -> NDArray[np.int64]:
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def _demanding(where: str, first_pack: int) -> Callable[[NDArray[np.bool_], str], None]:
    """What refuses the first pack for which something does not hold."""

    def demand(holds: NDArray[np.bool_], otherwise: str) -> None:
        if not holds.all():
            pack = first_pack + int(np.flatnonzero(~holds)[0])
            raise DamageError(f"{where}, pack {pack}: {otherwise}; run `packsvc validate` and pack again")

    return demand
