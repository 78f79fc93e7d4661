"""Exact first-fit decreasing against the double loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.plan import decreasing, ffd, lower_bound
from packsvc.plan.decreasing import Histogram, plan_histogram


def double_loop(lengths: list[int], capacity: int, cap: int | None = None) -> list[int]:
    """First-fit decreasing as it is defined: longest first, each into the first bin with room."""
    bins: list[int] = [-1] * len(lengths)
    room: list[int] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for number in range(len(room)):
            if lengths[index] <= room[number] and (cap is None or used[number] < cap):
                break
        else:
            number = len(room)
            room.append(capacity)
            used.append(0)
        bins[index] = number
        room[number] -= lengths[index]
        used[number] += 1
    return bins


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[int], int]:
    """A capacity, tiny or huge, and lengths from a few values or from all, zero among them."""
    capacity = draw(st.sampled_from([1, 2, 3, 7, 8, 9, 30, 100, 4096, 8193, 131072, 1_000_000]) | st.integers(1, 60))
    some = draw(st.lists(st.integers(0, capacity), min_size=1, max_size=6))
    wide = st.integers(0, capacity)
    return draw(st.lists(st.sampled_from(some) | wide, max_size=80)), capacity


def test_the_oracle_is_pinned_by_arrays_written_out() -> None:
    assert double_loop([5, 3, 0, 4], 8) == [0, 0, 0, 1]
    assert double_loop([1, 2, 3, 4, 5, 6], 7) == [0, 1, 2, 2, 1, 0]
    assert double_loop([2, 2, 2, 2, 2], 5) == [0, 0, 1, 1, 2]
    assert double_loop([0, 0], 4) == [0, 0]
    assert double_loop([2, 2, 2, 2, 2], 100, cap=2) == [0, 0, 1, 1, 2]


def test_ffd_gives_the_arrays_written_out() -> None:
    assert ffd([5, 3, 0, 4], 8).tolist() == [0, 0, 0, 1]
    assert ffd([1, 2, 3, 4, 5, 6], 7).tolist() == [0, 1, 2, 2, 1, 0]
    assert ffd([0, 5, 0, 3], 8).tolist() == [0, 0, 0, 0]
    assert ffd([0, 0, 0], 1).tolist() == [0, 0, 0]


@given(instances())
def test_ffd_gives_every_length_the_bin_of_the_double_loop(instance: tuple[list[int], int]) -> None:
    lengths, capacity = instance
    assert ffd(lengths, capacity).tolist() == double_loop(lengths, capacity)


@given(instances(), st.integers(1, 6))
def test_a_cap_on_segments_gives_the_bins_of_the_capped_double_loop(instance: tuple[list[int], int], cap: int) -> None:
    lengths, capacity = instance
    values = np.array(lengths, dtype=np.int64)
    histogram = Histogram.of(values)
    plan = plan_histogram(histogram, capacity, max_segments=cap)
    assert decreasing.place_by_plan(values, histogram, plan).tolist() == double_loop(lengths, capacity, cap)


@given(instances())
def test_blocks_and_sparse_lengths_change_nothing(instance: tuple[list[int], int]) -> None:
    """Many small blocks must give what one block gives, and so must lengths numbered by search."""
    lengths, capacity = instance
    values = np.array(lengths, dtype=np.int64)
    expected = ffd(values, capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decreasing, "BLOCK", 3)
        patch.setattr(decreasing, "max", lambda a, b: a, raising=False)  # blocks of 3, however many the bins
        assert np.array_equal(ffd(values, capacity), expected)
    if len(values):
        distinct, counts = np.unique(values, return_counts=True)
        histogram = Histogram(distinct, counts, None)
        plan = plan_histogram(histogram, capacity)
        assert np.array_equal(decreasing.place_by_plan(values, histogram, plan), expected)


@pytest.mark.parametrize("spread", ["lognormal", "two sizes", "long tail"])
def test_a_few_thousand_lengths_get_the_bins_of_the_double_loop(spread: str) -> None:
    rng = np.random.default_rng(3)
    lengths = {
        "lognormal": np.clip(rng.lognormal(5.9, 1.0, 3000), 1, 4096),
        "two sizes": np.where(rng.random(3000) < 0.5, 2049 + rng.integers(0, 64, 3000), 1366),
        "long tail": np.clip(rng.pareto(1.1, 3000) * 20, 0, 4096),
    }[spread].astype(np.int32)
    assert ffd(lengths, 4096).tolist() == double_loop(lengths.tolist(), 4096)


@given(instances())
def test_every_bin_is_used_and_none_is_over_capacity(instance: tuple[list[int], int]) -> None:
    lengths, capacity = instance
    bins = ffd(lengths, capacity)
    fill = np.bincount(bins, weights=np.array(lengths)) if lengths else np.zeros(0)
    assert (fill <= capacity).all()
    assert np.array_equal(np.unique(bins), np.arange(len(fill)))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))
def test_bins_are_within_eleven_ninths_of_the_best_packing(lengths: list[int]) -> None:
    capacity = 12

    def best(left: tuple[int, ...], room: tuple[int, ...]) -> int:
        if not left:
            return len(room)
        found = best(left[1:], (*room, capacity - left[0]))
        for i, space in enumerate(room):
            if space >= left[0] and space not in room[:i]:
                found = min(found, best(left[1:], (*room[:i], space - left[0], *room[i + 1 :])))
        return found

    optimum, found = best(tuple(lengths), ()), int(ffd(lengths, capacity).max()) + 1
    assert optimum <= found <= 11 / 9 * optimum + 6 / 9
    assert lower_bound(lengths, capacity) <= optimum


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_type_gives_int64_bins(kind: Any) -> None:
    lengths = np.array([5, 3, 0, 4, 100], dtype=kind)
    bins = ffd(lengths, 100)
    assert bins.dtype == np.int64
    assert bins.tolist() == double_loop([5, 3, 0, 4, 100], 100)
    assert lengths.tolist() == [5, 3, 0, 4, 100], "the input is left as it was"


@pytest.mark.parametrize("empty", [[], (), np.zeros(0, dtype=np.int32), np.zeros(0)])
def test_no_lengths_give_no_bins(empty: Any) -> None:
    bins = ffd(empty, 8)
    assert bins.dtype == np.int64
    assert bins.shape == (0,)


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, -1], 8, "length -1 at index 1 is below 0"),
        ([3, 9, 10], 8, "length 9 at index 1 is above the capacity 8"),
        (np.array([255], dtype=np.uint8), 8, "length 255 at index 0"),
        ([2**70], 8, "above the capacity 8"),
        ([-(2**70)], 8, "below 0"),
        ([1.5], 8, "must be integers, not float64"),
        ([True], 8, "must be integers, not bool"),
        (["a"], 8, "must be integers"),
        ([[1, 2]], 8, "one-dimensional"),
        ([1], 0, "capacity must be at least 1, not 0"),
        ([1], -5, "capacity must be at least 1, not -5"),
        ([1], 2.5, "capacity must be an integer, not 2.5"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(lengths: Any, capacity: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffd(lengths, capacity)


@pytest.mark.parametrize("capacity", [1, 2, 7, 8, 9, 1000, 8191, 8192, 8193])
def test_p1_a_capacity_that_is_no_power_of_two_packs_as_full_as_one_that_is(capacity: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.integers(capacity // 2, capacity // 2 + 3, 3000) - 1, 1, capacity)
    assert int(ffd(lengths, capacity).max()) == max(double_loop(lengths.tolist(), capacity))


def test_p1_three_thousand_documents_of_half_a_pack_share_packs() -> None:
    """8193 made another packer open one pack a document: 3000 instead of about 1524."""
    lengths = np.random.default_rng(0).normal(4096, 40, 3000).round().astype(np.int64)
    assert int(ffd(lengths, 8193).max()) + 1 <= 1600


def test_a_huge_capacity_with_few_lengths_needs_no_table_of_its_size() -> None:
    lengths = [2**30, 5, 2**29, 2**29 + 1, 7]
    assert ffd(lengths, 2**30).tolist() == double_loop(lengths, 2**30)


def test_more_than_65536_distinct_lengths_are_placed_right() -> None:
    """Their numbers need more than 16 bits."""
    lengths = np.random.default_rng(0).permutation(70_000)
    bins = ffd(lengths, 1_000_000)
    assert np.bincount(bins, weights=lengths).max() <= 1_000_000
    # By the definition: taken longest first, a later bin is opened only when all before lack the room.
    order = np.argsort(-lengths, kind="stable")
    room: list[int] = []
    for index in order[:3000].tolist():
        expected = next((b for b, space in enumerate(room) if space >= lengths[index]), len(room))
        if expected == len(room):
            room.append(1_000_000)
        room[expected] -= int(lengths[index])
        assert bins[index] == expected


def test_the_plan_does_not_grow_with_the_number_of_lengths() -> None:
    rng = np.random.default_rng(0)
    sizes = []
    for n in (20_000, 200_000):
        histogram = Histogram.of(np.clip(rng.lognormal(5, 0.8, n), 1, 2048).astype(np.int32))
        sizes.append(len(plan_histogram(histogram, 2048).length))
    assert sizes[1] < 2 * sizes[0]
    assert sizes[1] < 4 * 2048
