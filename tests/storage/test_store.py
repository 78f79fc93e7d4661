"""The store: files appear whole or not at all, once where that is asked, on disks and on object stores."""

from __future__ import annotations

import builtins
import errno
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packsvc.errors import StorageError
from packsvc.storage import Store, filesystem

MakeStore = Callable[[], Store]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(str(tmp_path / "out"))
    return Store(f"memory://{uuid.uuid4().hex}/out")


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_what_is_published_reads_back(store: Store) -> None:
    store.publish("shards/a.parquet", b"0123456789")
    assert store.read("shards/a.parquet") == b"0123456789"
    assert store.read_range("shards/a.parquet", 2, 5) == b"234"
    with store.open("shards/a.parquet") as file:
        file.seek(-3, 2)
        assert file.read() == b"789"


def test_publishing_replaces_the_whole_file(store: Store) -> None:
    store.publish("progress.json", b"a long first version")
    store.publish("progress.json", b"short")
    assert store.read("progress.json") == b"short"


def test_put_if_absent_writes_once(store: Store) -> None:
    assert store.put_if_absent("plan.json", b"first") is True
    assert store.put_if_absent("plan.json", b"second") is False
    assert store.read("plan.json") == b"first"
    assert [f.name for f in store.list()] == ["plan.json"]


def test_of_many_who_put_at_once_one_wins(store: Store) -> None:
    start = threading.Barrier(8)
    won: list[int] = []

    def put(number: int) -> None:
        start.wait()
        if store.put_if_absent("commits/000000.json", b"%d" % number * 1000):
            won.append(number)

    threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if store.is_local:  # the memory file system checks and writes in two steps
        assert len(won) == 1
        assert store.read("commits/000000.json") == b"%d" % won[0] * 1000
    assert len(store.list()) == 1


def test_files_are_listed_by_name_below_a_folder(store: Store) -> None:
    for name in ("b/2", "b/10", "a", "c/d/e"):
        store.publish(name, name.encode())
    assert [(f.name, f.size_bytes) for f in store.list()] == [("a", 1), ("b/10", 4), ("b/2", 3), ("c/d/e", 5)]
    assert [f.name for f in store.list("b")] == ["b/10", "b/2"]
    assert store.list("nothing") == []


def test_a_listing_is_never_an_old_one(store: Store) -> None:
    assert store.list("commits") == []
    Store(store.url).publish("commits/0.json", b"{}")
    assert [f.name for f in store.list("commits")] == ["commits/0.json"]


def test_info_tells_size_and_none_where_nothing_is(store: Store) -> None:
    store.publish("x/a", b"abc")
    info = store.info("x/a")
    assert info is not None
    assert (info.name, info.size_bytes) == ("x/a", 3)
    assert info.mtime is not None
    assert store.info("x/b") is None
    assert store.info("x") is None, "a folder is no file"


def test_reading_what_is_not_there_is_an_answer_not_a_fault(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read("none")


def test_removing_twice_is_no_error(store: Store) -> None:
    store.publish("a", b"1")
    store.remove("a")
    store.remove("a")
    assert store.list() == []


def test_a_name_is_described_as_a_person_would_write_it() -> None:
    assert Store("s3-like/out/").describe("a/b") == "s3-like/out/a/b"
    assert Store("memory://x").describe("") == "memory://x"


@pytest.mark.parametrize("verb", ["publish", "put_if_absent"])
def test_a_full_disk_leaves_nothing_and_can_be_resumed(tmp_path: Path, monkeypatch: Any, verb: str) -> None:
    """The write fails half way: no file under the final name, no temporary one, exit code 3."""
    out = Store(str(tmp_path / "out"))
    real = builtins.open

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *rest: object) -> None:
            self._file.close()

        def write(self, data: bytes) -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def open_full(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        opened = real(file, mode, *rest, **more)
        return Full(opened) if mode == "wb" and str(file).startswith(str(tmp_path)) else opened

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", open_full)
        with pytest.raises(
            StorageError, match=r"shards/a\.parquet: no space left.*run the same command again"
        ) as caught:
            getattr(out, verb)("shards/a.parquet", b"x" * 1000)
    assert caught.value.exit_code == 3
    assert files_below(tmp_path) == []
    getattr(out, verb)("shards/a.parquet", b"x" * 1000)
    assert files_below(tmp_path) == ["out/shards/a.parquet"]


def test_a_file_that_stood_there_survives_a_failed_replacement(tmp_path: Path, monkeypatch: Any) -> None:
    out = Store(str(tmp_path / "out"))
    out.publish("manifest.json", b"old")

    def fail(*names: str) -> None:
        raise OSError(errno.EIO, "Input/output error", names[-1])

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            out.publish("manifest.json", b"new")
    assert out.read("manifest.json") == b"old"
    assert files_below(tmp_path) == ["out/manifest.json"]


def test_a_file_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b))[1])
    Store(str(tmp_path)).publish("a", b"1")
    assert done == ["sync", "rename", "sync"], "the file, its name, its folder"


def test_temporary_names_never_look_like_results(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(a), replace(a, b))[1])
    Store(str(tmp_path)).publish("shards/a.parquet", b"1")
    assert len(seen) == 1
    assert not seen[0].endswith((".parquet", ".json"))
    assert Path(seen[0]).parent == tmp_path / "shards"


@pytest.mark.parametrize("verb", ["publish", "put_if_absent"])
@pytest.mark.parametrize("name", ["plan.json", "shards/a"])
def test_a_file_where_the_output_should_be_is_told(tmp_path: Path, verb: str, name: str) -> None:
    """Not taken for "somebody wrote it already"."""
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StorageError, match=r"the folder cannot be made|Not a directory"):
        getattr(Store(str(tmp_path / "out")), verb)(name, b"{}")
    assert (tmp_path / "out").read_text() == "a file"


def test_an_output_that_is_not_writable_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*rest: Any, **more: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(StorageError, match="not writable or not readable by this user"):
        Store(str(tmp_path / "out")).publish("plan.json", b"{}")


def test_file_urls_and_plain_paths_are_the_same_place(tmp_path: Path) -> None:
    Store(f"file://{tmp_path}").publish("a", b"1")
    assert Store(str(tmp_path)).read("a") == b"1"


def test_an_unknown_protocol_is_told() -> None:
    with pytest.raises(StorageError, match="nowhere://x: cannot be opened"):
        filesystem("nowhere://x")
