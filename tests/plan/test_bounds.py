"""The lower bound against its definition."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from packsvc.plan import ffd, lower_bound


def bound_by_hand(lengths: list[int], capacity: int) -> int:
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = [n for n in lengths if n > capacity - threshold]
        large = [n for n in lengths if capacity // 2 < n <= capacity - threshold]
        small = [n for n in lengths if threshold <= n <= capacity // 2]
        left = len(large) * capacity - sum(large)
        best = max(best, len(alone) + len(large) + max(0, math.ceil((sum(small) - left) / capacity)))
    return best


@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.lists(st.integers(0, c), max_size=40), st.just(c))))
def test_the_bound_is_the_best_over_all_thresholds(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bound = lower_bound(lengths, capacity)
    assert bound == bound_by_hand(lengths, capacity)
    assert bound >= math.ceil(sum(lengths) / capacity)
    assert bound <= (int(ffd(lengths, capacity).max()) + 1 if lengths else 0)


def test_lengths_over_half_the_capacity_each_need_a_bin() -> None:
    assert lower_bound([5, 5, 5], 8) == 3
    assert lower_bound([], 8) == 0
