"""CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.errors import SourceError
from packsvc.sources import count_input
from packsvc.sources.tables import csv_rows
from packsvc.types import Reason
from tests.sources.inputs import input_at, records_of, rows_of
from tests.sources.test_arrays import NAME
from tests.sources.test_lines import blocks_of

CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00\r"), max_size=8)


@given(rows=st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=5), size=st.integers(1, 40))
def test_written_cells_are_read_back(rows: list[list[str]], size: int) -> None:
    sink = io.StringIO(newline="")
    csv.writer(sink).writerows([["a", "b"], *rows])
    found = list(csv_rows(blocks_of(sink.getvalue().encode(), size), file=3, name=NAME))
    assert [(row.file, row.row, row.record) for row in found] == [
        (3, i, {"a": a, "b": b}) for i, (a, b) in enumerate(rows)
    ]


def test_quotes_newlines_and_long_fields(tmp_path: Path) -> None:
    data = b'prompt,completion\n"a ""b""\nc, d",e\n\n' + b"x" * 300_000 + b",y\n"
    file = input_at(tmp_path / "a.csv", data)
    assert records_of(file) == [
        {"prompt": 'a "b"\nc, d', "completion": "e"},
        {"prompt": "x" * 300_000, "completion": "y"},
    ]
    assert count_input(file).num_rows == 2


def test_records_that_do_not_fit_the_header_are_rows_with_an_error(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.csv", b'a,b\n1\n1,2,3\n"x"y,2\n\xff,2\n1,2\n')
    rows = rows_of(file)
    assert [row.row for row in rows] == [0, 1, 2, 3, 4]
    assert [row.error_reason for row in rows[:2]] == [Reason.WRONG_TYPE] * 2
    assert rows[0].error == "1 fields, but the header has 2"
    assert [row.error_reason for row in rows[2:4]] == [Reason.INVALID_JSON] * 2
    assert rows[4].record == {"a": "1", "b": "2"}


def test_a_quote_that_is_never_closed_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.csv", b'a,b\n1,2\n"3,4\n5,6\n')
    with pytest.raises(SourceError, match=r"a\.csv: not CSV from line 3 on"):
        rows_of(file)
    with pytest.raises(SourceError):
        count_input(file)


def test_a_column_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="'a' stands twice"):
        rows_of(input_at(tmp_path / "a.csv", b"a,a\n1,2\n"))


def test_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    assert rows_of(input_at(tmp_path / "a.csv", b"\xef\xbb\xbfa,b\n")) == []
    assert rows_of(input_at(tmp_path / "b.csv", b"")) == []
