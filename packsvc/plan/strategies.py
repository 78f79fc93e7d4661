"""Lengths to packs in their final order, by one of three strategies.

- `ffd`: exact first-fit decreasing; within 0.1 % of the lower bound on real data, but it sorts the data into
  packs of a kind (11-24 % of packs hold only short segments).
- `first_fit_random`: first fit in random order; 0.03-0.2 points less full, packs as mixed as the data.
- `next_fit`: the order given; neighbours stay together inside a pack; 1-20 points less full.

Segments are permuted by the seed before `ffd` and `first_fit_random`, so that equal lengths are dealt at random,
and the order of packs is permuted at the end, so that a stream of packs is no curriculum by length. Inside a pack
segments stand in the order of placing: longest first for `ffd`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packsvc.plan.decreasing import (
    Histogram,
    checked_capacity,
    checked_lengths,
    placing_order,
    plan_histogram,
)
from packsvc.plan.in_order import first_fit, next_fit
from packsvc.plan.shuffles import permutation
from packsvc.types import Placement

STRATEGIES = ("ffd", "first_fit_random", "next_fit")


def place(
    lengths: ArrayLike,
    capacity: int,
    *,
    strategy: str = "ffd",
    max_segments: int | None = None,
    align: int = 1,
    seed: int = 0,
) -> Placement:
    """Lay segments into packs.

    Args:
        lengths: (n,) integers, tokens of each segment, at least 1.
        capacity: Tokens a pack holds.
        strategy: "ffd", "first_fit_random" or "next_fit".
        max_segments: At most this many segments in a pack.
        align: A segment takes its length rounded up to a multiple of this.
        seed: Of the permutations of segments and packs.

    Returns:
        Every segment once and only once, no pack over `capacity`, packs in their final order.

    Raises:
        ValueError: A length is below 1 or does not fit a pack; a strategy, cap or alignment that makes no sense.
    """
    capacity, align = checked_capacity(capacity), checked_capacity(align)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if max_segments is not None and max_segments < 1:
        raise ValueError(f"max_segments must be at least 1, not {max_segments}")
    # Rounded lengths are multiples of align, so whole units of it are packed.
    tokens = checked_lengths(lengths, capacity // align * align, least=1)
    units, room = -(-tokens.astype(np.int64) // align), capacity // align

    if strategy == "next_fit":
        order = np.arange(len(units))
        bins: NDArray[Any] = next_fit(units, room, max_segments=max_segments)
    else:
        order = permutation(len(units), seed, "segments")
        units = units[order]
        if strategy == "ffd":
            histogram = Histogram.of(units)
            bins = plan_histogram(histogram, room, max_segments=max_segments).bin_of_rank()
            order = order[placing_order(units, histogram)]
        else:
            bins = first_fit(units, room, max_segments=max_segments)
    return _shuffled(order, bins, seed)


def _shuffled(order: NDArray[np.int64], bins: NDArray[Any], seed: int) -> Placement:
    """Segments in the order of placing and the bin of each, as packs in a seeded order."""
    sizes = np.bincount(bins)
    pack_order = permutation(len(sizes), seed, "packs")
    place_of_bin = np.empty(len(sizes), dtype=np.uint16 if len(sizes) <= 2**16 else np.uint32)
    place_of_bin[pack_order] = np.arange(len(sizes))
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes[pack_order], out=offsets[1:])
    return Placement(order=order[np.argsort(place_of_bin[bins], kind="stable")], pack_offsets=offsets)
