"""Conditions and weights."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.sources import copies, passes
from packsvc.types import RawRow
from tests.sources.inputs import row


@pytest.mark.parametrize(
    ("value", "wanted", "in_or_out"),
    [
        ("en", "en", True),
        ("en", "de", False),
        ("en", ["de", "en"], True),
        ("en", [], False),
        (["en", "de"], "en", True),
        (["en", "de"], ["fr", "de"], True),
        (["en", "de"], "fr", False),
        ([], [], True),
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (True, True, True),
        (False, [0], False),
        (0, [False], False),
        (None, None, True),
        ("1", 1, False),
        ({"a": 1}, {"a": 1}, True),
    ],
)
def test_equality_or_membership(value: Any, wanted: Any, in_or_out: bool) -> None:
    assert passes(row({"x": value}), {"x": wanted}) is in_or_out


def test_a_missing_column_is_not_equal() -> None:
    assert not passes(row({}), {"x": "en"})
    assert not passes(row({}), {"x": ["en", "de"]})


def test_all_conditions_must_hold() -> None:
    assert passes(row({"a": 1, "b": 2}), {"a": 1, "b": [2, 3]})
    assert not passes(row({"a": 1, "b": 2}), {"a": 1, "b": 3})
    assert passes(row({"a": 1}), {})


def test_rows_that_will_be_rejected_are_not_filtered() -> None:
    assert passes(RawRow(file=0, row=0, raw="{", error="cut"), {"a": 1})
    assert passes(row([1]), {"a": 1})


def test_the_documented_hash_decides() -> None:
    key = '[7,"weight","chat","data/é.jsonl",12]'.encode()
    drawn = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
    for weight in (drawn - 1e-9, drawn + 1e-9):
        assert copies(weight, seed=7, source="chat", path="data/é.jsonl", row=12) == (drawn < weight)


@given(weight=st.floats(0, 5), row_number=st.integers(0, 2**40))
def test_copies_are_the_whole_part_or_one_more(weight: float, row_number: int) -> None:
    n = copies(weight, seed=0, source="s", path="p", row=row_number)
    assert int(weight) <= n <= int(weight) + (weight % 1 > 0)
    assert n == copies(weight, seed=0, source="s", path="p", row=row_number)


def test_the_share_is_kept_and_a_larger_weight_keeps_what_a_smaller_kept() -> None:
    taken = {
        w: {r for r in range(4000) if copies(w, seed=1, source="s", path="p", row=r)} for w in (0.0, 0.3, 0.5, 1.0)
    }
    assert [len(taken[w]) for w in (0.0, 1.0)] == [0, 4000]
    assert 1100 < len(taken[0.3]) < 1300
    assert taken[0.3] < taken[0.5]
    assert sum(copies(2.3, seed=1, source="s", path="p", row=r) for r in range(4000)) == 8000 + len(
        {r for r in range(4000) if copies(2.3, seed=1, source="s", path="p", row=r) == 3}
    )


def test_seed_source_path_and_row_all_count() -> None:
    def drawn(**changed: Any) -> list[int]:
        base = {"seed": 0, "source": "s", "path": "p"} | changed
        return [copies(0.5, row=r, **base) for r in range(64)]

    assert len({tuple(drawn(**change)) for change in ({}, {"seed": 1}, {"source": "t"}, {"path": "q"})}) == 4
