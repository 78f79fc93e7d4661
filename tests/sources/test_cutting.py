"""Pieces: bounded, in order, together everything; recut pieces read like the input they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.errors import SourceError
from packsvc.sources import count_input, cut_input, read_piece, recut_input
from packsvc.storage import Store
from packsvc.types import Piece, PieceKind
from tests.sources.inputs import cut_and_read, input_at, jsonl, packed, rows_of

LINES = st.lists(st.sampled_from([b"\n", b'{"a": 1}\n', b'{"text": "' + b"x" * 90 + b'"}\n', b"{bad\n"]), max_size=40)


@given(lines=LINES, max_rows=st.integers(1, 12), max_bytes=st.integers(1, 300), suffix=st.sampled_from(["", ".gz"]))
def test_pieces_hold_each_row_once_within_bounds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], max_rows: int, max_bytes: int, suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    data = b"".join(lines)
    file = input_at(folder / f"a.jsonl{suffix}", packed(data, suffix[1:]))
    count = count_input(file)
    store = Store(str(folder / "out"))
    pieces = cut_input(0, file, count, max_rows=max_rows, max_bytes=max_bytes)
    recut_input(0, file, pieces, store)
    whole = [(row.row, row.record, row.error) for row in rows_of(file)]
    found = []
    for piece in pieces:
        rows = rows_of(file, piece, store)
        assert len(rows) == piece.num_rows
        assert 1 <= len(rows) <= max_rows
        text = sum(len(row.raw or "") + 1 for row in rows)
        assert text <= max_bytes or len(rows) == 1
        found += [(row.row, row.record, row.error) for row in rows]
    assert found == whole


@pytest.mark.parametrize("name", ["a.json", "a.json.zst", "a.csv", "a.csv.gz", "a.jsonl.gz"])
@pytest.mark.parametrize("max_rows", [1, 7, 64, 99])
def test_recut_pieces_read_like_their_input(tmp_path: Path, name: str, max_rows: int) -> None:
    records = [{"a": f"{n}\n\u2028 é", "b": str(n)} for n in range(100)]
    text = {
        "jsonl": b"\xef\xbb\xbf" + jsonl(records[:50]) + b"\n\r\n{bad\n" + jsonl(records[50:]),
        "json": json.dumps(records, indent=2).encode()[:-1] + b', {"n": 12345678901234567890123, "x": NaN}]',
        "csv": b"a,b\n" + "".join(f'"{r["a"]}",{r["b"]}\n' for r in records).encode() + b"1\n\xff,2\n",
    }
    _, kind, *suffix = name.split(".")
    file = input_at(tmp_path / name, packed(text[kind], suffix[0] if suffix else ""))
    count = count_input(file)
    store = Store(str(tmp_path / "out"))
    pieces = cut_input(0, file, count, max_rows=max_rows, max_bytes=1 << 30)
    assert [piece.path for piece in pieces] == [f"recut/0-{k}.jsonl.zst" for k in range(len(pieces))]
    found = cut_and_read(file, count, store, max_rows=max_rows)
    whole = rows_of(file)
    assert [(row.row, row.record) for row in found if row.error is None][:100] == [
        (row.row, row.record) for row in whole if row.error is None
    ]
    assert [row.row for row in found] == [row.row for row in whole]
    assert len(whole) > 100


def test_an_input_that_fits_is_one_piece(tmp_path: Path) -> None:
    for name, data in (
        ("a.jsonl", jsonl([1, 2, 3])),
        ("a.json", b"[1, 2, 3]"),
        ("a.jsonl.gz", packed(b"1\n2\n3\n", "gz")),
    ):
        file = input_at(tmp_path / name, data)
        count = count_input(file)
        (piece,) = cut_input(4, file, count, max_rows=3, max_bytes=1000)
        assert piece == Piece(file=4, kind=PieceKind.WHOLE, num_rows=3, size_bytes=count.size_bytes)


def test_an_input_without_rows_has_no_piece(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", b"\n\n")
    assert cut_input(0, file, count_input(file), max_rows=1, max_bytes=1) == []


def test_a_row_longer_than_a_piece_stands_alone(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", jsonl(["a", "x" * 500, "b", "c"]))
    pieces = cut_input(0, file, count_input(file), max_rows=10, max_bytes=100)
    assert [piece.num_rows for piece in pieces] == [1, 1, 2]


def test_pieces_far_smaller_than_the_marks_are_cut_all_the_same(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", jsonl(range(3000)))
    count = count_input(file)
    pieces = cut_input(0, file, count, max_rows=3, max_bytes=1 << 30)
    assert [piece.num_rows for piece in pieces] == [3] * 1000


def test_recut_writes_only_what_is_missing(tmp_path: Path) -> None:
    from dataclasses import replace

    file = input_at(tmp_path / "a.jsonl.gz", packed(jsonl(range(10)), "gz"))
    count = count_input(file)
    file = replace(file, content_hash=count.content_hash)
    pieces = cut_input(0, file, count, max_rows=4, max_bytes=1 << 30)
    store = Store(str(tmp_path / "out"))
    recut_input(0, file, pieces, store)
    before = {info.name: info.mtime for info in store.list("recut")}
    assert len(before) == 3
    store.remove(pieces[1].path or "")
    recut_input(0, file, pieces, store)
    after = {info.name: info.mtime for info in store.list("recut")}
    assert {name for name in after if after[name] == before[name]} == {pieces[0].path, pieces[2].path}
    assert [row.record for piece in pieces for row in read_piece(piece, file, store=store)] == list(range(10))


def test_a_recut_piece_of_another_content_is_made_again_or_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    store = Store(str(tmp_path / "out"))
    files = []
    for n in (0, 100):
        file = input_at(tmp_path / "a.jsonl.gz", packed(jsonl(range(n, n + 10)), "gz"))
        count = count_input(file)
        files.append(replace(file, content_hash=count.content_hash))
        pieces = cut_input(0, file, count, max_rows=4, max_bytes=1 << 30)
        recut_input(0, files[-1], pieces, store)
    assert [row.record for p in pieces for row in read_piece(p, files[1], store=store)] == list(range(100, 110))
    with pytest.raises(SourceError, match="not made from"):
        rows_of(files[0], pieces[0], store)


def test_a_missing_or_damaged_recut_piece_is_named(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl.gz", packed(jsonl(range(10)), "gz"))
    pieces = cut_input(0, file, count_input(file), max_rows=4, max_bytes=1 << 30)
    store = Store(str(tmp_path / "out"))
    with pytest.raises(SourceError, match=r"recut/0-0.*missing"):
        rows_of(file, pieces[0], store)
    recut_input(0, file, pieces, store)
    store.publish(pieces[0].path or "", store.read(pieces[0].path or "")[:-3])
    with pytest.raises(SourceError, match=r"recut/0-0.*cut short"):
        rows_of(file, pieces[0], store)


def test_an_input_that_changed_since_it_was_counted_is_noticed(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", jsonl(range(10)))
    pieces = cut_input(0, file, count_input(file), max_rows=4, max_bytes=1 << 30)
    input_at(tmp_path / "a.jsonl", jsonl(range(9)))
    with pytest.raises(SourceError, match="the file changed"):
        [rows_of(file, piece) for piece in pieces]


def test_a_trial_run_takes_the_rows_it_names(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", jsonl(range(10)))
    piece = Piece(file=0, kind=PieceKind.WHOLE, num_rows=3, take=(1, 4, 8))
    assert [(row.row, row.record) for row in rows_of(file, piece)] == [(1, 1), (4, 4), (8, 8)]
    assert rows_of(file, Piece(file=0, kind=PieceKind.WHOLE, take=())) == []
