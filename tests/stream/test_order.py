"""The order is a permutation, a pure function of an index, and keeps packs inside their window."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.stream.order import PackOrder, permute

KEYS = np.arange(1, 9, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def order(sizes: list[int], **options: object) -> PackOrder:
    firsts = np.cumsum([0, *sizes[:-1]])
    return PackOrder(firsts, sizes, **{"seed": 0, "epoch": 0, "shuffle": True, **options})


def walked(o: PackOrder) -> list[int]:
    return o.packs(np.arange(len(o))).tolist()


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**60))
def test_permute_is_one_to_one(size, seed):
    keys = KEYS ^ np.uint64(seed)
    assert sorted(permute(np.arange(size), size, keys).tolist()) == list(range(size))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 5),
    shards=st.integers(1, 9),
    packs=st.integers(1, 40),
)
def test_every_pack_once_and_inside_its_window(sizes, seed, epoch, shards, packs):
    """A window is a run of whole shards, at least as large as asked in both ways, unless it is the only one."""
    o = order(sizes, seed=seed, epoch=epoch, window_shards=shards, window_packs=packs)
    found = walked(o)
    assert sorted(found) == list(range(sum(sizes)))
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    seen: set[int] = set()
    for start, stop in pairwise(o.windows.tolist()):
        inside = set(shard_of[found[start:stop]].tolist())
        assert sum(sizes[s] for s in inside) == stop - start
        assert not inside & seen
        seen |= inside
        if len(o.windows) > 2:
            assert len(inside) >= shards
            assert stop - start >= packs
    assert len(seen) == len(sizes)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), data=st.data())
def test_an_index_alone_gives_what_the_whole_order_has_there(sizes, data):
    o = order(sizes, window_shards=2, window_packs=5)
    whole = walked(o)
    places = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8))
    assert o.packs(np.array(places, dtype=np.int64)).tolist() == [whole[i] for i in places]


def test_seeds_and_epochs_and_streams_give_other_orders_and_the_same_ones_again():
    sizes = [5] * 8
    found = [walked(order(sizes, seed=s, epoch=e, stream=m)) for s in (0, 1) for e in (0, 1) for m in (0, 1)]
    assert len({tuple(f) for f in found}) == 8
    assert found[0] == walked(order(sizes))


def test_without_shuffle_it_is_manifest_order_whatever_the_seed():
    assert walked(order([3, 4, 2], shuffle=False, seed=7, epoch=3)) == list(range(9))


def test_the_order_is_pinned():
    """A change of it would break every resume; it needs another state version."""
    assert walked(order([3, 4, 2, 5], window_shards=2, window_packs=1)) == [
        9,
        13,
        8,
        12,
        7,
        11,
        10,
        1,
        5,
        0,
        6,
        4,
        2,
        3,
    ]
    assert permute(np.arange(10), 10, KEYS).tolist() == [8, 7, 0, 9, 6, 3, 4, 5, 1, 2]


def test_places_inside_a_window_are_uniform():
    """Chi-squared over where pack 0 of a window of 16 lands, for 3,200 epochs."""
    landed = np.zeros(16)
    for epoch in range(3200):
        o = order([4, 4, 4, 4], epoch=epoch)
        landed[walked(o).index(0)] += 1
    chi2 = float(((landed - 200) ** 2 / 200).sum())
    assert chi2 < 45  # 15 degrees of freedom: one in 10,000


def test_neighbours_do_not_stay_neighbours():
    found = np.array(walked(order([500] * 8)))
    assert np.mean(np.abs(np.diff(found)) == 1) < 0.005


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_smallest_sets(size):
    assert sorted(walked(order([1] * size))) == list(range(size))
