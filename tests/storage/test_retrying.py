"""Passing faults are tried again; what stays broken is told once, with the name of the file."""

from __future__ import annotations

import errno
import uuid
from typing import Any

import pytest

import packsvc.storage.store as module
from packsvc.errors import StorageError
from packsvc.storage import Store, is_passing, retrying


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody sleeps; the waits are kept."""
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    return slept


class ThrottledError(Exception):
    """As botocore writes it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"An error occurred ({status})")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def failing(*faults: BaseException) -> Any:
    """A call that raises these, one a time, then gives 7."""
    left = list(faults)

    def call() -> int:
        if left:
            raise left.pop(0)
        return 7

    return call


PASSING = [
    ThrottledError(503),
    ThrottledError(429),
    ThrottledError(500),
    TimeoutError("timed out"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    OSError(errno.EAGAIN, "Resource temporarily unavailable"),
    OSError("An error occurred (SlowDown): Please reduce your request rate"),
]
LASTING = [
    ThrottledError(403),
    ThrottledError(404),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.ENOSPC, "No space left on device", "/data/503/shard-503.parquet"),
    OSError(errno.EIO, "Input/output error"),
    ValueError("a bug"),
]


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_a_passing_fault_is_tried_again(fault: Exception, waits: list[float]) -> None:
    assert is_passing(fault)
    assert retrying("x", failing(fault, fault)) == 7
    assert len(waits) == 2


@pytest.mark.parametrize("fault", LASTING, ids=str)
def test_a_lasting_fault_is_not(fault: Exception, waits: list[float]) -> None:
    assert not is_passing(fault)
    with pytest.raises((StorageError, type(fault))):
        retrying("x", failing(fault))
    assert waits == []


def test_a_fault_wrapped_in_another_is_seen() -> None:
    outer = OSError("could not write")
    outer.__cause__ = ThrottledError(503)
    assert is_passing(outer)


def test_waits_grow_and_are_jittered(waits: list[float]) -> None:
    with pytest.raises(StorageError, match="s3://b/x: TimeoutError: timed out"):
        retrying("s3://b/x", failing(*[TimeoutError("timed out")] * 99))
    assert len(waits) == module.ATTEMPTS - 1
    for number, wait in enumerate(waits):
        longest = min(module.FIRST_WAIT_SECONDS * 2**number, module.LONGEST_WAIT_SECONDS)
        assert longest / 2 <= wait <= longest


@pytest.mark.parametrize("answer", [FileNotFoundError("x"), FileExistsError("x")])
def test_answers_pass_through(answer: OSError, waits: list[float]) -> None:
    with pytest.raises(type(answer)):
        retrying("x", failing(answer))
    assert waits == []


def test_a_bug_is_not_taken_for_a_fault_of_the_storage() -> None:
    with pytest.raises(KeyError):
        retrying("x", failing(KeyError("a")))


class FlakyStore(Store):
    """An object store whose answers get lost: `lost` puts take effect and then fail, `refused` ones do nothing."""

    def __init__(self, *, lost: int = 0, refused: int = 0) -> None:
        super().__init__(f"memory://{uuid.uuid4().hex}")
        real = self.fs.pipe_file
        self.puts = 0

        def pipe_file(path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
            nonlocal lost, refused
            self.puts += 1
            if refused:
                refused -= 1
                raise ThrottledError(503)
            real(path, value, mode=mode, **more)
            if lost:
                lost -= 1
                raise ConnectionResetError("the answer was lost")

        self.fs = _Proxy(self.fs, pipe_file=pipe_file)


class _Proxy:
    def __init__(self, target: Any, **replaced: Any) -> None:
        self._target = target
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def test_a_refused_put_is_tried_again() -> None:
    store = FlakyStore(refused=3)
    assert store.put_if_absent("plan.json", b"mine") is True
    assert store.puts == 4


def test_a_put_whose_answer_was_lost_is_known_as_ones_own() -> None:
    store = FlakyStore(lost=1)
    assert store.put_if_absent("plan.json", b"mine") is True
    assert store.read("plan.json") == b"mine"


def test_a_put_that_lost_to_another_is_not_taken_for_ones_own() -> None:
    store = FlakyStore(refused=1)
    other = Store(store.url)
    other.put_if_absent("plan.json", b"theirs")
    assert store.put_if_absent("plan.json", b"mine") is False
    assert store.read("plan.json") == b"theirs"


def test_a_publish_whose_answer_was_lost_is_done_again() -> None:
    store = FlakyStore(lost=2)
    store.publish("a", b"1")
    assert (store.read("a"), store.puts) == (b"1", 3)


def test_a_missing_bucket_is_a_fault_of_the_storage() -> None:
    store = FlakyStore()

    def pipe_file(path: str, value: bytes, **more: Any) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    store.fs = _Proxy(store.fs, pipe_file=pipe_file)
    for verb in (store.publish, store.put_if_absent):
        with pytest.raises(StorageError, match="there is no such bucket or folder"):
            verb("a", b"1")
