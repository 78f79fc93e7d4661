"""JSON lines: every line once with its number, whatever the cuts and the blocks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.sources import count_input
from packsvc.sources.lines import lines_between, split_lines
from packsvc.types import Piece, PieceKind, Reason
from tests.sources.inputs import input_at, jsonl, records_of, rows_of

TEXT = st.binary(max_size=60).map(lambda data: bytes(b"\n {}\r"[b % 5] for b in data))


def blocks_of(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def lines_slowly(data: bytes) -> list[tuple[int, int, bytes]]:
    """(number, first byte, text) of each line."""
    out, at = [], 0
    for number, line in enumerate(data.split(b"\n")):
        if at < len(data):
            out.append((number, at, line))
        at += len(line) + 1
    return out


@given(data=TEXT, size=st.integers(1, 7))
def test_lines_do_not_depend_on_blocks(data: bytes, size: int) -> None:
    assert list(split_lines(blocks_of(data, size))) == [text for _, _, text in lines_slowly(data)]


@given(data=TEXT, cuts=st.lists(st.integers(0, 60)), size=st.integers(1, 9))
def test_any_byte_cuts_give_every_line_once(data: bytes, cuts: list[int], size: int) -> None:
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    found = []
    for start, stop in itertools.pairwise(edges):
        blocks = blocks_of(data[max(start - 1, 0) :], size)
        found.append(list(lines_between(blocks, start=start, stop=stop)))
    for lines, (start, stop) in zip(found, itertools.pairwise(edges), strict=False):
        assert lines == [text for _, at, text in lines_slowly(data) if start <= at < stop]


@given(rows=st.lists(st.one_of(st.none(), st.text(max_size=8), st.integers())), cuts=st.lists(st.integers(0, 300)))
def test_byte_ranges_of_a_file_give_each_row_once_with_its_line_number(
    tmp_path_factory: pytest.TempPathFactory, rows: list[object], cuts: list[int]
) -> None:
    """None stands for a blank line."""
    data = b"".join(b" \t\n" if r is None else jsonl([r]) for r in rows)
    file = input_at(tmp_path_factory.mktemp("cut") / "a.jsonl", data)
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    found = []
    for start, stop in itertools.pairwise(edges):
        first = sum(1 for _, at, _ in lines_slowly(data) if at < start)
        piece = Piece(file=0, kind=PieceKind.BYTES, start=start, stop=stop, first_row=first)
        found += [(row.row, row.record) for row in rows_of(file, piece)]
    assert found == [(number, r) for number, r in enumerate(rows) if r is not None]


def test_a_blank_line_is_no_row_but_counts_as_a_line(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", b'\n{"a": 1}\n   \r\n\n{"a": 2}')
    assert [(row.row, row.record) for row in rows_of(file)] == [(1, {"a": 1}), (4, {"a": 2})]
    assert count_input(file).num_rows == 2


def test_a_bad_line_costs_only_itself_and_keeps_its_text(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", b'{"a": 1}\n{"a": \n{"a": 3}\n')
    first, broken, last = rows_of(file)
    assert (first.record, last.record) == ({"a": 1}, {"a": 3})
    assert (broken.row, broken.raw, broken.error_reason) == (1, '{"a": ', Reason.INVALID_JSON)
    assert broken.error is not None


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n')
    assert records_of(file) == [{"a": 1}]
    assert count_input(file).num_rows == 1
    assert count_input(input_at(tmp_path / "b.jsonl", b"\xef\xbb\xbf\n")).num_rows == 0


def test_the_text_of_a_row_is_kept_as_written(tmp_path: Path) -> None:
    line = '{"messages":  [], "n": 1.50}'
    assert rows_of(input_at(tmp_path / "a.jsonl", line.encode()))[0].raw == line


def test_a_line_of_megabytes_is_one_row(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", jsonl([{"text": "x" * 5_000_000}, {"text": "y"}]))
    assert [len(record["text"]) for record in records_of(file)] == [5_000_000, 1]


def test_other_line_separators_are_text(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u2029c\u0085d\x0ce\rf"}]
    assert records_of(input_at(tmp_path / "a.jsonl", jsonl(rows))) == rows
