"""Remote outputs: the same batches, a bounded cache, nothing half-fetched, one more try for what is damaged."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from packsvc.errors import ConfigError, DamageError
from packsvc.stream import PackStream
from tests.stream.oracle import fields_of
from tests.stream.outputs import Written, write_output


@pytest.fixture
def local(tmp_path) -> Written:
    """Five shards of 3 packs."""
    return write_output(tmp_path / "o", [3] * 5, rows_per_group=2)


@pytest.fixture
def remote(local: Written):
    """The same output in fsspec's memory."""
    memory = fsspec.filesystem("memory")
    memory.put(local.path, "/bucket/o", recursive=True)
    yield "memory://bucket/o"
    memory.rm("/bucket", recursive=True)


def cached(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def total(local: Written) -> int:
    return sum(entry.size_bytes for entry in local.manifest.shards)


@pytest.mark.parametrize("with_cache", [False, True])
def test_a_remote_output_gives_the_same_batches(local: Written, remote: str, tmp_path, with_cache: bool):
    expected = [fields_of(batch) for batch in PackStream(local.path, batch_packs=2)]
    options = {"cache_dir": tmp_path / "c", "cache_limit": "1MB"} if with_cache else {}
    assert [fields_of(batch) for batch in PackStream(remote, batch_packs=2, **options)] == expected
    names = {path.name for path in cached(tmp_path / "c")}
    assert names == ({Path(entry.path).name for entry in local.manifest.shards} if with_cache else set())


def test_a_second_reader_fetches_nothing_again(local: Written, remote: str, tmp_path, monkeypatch):
    list(PackStream(remote, cache_dir=tmp_path / "c"))
    memory = fsspec.filesystem("memory")
    for entry in local.manifest.shards:
        memory.rm(f"/bucket/o/{entry.path}")
    assert len(list(PackStream(remote, cache_dir=tmp_path / "c", check="all"))) == 15


@pytest.mark.parametrize("threads", [0, 3])
def test_the_cache_keeps_to_its_limit_and_evicts_only_what_it_fetched(local: Written, remote: str, tmp_path, threads):
    largest = max(entry.size_bytes for entry in local.manifest.shards)
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "mine.parquet").write_bytes(b"x" * 10 * total(local))
    limit = 2 * largest
    stream = PackStream(remote, cache_dir=folder, cache_limit=limit, threads=threads)
    packs = []
    for batch in stream:
        packs += batch.pack_indices
        assert sum(path.stat().st_size for path in cached(folder) if path.name != "mine.parquet") <= limit
    assert sorted(packs) == list(range(15))
    assert (folder / "mine.parquet").stat().st_size == 10 * total(local)


def test_a_limit_that_holds_no_shard_is_refused_with_the_numbers(local: Written, remote: str, tmp_path):
    largest = max(entry.size_bytes for entry in local.manifest.shards)
    with pytest.raises(ConfigError, match=f"cache_limit is 100 bytes, but a shard of .* has {largest}"):
        PackStream(remote, cache_dir=tmp_path / "c", cache_limit=100)
    with pytest.raises(ConfigError, match="not a size"):
        PackStream(remote, cache_dir=tmp_path / "c", cache_limit="plenty")


def test_a_local_output_is_read_where_it_is(local: Written, tmp_path):
    list(PackStream(local.path, cache_dir=tmp_path / "c", cache_limit=1))
    assert not (tmp_path / "c").exists()


def test_a_damaged_copy_is_fetched_once_more(local: Written, remote: str, tmp_path):
    expected = [fields_of(batch) for batch in PackStream(local.path)]
    list(PackStream(remote, cache_dir=tmp_path / "c"))
    for path in cached(tmp_path / "c"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    assert [fields_of(batch) for batch in PackStream(remote, cache_dir=tmp_path / "c")] == expected


@pytest.mark.parametrize("with_cache", [False, True])
def test_what_stays_damaged_is_raised_with_shard_and_pack(local: Written, remote: str, tmp_path, with_cache: bool):
    memory = fsspec.filesystem("memory")
    path = f"/bucket/o/{local.manifest.shards[1].path}"
    data = bytearray(memory.cat(path))
    data[len(data) // 3] ^= 1
    memory.pipe(path, bytes(data))
    stream = PackStream(remote, shuffle=False, cache_dir=tmp_path / "c" if with_cache else None)
    with pytest.raises(DamageError, match=f"pack 3 cannot be read.*{Path(path).name}"):
        list(stream)
    assert stream.state_dict()["position"] == 3
    assert not [p for p in cached(tmp_path / "c") if p.name == Path(path).name]


def test_a_truncated_download_never_becomes_a_shard(local: Written, remote: str, tmp_path):
    memory = fsspec.filesystem("memory")
    path = f"/bucket/o/{local.manifest.shards[0].path}"
    memory.pipe(path, memory.cat(path)[:-7])
    with pytest.raises(DamageError, match="the manifest says"):
        next(iter(PackStream(remote, shuffle=False, threads=0, cache_dir=tmp_path / "c")))
    assert cached(tmp_path / "c") == []
