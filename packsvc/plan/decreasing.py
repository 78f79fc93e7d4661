"""First-fit decreasing, exactly, on the histogram of lengths.

Item by item, FFD puts the longest segment into the first bin with room, and so on down. Equal lengths come one
after the other, so a whole length is one step; bins with the same history are neighbours, so a *run* of bins
(first bin, how many, room left, segments so far) is one entry. For each length a run takes as many a bin as fit;
the last run touched splits; what is left opens one or two new runs. A run that took a length has less room than
that and sleeps until the lengths have come down to its room; the runs awake stand in a heap by bin number, so the
next bin in first-fit order is always its top.

The plan grows with the number of distinct lengths, not of segments: 0.1-1 MB whatever n is. Placing is one pass
over the lengths with a cursor for each length, in compiled code; where that is not to be had numpy does it in blocks:
a radix sort of 16-bit keys and a look-up. Price: O(n) time, 8 bytes a segment (12-24). The same bin for every segment
as the double loop over segments and bins, which the tests hold.

Item-by-item trees, in Python or C++, cost 5-300 times a sort; this costs about two.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packsvc.compiled import native

BLOCK = 2**16
"""Segments placed at once: their keys, order and bins stay in the cache, where the radix sort is twice as fast."""


def ffd(lengths: ArrayLike, capacity: int) -> NDArray[np.int64]:
    """Bins for lengths, by first-fit decreasing.

    Args:
        lengths: (n,) integers from 0 to `capacity`; any integer type, a list, or empty.
        capacity: What a bin holds, at least 1.

    Returns:
        (n,) int64 bin of each length, numbered from 0 in first-fit order. Among equal lengths the one with the
        lower index is placed first. A length of 0 fits anywhere, so it goes into bin 0.
        [5, 3, 0, 4] with capacity 8 gives [0, 0, 0, 1].

    Raises:
        ValueError: A length is negative or above `capacity`, lengths are no integers, or `capacity` is below 1.
    """
    capacity = checked_capacity(capacity)
    checked = checked_lengths(lengths, capacity)
    histogram = Histogram.of(checked)
    return place_by_plan(checked, histogram, plan_histogram(histogram, capacity))


def checked_capacity(capacity: int) -> int:
    """A capacity as a Python int. Raises ValueError."""
    try:
        number = operator.index(capacity)
    except TypeError:
        raise ValueError(f"capacity must be an integer, not {capacity!r}") from None
    if number < 1:
        raise ValueError(f"capacity must be at least 1, not {number}")
    return number


def checked_lengths(lengths: ArrayLike, capacity: int, *, least: int = 0) -> NDArray[Any]:
    """Lengths as a flat integer array within [least, capacity]. Raises ValueError naming the first that is not."""
    values = np.asarray(lengths)
    if values.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, not of shape {values.shape}")
    if values.size == 0:
        return np.zeros(0, dtype=np.int64)
    if values.dtype.kind not in "iuO":
        raise ValueError(f"lengths must be integers, not {values.dtype}")
    if values.dtype.kind == "O" and not all(type(value) is int for value in values):
        raise ValueError("lengths must be integers")
    if values.min() < least:
        at = int(np.flatnonzero(values < least)[0])
        raise ValueError(f"length {values[at]} at index {at} is below {least}")
    if values.max() > capacity:
        at = int(np.flatnonzero(values > capacity)[0])
        raise ValueError(f"length {values[at]} at index {at} is above the capacity {capacity}")
    return values.astype(np.int64) if values.dtype.kind == "O" else values


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often each length occurs, and a dense number for each: 0 for the longest."""

    lengths: NDArray[np.int64]
    """(D,) distinct lengths, ascending."""
    counts: NDArray[np.int64]
    """(D,)"""
    numbers: NDArray[Any] | None
    """(longest + 1,) number of each length; None where lengths are so sparse that a table would be larger."""

    @classmethod
    def of(cls, lengths: NDArray[Any]) -> Histogram:
        """Count lengths."""
        longest = int(lengths.max()) if lengths.size else 0
        if longest > 2**20 + 4 * lengths.size:
            distinct, counts = np.unique(lengths, return_counts=True)
            return cls(distinct.astype(np.int64), counts.astype(np.int64), None)
        table = np.zeros(longest + 1, dtype=np.int64)
        if native is not None:
            native.count_lengths(_for_native(lengths), table)
        else:
            for block in _blocks(lengths, bins=longest):
                table += np.bincount(block, minlength=longest + 1)
        distinct = np.flatnonzero(table)
        numbers = np.zeros(longest + 1, dtype=_key_type(len(distinct)))
        numbers[distinct] = np.arange(len(distinct))[::-1]
        return cls(distinct, table[distinct], numbers)

    def number(self, lengths: NDArray[np.int64]) -> NDArray[Any]:
        """The number of each length; 16 bits where they suffice, which numpy sorts in two passes."""
        if self.numbers is not None:
            return self.numbers.take(lengths)
        found = len(self.lengths) - 1 - np.searchsorted(self.lengths, lengths)
        return found.astype(_key_type(len(self.lengths)))


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Where FFD puts lengths, longest first: each line fills `bins` bins from `first_bin` on, `per_bin` in each."""

    length: NDArray[np.int64]
    first_bin: NDArray[np.int64]
    bins: NDArray[np.int64]
    per_bin: NDArray[np.int64]
    num_bins: int

    def bin_of_rank(self) -> NDArray[Any]:
        """(n,) bin of each segment, in the order of placing: longest first, then by index."""
        kind = np.int32 if self.num_bins < 2**31 else np.int64
        bins: NDArray[Any] = np.arange(int(self.bins.sum()), dtype=kind)
        bins += np.repeat((self.first_bin - (np.cumsum(self.bins) - self.bins)).astype(kind), self.bins)
        return np.repeat(bins, np.repeat(self.per_bin, self.bins))


def plan_histogram(histogram: Histogram, capacity: int, *, max_segments: int | None = None) -> SegmentPlan:
    """Exact FFD of a histogram, with at most `max_segments` a bin."""
    ascending = histogram.lengths.tolist()
    counts = histogram.counts.tolist()
    cap = max_segments or int(histogram.counts.sum()) or 1
    least = ascending[0] if ascending else 0
    asleep: list[list[tuple[int, int, int, int]]] = [[] for _ in ascending]
    awake: list[tuple[int, int, int, int]] = []  # (first bin, bins, room, segments so far)
    lines = array("q")
    num_bins = 0

    for at in range(len(ascending) - 1, -1, -1):
        length, left = ascending[at], counts[at]
        if awake:
            for run in asleep[at]:
                heappush(awake, run)
        else:
            awake = asleep[at]
            heapify(awake)
        while left:
            opened = not awake
            first, bins, room, used = (num_bins, left, capacity, 0) if opened else awake[0]
            each = min(room // length if length else left, cap - used)
            full, rest = divmod(left, each)
            if full >= bins:
                full, rest = bins, 0
            left -= full * each + rest
            touched = full + (rest > 0)
            if opened:
                num_bins += touched
            elif touched < bins:
                heapreplace(awake, (first + touched, bins - touched, room, used))
            else:
                heappop(awake)
            if full:
                lines.extend((length, first, full, each))
                small = room - each * length
                if used + each < cap and small >= least:
                    asleep[bisect_right(ascending, small) - 1].append((first, full, small, used + each))
            if rest:
                lines.extend((length, first + full, 1, rest))
                small = room - rest * length
                if used + rest < cap and small >= least:
                    heappush(awake, (first + full, 1, small, used + rest))
    table = np.frombuffer(lines, dtype=np.int64).reshape(-1, 4).T if lines else np.zeros((4, 0), dtype=np.int64)
    return SegmentPlan(table[0], table[1], table[2], table[3], num_bins)


def place_by_plan(lengths: NDArray[Any], histogram: Histogram, plan: SegmentPlan) -> NDArray[np.int64]:
    """(n,) bin of each length by a plan of their histogram; among equal lengths by index."""
    placed = np.empty(len(lengths), dtype=np.int64)
    if native is not None and histogram.numbers is not None and len(lengths) < 2**31:
        lines = np.stack((plan.length, plan.first_bin, plan.bins, plan.per_bin), axis=1)
        first_line = np.zeros(len(histogram.numbers), dtype=np.int64)
        starts = np.flatnonzero(np.diff(plan.length, prepend=-1))
        first_line[plan.length[starts]] = starts
        native.place_lengths(_for_native(lengths), lines, first_line, placed)
        return placed
    bin_of_rank = plan.bin_of_rank()
    for start, order, ranks in _ranks(lengths, histogram):
        # A scatter whose values have the array's own type is twice as fast as one that converts.
        placed[start : start + len(order)][order] = bin_of_rank.take(ranks).astype(np.int64, copy=False)
    return placed


def placing_order(lengths: NDArray[Any], histogram: Histogram) -> NDArray[np.int64]:
    """(n,) indices of lengths in the order of placing: longest first, then by index."""
    placed = np.empty(len(lengths), dtype=np.int64)
    for start, order, ranks in _ranks(lengths, histogram):
        placed[ranks] = order + start
    return placed


def _ranks(lengths: NDArray[Any], histogram: Histogram) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """For each block of lengths: its start, the order of its members by length, and their ranks over all blocks."""
    descending = histogram.counts[::-1]
    next_rank = np.cumsum(descending) - descending
    start = 0
    for block in _blocks(lengths, bins=len(descending)):
        keys = histogram.number(block)
        order = np.argsort(keys, kind="stable")
        counts = np.bincount(keys, minlength=len(next_rank))
        ranks = np.arange(len(block))
        ranks += np.repeat(next_rank - (np.cumsum(counts) - counts), counts)
        yield start, order, ranks
        next_rank = next_rank + counts
        start += len(block)


def _blocks(values: NDArray[Any], *, bins: int) -> Iterator[NDArray[np.int64]]:
    """Blocks of values, larger where counting each into `bins` bins would cost more than the values do."""
    size = max(BLOCK, bins)
    for start in range(0, len(values), size):
        yield values[start : start + size].astype(np.int64, copy=False)


def _for_native(values: NDArray[Any]) -> NDArray[Any]:
    """Lengths as compiled code takes them."""
    kind = np.int32 if values.dtype == np.int32 else np.int64
    return np.ascontiguousarray(values, dtype=kind)


def _key_type(distinct: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if distinct <= 2**16 else np.uint32
