"""Deals the packs of one global batch to ranks so that their attention costs come out even.

Attention costs the sum of squared segment lengths, and the slowest rank sets the pace of a step. The global batch
stays the same set of packs, so loss, order of steps, exactly-once and resume do not change; only which rank works
on which of its packs does. Largest first, each to the least loaded rank with room (Graham's rule), ties by
position: every rank computes the same from the shards' counts, nothing is communicated.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


def balance(costs: NDArray[np.int64], *, num_ranks: int) -> NDArray[np.int64]:
    """Which packs of a global batch each rank takes.

    Args:
        costs: (G,) int64 sum of squared segment lengths of each pack; G is a multiple of `num_ranks`.
        num_ranks: How many ranks there are.

    Returns:
        (num_ranks, G / num_ranks) int64 places in the batch, rising in each row.
    """
    room = len(costs) // num_ranks
    loads = [(0, rank) for rank in range(num_ranks)]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for place in np.argsort(-costs, kind="stable"):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(int(place))
        if len(dealt[rank]) < room:
            heapq.heappush(loads, (load + int(costs[place]), rank))
    return np.sort(np.array(dealt, dtype=np.int64).reshape(num_ranks, room), axis=1)
