"""Position ids rebuilt from boundaries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.assemble import position_ids, position_ids_from_cu_seqlens
from packsvc.errors import FormatError


def test_the_documented_example() -> None:
    positions = position_ids_from_cu_seqlens(np.array([0, 3, 5], dtype=np.int32), seq_len=8)
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert positions.dtype == np.int32


@given(st.lists(st.sets(st.integers(1, 19)), min_size=1, max_size=5))
def test_positions_count_from_every_boundary(inner: list[set[int]]) -> None:
    seq_len = 20
    bounds = [[0, *sorted(cuts), seq_len] for cuts in inner]
    expected = [[i for a, b in itertools.pairwise(row) for i in range(b - a)] for row in bounds]
    flat = np.array([bound for row in bounds for bound in row], dtype=np.int32)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in bounds])))
    assert position_ids(flat, offsets, seq_len=seq_len).tolist() == expected
    for row, positions in zip(bounds, expected, strict=True):
        assert position_ids_from_cu_seqlens(np.array(row, dtype=np.int32), seq_len=seq_len).tolist() == positions
        short = np.array(row[:-1], dtype=np.int32)
        assert position_ids_from_cu_seqlens(short, seq_len=seq_len).tolist() == positions, "a tail counts from 0"


def test_no_packs_have_no_positions() -> None:
    none = position_ids(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64), seq_len=4)
    assert none.shape == (0, 4)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 3, 9], "the last boundary of cu_seqlens is 9, beyond seq_len 8"),
        ([1, 8], "must start at 0"),
        ([], "must start at 0"),
        ([0, 3, 3, 8], "boundary 2 is 3 after 3"),
        ([0, 5, 4], "boundary 2 is 4 after 5"),
    ],
)
def test_boundaries_that_are_none_are_refused(bounds: list[int], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        position_ids_from_cu_seqlens(np.array(bounds, dtype=np.int32), seq_len=8)
