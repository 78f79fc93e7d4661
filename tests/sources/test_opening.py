"""Compression, damage, suffixes that lie."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from packsvc.errors import SourceError, StorageError
from packsvc.sources import count_input, sample_rows
from packsvc.sources.opening import suffixes
from packsvc.types import InputFile
from tests.sources.inputs import input_at, jsonl, packed, parquet, records_of, rows_of

ROWS = [{"n": n, "text": f"{n * 7919 % 1009} {n}"} for n in range(2000)]


def skippable(data: bytes) -> bytes:
    return b"\x50\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_all_members_and_frames_are_read(tmp_path: Path, suffix: str) -> None:
    data = jsonl(ROWS)
    parts = [packed(part, suffix) for part in (data[:1000], b"", data[1000:50_000], data[50_000:])]
    if suffix == "zst":
        parts.insert(1, skippable(b"about this file"))
    file = input_at(tmp_path / f"a.jsonl.{suffix}", b"".join(parts))
    assert records_of(file) == ROWS
    assert count_input(file).num_rows == len(ROWS)
    assert count_input(file).size_bytes == len(data)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_compressed_file_cut_short_is_named(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, where: float
) -> None:
    whole = packed(jsonl(ROWS[:300]), suffix)
    file = input_at(tmp_path_factory.mktemp("cut") / f"a.jsonl.{suffix}", whole[: int(where * len(whole))])
    for read in (count_input, rows_of):
        with pytest.raises(SourceError, match=rf"a\.jsonl\.{suffix}"):
            read(file)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_damage_inside_a_compressed_file_is_named(tmp_path: Path, suffix: str, kind: str) -> None:
    data = {"jsonl": jsonl(ROWS), "json": b"[" + jsonl(ROWS).replace(b"}\n", b"},") + b"{}]"}
    data["csv"] = b"n,text\n" + b"".join(b"%d,%d\n" % (r["n"], r["n"]) for r in ROWS)  # type: ignore[str-format]
    whole = bytearray(packed(data[kind], suffix))
    # Not every zstd writer adds checksums, so there the damage is where the structure of the frame shows it.
    at = len(whole) // 2 if suffix == "gz" else 8
    whole[at : at + 8] = b"\0\xff\0\xff\0\xff\0\xff"
    file = input_at(tmp_path / f"a.{kind}.{suffix}", bytes(whole))
    for read in (count_input, rows_of):
        with pytest.raises(SourceError, match=rf"a\.{kind}\.{suffix}"):
            read(file)


def test_bytes_after_a_gzip_stream_are_not_passed_over(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl.gz", gzip.compress(b"{}\n") + b"more")
    with pytest.raises(SourceError):
        rows_of(file)


def test_first_rows_of_a_damaged_file_can_be_looked_at(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl.gz", gzip.compress(jsonl(ROWS * 40))[:-10])
    assert [row.record for row in sample_rows(file, limit=3)] == ROWS[:3]


def test_a_name_that_says_compressed_must_be(tmp_path: Path) -> None:
    for suffix in ("gz", "zst"):
        with pytest.raises(SourceError, match=f"named .{suffix}, but its content is not"):
            rows_of(input_at(tmp_path / f"a.jsonl.{suffix}", b"{}\n"))


def test_content_tells_what_a_name_hides(tmp_path: Path) -> None:
    table = Path(parquet(tmp_path / "t.parquet", ROWS[:3]).url).read_bytes()
    for name, data in (
        ("a.jsonl", packed(jsonl(ROWS[:3]), "gz")),
        ("b.json", packed(jsonl(ROWS[:3]), "zst")),
        ("c.json", table),
        ("d.arrow", table),
        ("e.parquet.gz", packed(table, "gz")),
        ("f.parquet.zst", packed(table, "zst")),
        ("g.csv", jsonl(ROWS[:3])),
    ):
        file = input_at(tmp_path / name, data)
        assert records_of(file) == ROWS[:3], name
        assert count_input(file).num_rows == 3


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_a_table_that_is_none_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match=r"a\.\w+: named"):
        rows_of(input_at(tmp_path / name, b"hello"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.json.zst"])
def test_an_empty_file_that_cannot_be_empty_was_cut_short(tmp_path: Path, name: str) -> None:
    for read in (count_input, rows_of):
        with pytest.raises(SourceError, match="cut short"):
            read(input_at(tmp_path / name, b""))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_empty_text_is_no_rows(tmp_path: Path, name: str) -> None:
    file = input_at(tmp_path / name, b"")
    assert (rows_of(file), count_input(file).num_rows) == ([], 0)


def test_utf16_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="UTF-16"):
        rows_of(input_at(tmp_path / "a.jsonl", '{"a": 1}\n'.encode("utf-16")))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = InputFile(path="data/a.jsonl", url=str(tmp_path / "a.jsonl"), source="s", size_bytes=1)
    for read in (count_input, rows_of):
        with pytest.raises(SourceError, match=r"data/a\.jsonl: no such file"):
            read(file)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    file = InputFile(path="a.jsonl", url=str(tmp_path), source="s", size_bytes=1)
    with pytest.raises(SourceError, match=r"a\.jsonl"):
        rows_of(file)


def test_suffixes_are_told_from_dots_in_names() -> None:
    assert suffixes("x/part.v1.jsonl.gz") == ("jsonl", "gz")
    assert suffixes("x.jsonl/part") == (None, None)
    assert suffixes("A.JSONL.ZST") == ("jsonl", "zst")
    assert suffixes("a.tar.gz") == (None, "gz")


def test_a_memory_file_system_is_read_like_a_local_one(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/sources-test/a.jsonl.zst", pa.compress(jsonl(ROWS), codec="zstd", asbytes=True))
    file = InputFile(path="a.jsonl.zst", url="memory://sources-test/a.jsonl.zst", source="s", size_bytes=1)
    assert records_of(file) == ROWS


class Failing:
    """A stream whose reads fail a number of times before each succeeds."""

    def __init__(self, stream: BinaryIO, error: Exception, times: int) -> None:
        self._stream, self._error, self._times, self._left = stream, error, times, times

    def read(self, size: int = -1) -> bytes:
        if self._left:
            self._left -= 1
            self._stream.read(7)  # a failed read may have moved on
            raise self._error
        self._left = self._times
        return self._stream.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception, int], None]:
    def install(error: Exception, times: int) -> None:
        opened = LocalFileSystem.open
        monkeypatch.setattr(
            LocalFileSystem, "open", lambda self, *args, **more: Failing(opened(self, *args, **more), error, times)
        )
        monkeypatch.setattr("time.sleep", lambda seconds: None)

    return install


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.zst", "a.parquet"])
def test_a_read_that_fails_in_passing_is_tried_again(
    tmp_path: Path, name: str, failing: Callable[[Exception, int], None]
) -> None:
    if name == "a.parquet":
        parquet(tmp_path / name, ROWS)
        file = input_at(tmp_path / name)
    else:
        file = input_at(tmp_path / name, packed(jsonl(ROWS), name.rsplit(".", 1)[-1]))
    failing(ConnectionResetError("reset"), 2)
    assert records_of(file) == ROWS
    assert count_input(file).num_rows == len(ROWS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_storage_that_does_not_answer_is_no_fault_of_the_input(
    tmp_path: Path, name: str, failing: Callable[[Exception, int], None]
) -> None:
    if name == "a.parquet":
        parquet(tmp_path / name, ROWS)
        file = input_at(tmp_path / name)
    else:
        file = input_at(tmp_path / name, packed(jsonl(ROWS), name.rsplit(".", 1)[-1]))
    failing(ConnectionResetError("reset"), 10**9)
    with pytest.raises(StorageError, match="a\\."):
        rows_of(file)
