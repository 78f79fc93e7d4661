"""The real tokens of some packs, back to back: what a batch is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """T real tokens of S segments in some packs, padding tails left out. Not to be written to."""

    input_ids: Sequence[memoryview]
    """For each pack, the bytes of its int32 ids."""
    loss_mask: NDArray[np.bool_]
    """(T,)"""
    loss_weight: Sequence[memoryview] | None
    """For each pack, the bytes of its float32 weights."""
    lengths: NDArray[np.int32]
    """(S,) tokens of each segment."""
    num_segments: Sequence[int]
    """Of each pack."""
    num_tokens: Sequence[int]
    """Of each pack."""

    def cut(self, size: int) -> Iterator[Rows]:
        """The rows of so many packs, of so many after them, and so on."""
        token = segment = 0
        for pack in range(0, len(self.num_tokens), size):
            stop = pack + size
            num_tokens, num_segments = self.num_tokens[pack:stop], self.num_segments[pack:stop]
            last_token, last_segment = token + sum(num_tokens), segment + sum(num_segments)
            yield Rows(
                input_ids=self.input_ids[pack:stop],
                loss_mask=self.loss_mask[token:last_token],
                loss_weight=self.loss_weight and self.loss_weight[pack:stop],
                lengths=self.lengths[segment:last_segment],
                num_segments=num_segments,
                num_tokens=num_tokens,
            )
            token, segment = last_token, last_segment


def arranged(parts: Sequence[Rows], places: Sequence[Sequence[int]]) -> Rows:
    """The packs of several outputs in one order.

    Args:
        parts: Rows of each output.
        places: Where in the order the packs of each part stand; all together 0 to n - 1.
    """
    found: list[tuple[Rows, int, int, int]] = [(parts[0], 0, 0, 0)] * sum(len(part.num_tokens) for part in parts)
    for part, where in zip(parts, places, strict=True):
        tokens = accumulate(part.num_tokens, initial=0)
        segments = accumulate(part.num_segments, initial=0)
        for i, (place, token, segment) in enumerate(zip(where, tokens, segments, strict=False)):
            found[place] = (part, i, token, segment)
    weights = [part.loss_weight[i] for part, i, _, _ in found if part.loss_weight is not None]
    return Rows(
        input_ids=[part.input_ids[i] for part, i, _, _ in found],
        loss_mask=np.concatenate([part.loss_mask[at : at + part.num_tokens[i]] for part, i, at, _ in found]),
        loss_weight=weights if len(weights) == len(found) else None,
        lengths=np.concatenate([part.lengths[at : at + part.num_segments[i]] for part, i, _, at in found]),
        num_segments=[part.num_segments[i] for part, i, _, _ in found],
        num_tokens=[part.num_tokens[i] for part, i, _, _ in found],
    )
