"""Encoded units, flat for a batch and one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from packsvc.encode.rendered import RowRefused


@dataclass(slots=True, kw_only=True)
class Notes:
    """What is counted about a segment besides its tokens."""

    edge_tokens: int = 0
    reasoning_dropped: int = 0
    turns_without_stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One encoded unit, or what a policy for overlong rows left of it; n tokens."""

    ids: NDArray[np.int32]
    """(n,)"""
    mask: NDArray[np.bool_]
    """(n,), False on the first token."""
    weight: NDArray[np.float32] | None
    """(n,) or None when the job writes no weights."""
    notes: Notes = field(default_factory=Notes)

    def part(self, start: int, stop: int) -> Segment:
        """Tokens [start, stop) as a segment; its first token is not trained."""
        mask = self.mask[start:stop].copy()
        mask[:1] = False
        weight = self.weight
        if weight is not None:
            weight = weight[start:stop].copy()
            weight[:1] = 0
        return Segment(ids=self.ids[start:stop], mask=mask, weight=weight, notes=self.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Encoded units of one kind or several, back to back, in their order; N tokens, U units."""

    ids: NDArray[np.int32]
    """(N,)"""
    offsets: NDArray[np.int64]
    """(U + 1,); a refused unit has no tokens."""
    mask: NDArray[np.bool_]
    """(N,), False on first tokens."""
    weight: NDArray[np.float32] | None
    """(N,) or None."""
    notes: Sequence[Notes]
    """U of them."""
    refused: Mapping[int, RowRefused]
    """Units that could not be encoded, and why."""

    def segment(self, unit: int) -> Segment:
        here = slice(int(self.offsets[unit]), int(self.offsets[unit + 1]))
        return Segment(
            ids=self.ids[here],
            mask=self.mask[here],
            weight=None if self.weight is None else self.weight[here],
            notes=self.notes[unit],
        )


def flatten(segments: Sequence[Segment | RowRefused], *, weights: bool) -> Flat:
    """Lay segments side by side; refusals keep their places."""
    kept = [s for s in segments if isinstance(s, Segment)]
    lengths = [len(s.ids) if isinstance(s, Segment) else 0 for s in segments]
    values = [s.weight for s in kept if s.weight is not None]
    return Flat(
        ids=np.concatenate([np.zeros(0, np.int32), *(s.ids for s in kept)]),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        mask=np.concatenate([np.zeros(0, np.bool_), *(s.mask for s in kept)]),
        weight=np.concatenate([np.zeros(0, np.float32), *values]) if weights else None,
        notes=[s.notes if isinstance(s, Segment) else Notes() for s in segments],
        refused={i: s for i, s in enumerate(segments) if isinstance(s, RowRefused)},
    )
