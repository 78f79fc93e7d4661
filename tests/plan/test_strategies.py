"""Placements: every segment once, no pack over capacity, and the orders that training needs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.plan import STRATEGIES, ffd, lower_bound, permutation, place
from packsvc.plan.in_order import first_fit, next_fit
from packsvc.types import Placement


def packs_of(placement: Placement) -> list[list[int]]:
    return [part.tolist() for part in np.split(placement.order, placement.pack_offsets[1:-1])]


def first_fit_by_hand(lengths: list[int], capacity: int, cap: int | None) -> list[int]:
    bins: list[list[int]] = []
    placed = []
    for length in lengths:
        fits = [i for i, b in enumerate(bins) if sum(b) + length <= capacity and (cap is None or len(b) < cap)]
        if not fits:
            bins.append([])
            fits = [len(bins) - 1]
        bins[fits[0]].append(length)
        placed.append(fits[0])
    return placed


def next_fit_by_hand(lengths: list[int], capacity: int, cap: int | None) -> list[int]:
    placed, room, used, number = [], 0, 0, -1
    for length in lengths:
        if length > room or number < 0 or (cap is not None and used == cap):
            number, room, used = number + 1, capacity, 0
        room, used = room - length, used + 1
        placed.append(number)
    return placed


def some_lengths(n: int, capacity: int = 4096, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.clip(np.random.default_rng(seed).lognormal(5.85, 1.0, n), 8, capacity).astype(np.int64)


cases = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)
caps = st.none() | st.integers(1, 5)


@given(cases, caps)
def test_first_fit_in_order_gives_the_bins_of_its_definition(case: tuple[list[int], int], cap: int | None) -> None:
    lengths, capacity = case
    placed = first_fit(np.array(lengths, dtype=np.int64), capacity, max_segments=cap)
    assert placed.tolist() == first_fit_by_hand(lengths, capacity, cap)


@given(cases, caps)
def test_next_fit_gives_the_bins_of_its_definition(case: tuple[list[int], int], cap: int | None) -> None:
    lengths, capacity = case
    placed = next_fit(np.array(lengths, dtype=np.int64), capacity, max_segments=cap)
    assert placed.tolist() == next_fit_by_hand(lengths, capacity, cap)


@given(cases, caps, st.sampled_from(STRATEGIES), st.integers(1, 9), st.integers(0, 3))
def test_every_segment_stands_once_and_no_pack_is_over_its_limits(
    case: tuple[list[int], int], cap: int | None, strategy: str, align: int, seed: int
) -> None:
    lengths, capacity = case
    if align > capacity or any(-(-n // align) > capacity // align for n in lengths):
        return
    placement = place(lengths, capacity, strategy=strategy, max_segments=cap, align=align, seed=seed)
    assert sorted(placement.order.tolist()) == list(range(len(lengths)))
    assert placement.pack_offsets[0] == 0
    assert placement.pack_offsets[-1] == len(lengths)
    assert placement.order.dtype == placement.pack_offsets.dtype == np.int64
    if not lengths:
        assert placement.num_packs == 0
        return
    for pack in packs_of(placement):
        assert pack, "no empty pack"
        assert sum(-(-lengths[i] // align) * align for i in pack) <= capacity
        assert cap is None or len(pack) <= cap


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_arguments_give_the_same_placement_and_another_seed_another(strategy: str) -> None:
    lengths = some_lengths(500)
    one, again, other = (place(lengths, 4096, strategy=strategy, seed=seed) for seed in (4, 4, 5))
    assert np.array_equal(one.order, again.order)
    assert np.array_equal(one.pack_offsets, again.pack_offsets)
    assert not np.array_equal(one.order, other.order)


def test_ffd_places_permuted_segments_and_permutes_the_packs() -> None:
    """The whole of it by hand, from `ffd` and the two permutations."""
    lengths = some_lengths(300)
    order = permutation(300, 9, "segments")
    bins = ffd(lengths[order], 4096)
    by_bin = [
        sorted(np.flatnonzero(bins == b).tolist(), key=lambda i: -lengths[order[i]]) for b in range(bins.max() + 1)
    ]
    expected = [[int(order[i]) for i in by_bin[b]] for b in permutation(len(by_bin), 9, "packs")]
    assert packs_of(place(lengths, 4096, seed=9)) == expected


def test_equal_lengths_are_dealt_at_random() -> None:
    """Neighbours in the input would otherwise stay neighbours in every pack."""
    placement = place([512] * 4000, 4096, seed=1)
    neighbours = sum(abs(a - b) == 1 for pack in packs_of(placement) for a, b in itertools.pairwise(pack))
    assert neighbours < 20


def test_next_fit_keeps_neighbours_in_order_inside_packs_and_shuffles_the_packs() -> None:
    packs = packs_of(place(some_lengths(500), 4096, strategy="next_fit", seed=2))
    assert all(pack == list(range(pack[0], pack[0] + len(pack))) for pack in packs)
    firsts = [pack[0] for pack in packs]
    assert firsts != sorted(firsts)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_p12_no_shard_is_a_curriculum_by_length(strategy: str) -> None:
    """Lengths 1 to 6 in input order; the mean length in each quarter of the packs is that of all."""
    lengths = np.sort(np.random.default_rng(0).integers(1, 7, 6000))
    placement = place(lengths, 6, strategy=strategy, seed=0)
    quarters = np.array_split(np.arange(placement.num_packs), 4)
    means = []
    for quarter in quarters:
        inside = placement.order[placement.pack_offsets[quarter[0]] : placement.pack_offsets[quarter[-1] + 1]]
        means.append(lengths[inside].mean())
    assert np.ptp(means) < 0.4, means


def test_first_fit_in_random_order_is_nearly_as_full_and_as_mixed_as_the_data() -> None:
    lengths = some_lengths(20_000)
    tokens, median = lengths.sum(), np.median(lengths)
    full, short = {}, {}
    for strategy in ("ffd", "first_fit_random"):
        placement = place(lengths, 4096, strategy=strategy)
        full[strategy] = tokens / (placement.num_packs * 4096)
        longest = np.maximum.reduceat(lengths[placement.order], placement.pack_offsets[:-1])
        short[strategy] = float((longest < median).mean())
    assert full["ffd"] > 0.999
    assert 0 <= full["ffd"] - full["first_fit_random"] < 0.004
    assert short["ffd"] > 0.05
    assert short["first_fit_random"] < 0.005


def test_packs_of_ffd_are_at_the_bound_on_lengths_like_those_of_chat() -> None:
    lengths = some_lengths(20_000)
    assert place(lengths, 4096).num_packs <= 1.001 * lower_bound(lengths, 4096)


def test_p16_an_empty_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="length 0 at index 1 is below 1"):
        place([3, 0], 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "worst_fit"}, "strategy must be one of ffd, first_fit_random, next_fit, not 'worst_fit'"),
        ({"max_segments": 0}, "max_segments must be at least 1"),
        ({"align": 0}, "must be at least 1"),
        ({"align": 16}, "above the capacity"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place([5], 8, **arguments)


def test_alignment_reserves_the_room_to_pad_every_segment() -> None:
    """Three segments of 5 at capacity 16: packed to multiples of 8 only two share a pack."""
    assert place([5, 5, 5], 16).num_packs == 1
    assert place([5, 5, 5], 16, align=8).num_packs == 2


def test_max_segments_one_gives_every_segment_a_pack() -> None:
    for strategy in STRATEGIES:
        assert place([1] * 7, 100, strategy=strategy, max_segments=1).num_packs == 7
