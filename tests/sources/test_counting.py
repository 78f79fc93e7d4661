"""Counting equals reading; marks are true places."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.sources import content_hash, count_input
from packsvc.sources.counting import LineCounter, Mark
from packsvc.sources.lines import is_blank
from packsvc.types import PieceKind
from tests.sources.inputs import input_at, jsonl, packed, parquet, rows_of
from tests.sources.test_lines import TEXT, blocks_of, lines_slowly


@given(data=TEXT, size=st.integers(1, 9))
def test_rows_and_marks_are_those_of_a_slow_count(data: bytes, size: int) -> None:
    counter = LineCounter()
    for block in blocks_of(data, size):
        counter.add(block)
    *marks, end = counter.finish()
    lines = lines_slowly(data)
    rows_before = [sum(not is_blank(text) for _, _, text in lines[:i]) for i in range(len(lines) + 1)]
    assert end == Mark(len(lines), len(data), rows_before[-1])
    assert set(marks) <= {Mark(n, at, rows_before[n]) for n, at, _ in lines} | {Mark(0, 0, 0)}
    assert {mark.row for mark in (*marks, end)} == set(range(len(lines) + 1))  # few lines: a mark at each


def test_marks_of_many_lines_are_few(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", b'{"a":1}\n' * 50_000)
    marks = count_input(file).marks
    assert marks[-1] == Mark(50_000, 400_000, 50_000)
    assert 10 < len(marks) < 600
    assert all(mark.offset == 8 * mark.row for mark in marks)
    closer = count_input(file, max_rows=40).marks
    assert max(b.row - a.row for a, b in itertools.pairwise(closer)) <= 10


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.csv", "a.csv.zst"])
def test_counting_equals_reading(tmp_path: Path, name: str) -> None:
    text = {
        "jsonl": b"\n" + jsonl([{"a": n} for n in range(300)]) + b" \n{bad\n\n",
        "json": b"[" + b",\n".join(b'{"a": %d}' % n for n in range(300)) + b"]",
        "csv": b'a,b\n"x\ny",1\n\n' + b"1,2\n" * 298 + b"1\n",
    }
    _, kind, *suffix = name.split(".")
    file = input_at(tmp_path / name, packed(text[kind], suffix[0] if suffix else ""))
    count = count_input(file)
    assert count.num_rows == len(rows_of(file)) > 290
    assert count.size_bytes == len(text[kind])
    assert count.content_hash == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == content_hash(file)
    assert count.kind is (PieceKind.BYTES if name == "a.jsonl" else PieceKind.RECUT)


def test_parquet_is_known_by_its_footer(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [{"a": n} for n in range(10)], row_group_size=4)
    data = (tmp_path / "a.parquet").read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    count = count_input(file)
    assert count.content_hash == hashlib.sha256(data[-8 - length :]).hexdigest() == content_hash(file)
    assert [mark.row for mark in count.marks] == [0, 4, 8, 10]
    meta = pq.read_metadata(tmp_path / "a.parquet")
    assert count.size_bytes == sum(meta.row_group(i).total_byte_size for i in range(3))


def test_the_hash_changes_with_the_content_and_not_with_the_time(tmp_path: Path) -> None:
    import os

    file = input_at(tmp_path / "a.jsonl", b"{}\n")
    before = count_input(file).content_hash
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert count_input(file).content_hash == before
    assert count_input(input_at(tmp_path / "a.jsonl", b"[]\n")).content_hash != before
