"""Compiled code places every length where numpy does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.compiled import native
from packsvc.plan import decreasing, ffd
from packsvc.plan.decreasing import Histogram, place_by_plan, plan_histogram
from tests.marks import needs_compiled

pytestmark = needs_compiled


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 60), max_size=300),
    st.sampled_from(["int8", "uint16", "int32", "uint32", "int64", "uint64", ">i4"]),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_equals_numpy(lengths: list[int], dtype: str, cap: int | None, strided: bool) -> None:
    values = np.array(lengths, dtype=dtype)
    if strided:
        values = np.repeat(values, 2)[::2]

    def both() -> tuple[list[int], ...]:
        histogram = Histogram.of(values)
        plan = plan_histogram(histogram, 60, max_segments=cap)
        parts = histogram.lengths, histogram.counts, place_by_plan(values, histogram, plan)
        return tuple(part.tolist() for part in parts)

    found = both()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decreasing, "native", None)
        assert both() == found


def test_a_hundred_thousand_equal_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 100_000), 1, 4096).astype(np.int32)
    found = ffd(lengths, 4096)
    monkeypatch.setattr(decreasing, "native", None)
    assert np.array_equal(ffd(lengths, 4096), found)


def placed(lengths: list[int], lines: list[list[int]], first_line: list[int]) -> list[int]:
    bins = np.full(len(lengths), -1, dtype=np.int64)
    table = np.array(lines, dtype=np.int64).reshape(-1, 4)
    native.place_lengths(np.array(lengths, dtype=np.int32), table, np.array(first_line, dtype=np.int64), bins)
    return bins.tolist()


def test_what_is_no_plan_of_the_lengths_is_an_error() -> None:
    lines, first = [[3, 0, 1, 2], [3, 7, 2, 1], [1, 2, 1, 1]], [0, 2, 0, 0]
    assert placed([3, 1, 3, 3, 3], lines, first) == [0, 2, 0, 7, 8]
    for lengths in ([3] * 5, [1, 1], [2], [4], [-1]):
        with pytest.raises(ValueError, match="a plan of these lengths"):
            placed(lengths, lines, first)
    for wrong in ([3, -1, 1, 2], [3, 0, 0, 2], [3, 0, 1, 0], [3, 0, 1, 1 << 31]):
        with pytest.raises(ValueError, match="a plan of these lengths"):
            placed([3], [wrong], first)
    for places in ([0, 2, 0, 4], [0, 2, 0, -1]):
        with pytest.raises(ValueError, match="a plan of these lengths"):
            placed([1], lines, places)


def test_lengths_without_a_place_in_the_table_are_an_error() -> None:
    for length in (-1, 4):
        with pytest.raises(ValueError, match="a place for every length"):
            native.count_lengths(np.array([1, length]), np.zeros(4, dtype=np.int64))
    with pytest.raises(ValueError, match="4 or 8 bytes"):
        native.count_lengths(np.array([1], dtype=np.int16), np.zeros(4, dtype=np.int64))
    with pytest.raises(ValueError, match="a place for every length"):
        native.count_lengths(np.array([1]), np.zeros(4, dtype=np.int32))
