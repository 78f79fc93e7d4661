"""What results look like on stdout."""

from __future__ import annotations

import json
from decimal import Decimal

import numpy as np
import pytest

from packsvc.commands.printing import facts, number, print_json, size, table


def test_a_table_aligns_numbers_right_and_words_left() -> None:
    assert table(("source", "rows", "share"), [("chat", 1200, 0.5), ("a", 7, None)]) == (
        "source   rows   share\nchat    1,200  0.5000\na           7       -"
    )


def test_a_table_without_rows_is_its_heading() -> None:
    assert table(("a", "b"), []) == "a  b"


def test_facts_stand_under_each_other() -> None:
    assert facts({"rows": "5", "efficiency": "0.99"}) == "  rows        5\n  efficiency  0.99"


def test_sums_of_sql_read_as_numbers() -> None:
    assert table(("sum",), [(Decimal("1234"),), (Decimal("0.5"),)]) == "   sum\n 1,234\n0.5000"


def test_a_ratio_that_falls_short_of_one_never_reads_as_one() -> None:
    assert number(0.99997) == "0.9999"
    assert number(1.0) == "1.0000"


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (4e12, "4.0 TB")])
def test_sizes_read_well(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


def test_json_is_one_document_whatever_the_numbers_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(
        {"a": np.int64(3), "b": np.float32(0.5), "c": [None, True], "d": float("nan"), 5: "é", "f": Decimal("7")}
    )
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": 3, "b": 0.5, "c": [None, True], "d": None, "5": "é", "f": 7}
    assert out.endswith("}\n")
