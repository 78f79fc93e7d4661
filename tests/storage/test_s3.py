"""The store on a real S3 server over HTTP: conditional puts, whole files, fresh listings, and every way to fail."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import packsvc.storage.store as module
from packsvc.errors import StorageError
from packsvc.storage import Store
from tests.objectstore import ANYTIME, READ_TIMEOUT_SECONDS, Bucket, Fault, stored

boto3 = pytest.importorskip("boto3")
s3fs = pytest.importorskip("s3fs")
HASTY = {"config_kwargs": {"read_timeout": READ_TIMEOUT_SECONDS}}
WHOLE = os.urandom(1 << 20)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(module, "LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)  # it tries too, five times, and waits in between


@pytest.fixture
def store(s3: Bucket) -> Store:
    return Store(f"{s3.url}/out")


def test_files_go_there_and_back(store: Store, s3: Bucket) -> None:
    store.publish("shards/a.parquet", WHOLE)
    store.publish("empty", b"")
    assert store.read("shards/a.parquet") == WHOLE
    assert store.read_range("shards/a.parquet", 10, 20) == WHOLE[10:20]
    with store.open("shards/a.parquet") as file:
        file.seek(-5, 2)
        assert file.read() == WHOLE[-5:]
    info = store.info("shards/a.parquet")
    assert info is not None
    assert (info.size_bytes, info.name) == (1 << 20, "shards/a.parquet")
    assert info.etag
    assert info.mtime
    assert store.info("none") is None
    assert store.info("shards") is None
    with pytest.raises(FileNotFoundError):
        store.read("none")
    assert stored(s3) == {"out/shards/a.parquet": WHOLE, "out/empty": b""}
    store.remove("empty")
    store.remove("empty")
    assert [f.name for f in store.list()] == ["shards/a.parquet"]


def test_a_listing_sees_at_once_what_others_did(store: Store, s3: Bucket) -> None:
    """Others are on other machines: they share nothing with us but the bucket."""
    other = boto3.client("s3", endpoint_url=s3.direct)
    where = {"Bucket": s3.url.removeprefix("s3://")}
    store.publish("commits/0", b"0")

    def seen() -> dict[str, int]:
        return {f.name: f.size_bytes for f in store.list()}

    assert seen() == {"commits/0": 1}
    assert store.info("commits/1") is None
    other.put_object(**where, Key="out/commits/1", Body=b"1")
    assert seen() == {"commits/0": 1, "commits/1": 1}
    assert store.info("commits/1") is not None
    other.put_object(**where, Key="out/commits/1", Body=b"22")
    assert seen() == {"commits/0": 1, "commits/1": 2}
    found = store.info("commits/1")
    assert found is not None
    assert found.size_bytes == 2
    other.delete_object(**where, Key="out/commits/1")
    assert seen() == {"commits/0": 1}
    assert store.info("commits/1") is None


def test_of_many_who_put_at_once_exactly_one_wins(s3: Bucket) -> None:
    start = threading.Barrier(8)
    won: list[int] = []

    def put(number: int) -> None:
        mine = Store(f"{s3.url}/out")
        start.wait()
        if mine.put_if_absent("plan.json", b"%d" % number * 1000):
            won.append(number)

    threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert stored(s3) == {"out/plan.json": b"%d" % won[0] * 1000}


CLIENT_FAULTS = (*ANYTIME, Fault.THROTTLED, Fault.SLOW)


@pytest.mark.parametrize("fault", CLIENT_FAULTS, ids=lambda f: f.name)
@pytest.mark.parametrize("verb", ["publish", "put_if_absent"])
def test_a_write_outlives_faults(s3: Bucket, fault: Fault, verb: str) -> None:
    """Also where it was done and only the answer was lost: then it is still ours."""
    store = Store(f"{s3.url}/out", storage_options=HASTY)
    s3.strike(fault, fault, method="PUT")
    assert getattr(store, verb)("a", WHOLE) in (None, True)
    assert s3.met == {fault}
    assert stored(s3) == {"out/a": WHOLE}


def test_writers_in_each_others_way_try_again(store: Store, s3: Bucket) -> None:
    """S3 answers 409 where two conditional writes meet, to both of them at worst."""
    s3.strike(Fault.CONFLICT, Fault.CONFLICT, method="PUT")
    assert store.put_if_absent("plan.json", b"mine") is True
    assert stored(s3) == {"out/plan.json": b"mine"}


def test_a_put_that_found_another_is_not_ours_however_often_it_was_tried(store: Store, s3: Bucket) -> None:
    Store(f"{s3.url}/out").publish("plan.json", b"theirs")
    s3.strike(Fault.LOST, Fault.UNAVAILABLE, method="PUT")
    assert store.put_if_absent("plan.json", b"mine") is False
    assert stored(s3) == {"out/plan.json": b"theirs"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", CLIENT_FAULTS, ids=lambda f: f.name)
def test_reading_outlives_faults(s3: Bucket, fault: Fault) -> None:
    store = Store(f"{s3.url}/out", storage_options=HASTY)
    store.publish("folder/a", WHOLE)
    for ask, answer in (
        (lambda: store.read("folder/a"), WHOLE),
        (lambda: store.read_range("folder/a", 5, 500_000), WHOLE[5:500_000]),
        (lambda: store.info("folder/a").size_bytes, len(WHOLE)),  # type: ignore[union-attr]
        (lambda: [f.name for f in store.list()], ["folder/a"]),
        (lambda: store.open("folder/a").read(), WHOLE),
    ):
        s3.strike(fault, fault)
        assert ask() == answer
    assert s3.met == {fault}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.INTERNAL, Fault.UNAVAILABLE, Fault.DROPPED, Fault.DIES], ids=lambda f: f.name)
@pytest.mark.parametrize("verb", ["publish", "put_if_absent"])
def test_an_upload_that_never_succeeds_leaves_nothing_and_says_so(
    s3: Bucket, store: Store, fault: Fault, verb: str
) -> None:
    s3.always(fault, method="PUT")
    with pytest.raises(StorageError, match=rf"{s3.url}/out/shards/a.parquet: \S.*") as caught:
        getattr(store, verb)("shards/a.parquet", WHOLE)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    assert len(s3.seen) >= module.ATTEMPTS
    assert stored(s3) == {}


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs sends files from 100 MB on in parts of 50 MB; here from 10 MB on, in parts of 5 MB."""
    monkeypatch.setattr(s3fs.S3FileSystem._pipe_file, "__defaults__", (5 * 2**20, None, "overwrite"))
    monkeypatch.setattr(s3fs.core, "calculate_chunksize", lambda size, chunksize=None: 5 * 2**20)


@pytest.mark.slow
@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("fault", [Fault.DIES, Fault.INTERNAL], ids=lambda f: f.name)
@pytest.mark.parametrize("when", ["partNumber=2", "?uploadId="])
@pytest.mark.parametrize("verb", ["publish", "publish_file", "put_if_absent"])
def test_a_large_upload_that_dies_midway_never_shows_a_short_file(
    s3: Bucket, store: Store, fault: Fault, when: str, verb: str, tmp_path: Path
) -> None:
    """A file that goes up in parts is there when the last request of all has succeeded, and not before."""
    large = WHOLE * 11
    (tmp_path / "large").write_bytes(large)
    given = str(tmp_path / "large") if verb == "publish_file" else large
    s3.always(fault, part=when)
    with pytest.raises(StorageError):
        getattr(store, verb)("shards/a.parquet", given)
    assert s3.met == {fault}
    assert stored(s3) == {}
    s3.strike(fault, part=when)
    getattr(store, verb)("shards/a.parquet", given)
    assert stored(s3) == {"out/shards/a.parquet": large}


def test_a_bucket_that_is_not_there_is_told(s3: Bucket, tmp_path: Path) -> None:
    gone = Store("s3://never-made-bucket/out")
    assert gone.list() == []
    with pytest.raises(FileNotFoundError):
        gone.read("plan.json")
    for verb in ("publish", "put_if_absent"):
        with pytest.raises(StorageError, match="s3://never-made-bucket/out/a: there is no such bucket"):
            getattr(gone, verb)("a", b"1")
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(StorageError, match="there is no such bucket"):
        gone.publish_file("a", str(tmp_path / "a"))


def test_a_server_that_is_gone_is_told(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"{s3.url}/out", storage_options={"client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}})
    with pytest.raises(StorageError, match=r"s3://.*/out/a: .*127.0.0.1:9"):
        store.publish("a", b"1")
