"""The real tokens of some packs, back to back: what a batch is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """T real tokens of S segments in some packs, padding tails left out. Not to be written to."""

    input_ids: NDArray[np.int32]
    """(T,)"""
    loss_mask: NDArray[np.bool_]
    """(T,)"""
    loss_weight: NDArray[np.float32] | None
    """(T,); None where no pack has weights."""
    lengths: NDArray[np.int32]
    """(S,) tokens of each segment."""
    num_segments: Sequence[int]
    """Of each pack."""
    num_tokens: Sequence[int]
    """Of each pack."""
