"""How few bins there could be: the lower bound L2 of Martello and Toth (1990), over every threshold."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from packsvc.plan.decreasing import Histogram, checked_capacity, checked_lengths


def lower_bound(lengths: ArrayLike, capacity: int) -> int:
    """No packing of `lengths` has fewer bins than this.

    For a threshold t, lengths over capacity - t share a bin with nothing of t or more; those over half the
    capacity each have a bin of their own, and lengths from t to half the capacity must fit into what these leave
    or open more. Never under ceil(sum / capacity). Price: O(n + distinct lengths).

    Raises:
        ValueError: As `ffd`.
    """
    capacity = checked_capacity(capacity)
    histogram = Histogram.of(checked_lengths(lengths, capacity))
    distinct, counts = histogram.lengths, histogram.counts
    items = np.concatenate(([0], np.cumsum(counts)))
    tokens = np.concatenate(([0], np.cumsum(counts * distinct)))
    # Only a threshold that is a length, or 0, can change anything.
    thresholds = np.concatenate(([0], distinct[distinct <= capacity // 2]))
    low = np.searchsorted(distinct, thresholds)
    half = np.searchsorted(distinct, capacity // 2, side="right")
    high = np.searchsorted(distinct, capacity - thresholds, side="right")
    alone, large = items[-1] - items[high], items[high] - items[half]
    left_by_large = large * capacity - (tokens[high] - tokens[half])
    small = tokens[half] - tokens[low]
    more = np.maximum(0, -((left_by_large - small) // capacity))
    return int((alone + large + more).max(initial=0)) if items[-1] else 0
