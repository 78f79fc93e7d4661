"""Remote outputs: the same batches, a bounded cache, nothing half-fetched, one more try for what is damaged."""

from __future__ import annotations

import collections
import contextlib
import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from packsvc.errors import ConfigError, DamageError
from packsvc.storage import Store
from packsvc.storage import store as store_module
from packsvc.stream import PackStream
from packsvc.stream.cache import CacheSettings, ShardCache
from tests.objectstore import READ_TIMEOUT_SECONDS, Bucket, Fault
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


def sizes(folder: Path) -> dict[Path, int]:
    """The files of a folder in which threads still fetch and evict, as they stood at one moment."""
    seen: list[dict[Path, int]] = []
    while len(seen) < 2 or seen[-1] != seen[-2]:
        now = {}
        for path in cached(folder):
            with contextlib.suppress(FileNotFoundError):
                now[path] = path.stat().st_size
        seen.append(now)
    return seen[-1]


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
        assert sum(size for path, size in sizes(folder).items() if path.name != "mine.parquet") <= limit
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


def test_the_first_packs_are_read_by_ranges_while_shards_are_fetched(
    local: Written, remote: str, tmp_path, monkeypatch
):
    may_fetch, read = threading.Event(), Store.read

    def held_back(self, name):
        assert not name.startswith("shards") or may_fetch.wait(60)
        return read(self, name)

    monkeypatch.setattr(Store, "read", held_back)
    expected = [fields_of(batch) for batch in PackStream(local.path, batch_packs=3)]
    with PackStream(remote, batch_packs=3, threads=0, cache_dir=tmp_path / "c") as stream:
        batches = iter(stream)
        assert fields_of(next(batches)) == expected[0]
        assert not [path for path in cached(tmp_path / "c") if path.suffix == ".parquet"]
        may_fetch.set()
        assert [fields_of(batch) for batch in batches] == expected[1:]
    assert len(cached(tmp_path / "c")) == 5


def test_processes_of_a_machine_fetch_a_shard_once(local: Written, remote: str, tmp_path, monkeypatch):
    fetched, read = collections.Counter(), Store.read

    def counted(self, name):
        fetched[name] += 1
        return read(self, name)

    monkeypatch.setattr(Store, "read", counted)
    manifest = local.manifest
    caches = [
        ShardCache(Store(remote), manifest, CacheSettings(folder=str(tmp_path / "c"), limit_bytes=None))
        for _ in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:  # each has locks of its own, as another process would
        for entry in manifest.shards:
            list(pool.map(lambda cache, entry=entry: cache.fetch(entry), caches))
    assert fetched == {entry.path: 1 for entry in manifest.shards}
    assert {path.suffix for path in cached(tmp_path / "c")} == {".parquet"}


KILLED = """
import sys, time
from packsvc.shards import Manifest
from packsvc.storage import Store
from packsvc.stream.cache import CacheSettings, ShardCache

def killed_here(self, path, data):
    path.with_name(f"{path.name}.1-abc.tmp").write_bytes(data[:100])
    print("half", flush=True)
    time.sleep(600)

ShardCache._put = killed_here
store = Store(sys.argv[1])
manifest = Manifest.load(store)
ShardCache(store, manifest, CacheSettings(folder=sys.argv[2], limit_bytes=None)).fetch(manifest.shards[0])
"""


def test_a_reader_that_was_killed_hurts_no_other(local: Written, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, local.path, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert {path.suffix for path in cached(tmp_path / "c")} == {".lock", ".tmp"}
    settings = CacheSettings(folder=str(tmp_path / "c"), limit_bytes=None)
    ShardCache(Store(local.path), local.manifest, settings).fetch(local.manifest.shards[0])
    assert [path.name for path in cached(tmp_path / "c")] == [Path(local.manifest.shards[0].path).name]


@pytest.mark.slow
@pytest.mark.parametrize("with_cache", [False, True])
def test_a_bucket_that_fails_every_fifth_request_gives_the_same_batches(
    local: Written, s3: Bucket, tmp_path, monkeypatch, with_cache: bool
):
    monkeypatch.setattr(store_module, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(store_module, "LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(pytest.importorskip("s3fs").S3FileSystem, "retries", 2)
    store = Store(f"{s3.url}/o")
    for path in Path(local.path).rglob("*"):
        if path.is_file():
            store.publish(str(path.relative_to(local.path)), path.read_bytes())
    expected = [fields_of(batch) for batch in PackStream(local.path, batch_packs=2)]
    kinds = (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.DROPPED, Fault.CUT, Fault.SLOW)
    requests, faults = itertools.count(1), itertools.cycle(kinds)
    s3.faults = lambda method, path: next(faults) if next(requests) % 5 == 0 else None
    options = {"cache_dir": tmp_path / "c"} if with_cache else {}
    hasty = {"config_kwargs": {"read_timeout": READ_TIMEOUT_SECONDS}}
    with PackStream(s3.url + "/o", batch_packs=2, storage_options=hasty, **options) as stream:
        assert [fields_of(batch) for batch in stream] == expected
    assert len(s3.met) >= 3
