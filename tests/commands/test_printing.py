"""What results look like on stdout."""

from __future__ import annotations

import json

import numpy as np
import pytest

from packsvc.commands.printing import facts, print_json, size, summary, table

TOTALS = {
    "rows": 530, "packed": 520, "rejected": 8, "rejected_parts": 0, "filtered": 0, "left_out": 2,
    "rejected_by_reason": {"overlong": 8}, "truncated": 0, "split": 0, "reasoning_dropped": 3, "edge_tokens": 0,
    "turns_without_stop": 0, "packs": 60, "segments": 520, "tokens": 245_000, "loss_tokens": 90_000,
    "encoded_tokens": 286_000, "repeated_tokens": 0, "padding_tokens": 760, "cut_tokens": 0,
    "rejected_tokens": 41_000, "efficiency": 0.9969075, "max_segments": 31,
}  # fmt: skip


def test_a_table_aligns_numbers_right_and_words_left() -> None:
    assert table(("source", "rows", "share"), [("chat", 1200, 0.5), ("a", 7, None)]) == (
        "source   rows   share\nchat    1,200  0.5000\na           7       -"
    )


def test_a_table_without_rows_is_its_heading() -> None:
    assert table(("a", "b"), []) == "a  b"


def test_facts_stand_under_each_other() -> None:
    assert facts({"rows": "5", "efficiency": "0.99"}) == "  rows        5\n  efficiency  0.99"


def test_the_summary_names_every_loss_and_leaves_out_what_did_not_happen() -> None:
    text = summary(TOTALS)
    assert "rejected           8 (overlong 8)" in text
    assert "left out           2 rows left out by weight" in text
    assert "reasoning dropped  3 trained turns without loss" in text
    assert "rejected tokens    41,000" in text
    assert "efficiency         0.9969" in text
    assert "tokens             245,000, of 245,760 places" in text
    assert "loss tokens        90,000 (36.7% of the tokens)" in text
    assert "filtered" not in text
    assert "truncated" not in text


def test_efficiency_is_never_rounded_up_to_one() -> None:
    assert "efficiency         1.0000" not in summary({**TOTALS, "efficiency": 0.99997})


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (4e12, "4.0 TB")])
def test_sizes_read_well(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


def test_json_is_one_document_whatever_the_numbers_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": np.int64(3), "b": np.float32(0.5), "c": [None, True], "d": float("nan"), 5: "é"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": 3, "b": 0.5, "c": [None, True], "d": None, "5": "é"}
    assert out.endswith("}\n")
