"""The interleaving of outputs: near its parts after any prefix, and a pure function of the position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.stream.mixing import Mixture

PARTS = st.lists(st.floats(0.01, 1), min_size=2, max_size=5)


def slow(parts: list[float], sizes: list[int]) -> list[tuple[int, int]]:
    """All packs sorted by due time, cut after the last pack of the first output used up."""
    total = sum(parts)
    due = sorted(
        ((j + 0.5) / (p / total), i, j) for i, (p, n) in enumerate(zip(parts, sizes, strict=True)) for j in range(n)
    )
    taken = []
    for _, i, j in due:
        taken.append((i, j))
        if j == sizes[i] - 1:
            return taken
    raise AssertionError


@given(parts=PARTS, data=st.data())
def test_equals_sorting_all_packs_by_due_time(parts, data):
    sizes = [data.draw(st.integers(1, 40)) for _ in parts]
    mixture = Mixture(parts, sizes)
    expected = slow(parts, sizes)
    assert len(mixture) == len(expected)
    outputs, numbers = mixture.picks(0, len(mixture))
    assert list(zip(outputs.tolist(), numbers.tolist(), strict=True)) == expected
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    outputs, numbers = mixture.picks(start, stop)
    assert list(zip(outputs.tolist(), numbers.tolist(), strict=True)) == expected[start:stop]


@given(parts=PARTS)
def test_every_prefix_is_near_its_parts(parts):
    mixture = Mixture(parts, [10**6] * len(parts))
    outputs, _ = mixture.picks(0, 400)
    counts = np.cumsum(outputs[:, None] == np.arange(len(parts)), axis=0)
    ideal = np.arange(1, 401)[:, None] * (np.array(parts) / sum(parts))
    assert np.abs(counts - ideal).max() <= 0.5 + len(parts) / 2


def test_two_outputs_never_stray_by_more_than_a_pack():
    for part in np.linspace(0.05, 0.95, 19):
        outputs, _ = Mixture([part, 1 - part], [10**6] * 2).picks(0, 1000)
        assert np.abs(np.cumsum(outputs == 0) - np.arange(1, 1001) * part).max() <= 1


def test_far_positions_are_exact_too():
    mixture = Mixture([0.7, 0.3], [7 * 10**9, 3 * 10**9])
    outputs, numbers = mixture.picks(10**9, 10**9 + 10)
    first = {o: int(numbers[outputs == o][0]) for o in (0, 1)}
    assert first[0] + first[1] == 10**9
    assert abs(first[0] - 7 * 10**8) <= 1


@pytest.mark.parametrize(("sizes", "length"), [([3, 100], 5), ([100, 1], 2), ([1, 1], 1)])
def test_the_first_output_used_up_ends_the_epoch(sizes, length):
    assert len(Mixture([1, 1], sizes)) == length
