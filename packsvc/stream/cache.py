"""Shards of a remote output kept on a local disk, up to a limit.

A shard is fetched whole, by one process of a machine while the others wait, its sha256 compared with the manifest's,
and renamed into place: a truncated download never looks like a shard. The lock is the kernel's, so that one whose
holder was killed is free again. Only files that stand in the cache's own folder under a shard's name are ever evicted,
least recently used first; one that another process still reads stays readable until it closes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packsvc.errors import ConfigError, DamageError, StorageError
from packsvc.shards import Manifest, ShardEntry, shard_of_path
from packsvc.storage import Store

if sys.platform != "win32":
    import fcntl

FOLDER = "packsvc-cache"
_FETCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Where the cache is and how large it may grow."""

    folder: str
    limit_bytes: int | None
    """None: no limit."""


class ShardCache:
    """The cached shards of one output. Safe under threads; processes may share the folder."""

    def __init__(self, remote: Store, manifest: Manifest, settings: CacheSettings) -> None:
        self._remote = remote
        self._limit = settings.limit_bytes
        self._root = Path(settings.folder, FOLDER)
        self._folder = self._root / manifest.digest[:16]
        self._in_use: set[Path] = set()
        largest = max(entry.size_bytes for entry in manifest.shards)
        if self._limit is not None and self._limit < largest:
            raise ConfigError(
                f"cache_limit is {self._limit} bytes, but a shard of {remote.url} has {largest}; the cache must hold "
                "at least one, and a shuffled stream reads the 8 shards of a window or more at a time"
            )
        self.num_shards = len(manifest.shards) if self._limit is None else self._limit // max(1, largest)
        """So many shards surely fit."""

    @property
    def store(self) -> Store:
        """Where the fetched shards are, under the names they have in the output."""
        return Store(str(self._folder))

    def fetch(self, entry: ShardEntry) -> None:
        """Have a shard on the local disk, and keep it there until `release`.

        Raises:
            DamageError: What the storage gives is not what the manifest says, at two tries.
            StorageError: The storage does not answer, or the disk is full.
        """
        path = self._folder / entry.path
        self._in_use.add(path)
        if self.holds(entry):
            with contextlib.suppress(OSError):
                os.utime(path)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_name(f"{path.name}.lock")):
                if self.holds(entry):  # another process has fetched it
                    return
                for left in path.parent.glob(f"{path.name}.*.tmp"):  # by a process that was killed
                    left.unlink(missing_ok=True)
                self._put(path, self._download(entry))
        except OSError as error:
            raise StorageError(
                f"cache_dir {self._root}: {error.strerror or error}; free some space, or give a cache_limit"
            ) from error

    def holds(self, entry: ShardEntry) -> bool:
        """Whether a shard is on the local disk."""
        try:
            return (self._folder / entry.path).stat().st_size == entry.size_bytes
        except FileNotFoundError:
            return False

    def release(self, entry: ShardEntry) -> None:
        """A shard may be evicted again."""
        self._in_use.discard(self._folder / entry.path)

    def forget(self, entry: ShardEntry) -> None:
        """Remove a shard whose copy turned out damaged."""
        (self._folder / entry.path).unlink(missing_ok=True)

    def _put(self, path: Path, data: bytes) -> None:
        """Give a shard its name, whole."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
        with _locked(self._root / "room.lock"):  # else two that fit alone may not fit together
            self._make_room(len(data))
            try:
                temporary.write_bytes(data)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def _download(self, entry: ShardEntry) -> bytes:
        where = self._remote.describe(entry.path)
        digest = ""
        for _ in range(_FETCHES):
            try:
                data = self._remote.read(entry.path)
            except FileNotFoundError as error:
                raise DamageError(f"{where}: the shard is gone, but the manifest names it") from error
            digest = hashlib.sha256(data).hexdigest()
            if digest == entry.sha256:
                return data
        raise DamageError(f"{where}: {len(data)} bytes with sha256 {digest}, the manifest says {entry.sha256}")

    def _make_room(self, size: int) -> None:
        """Evict the least recently used shards until `size` more bytes fit."""
        if self._limit is None:
            return
        held = []
        for path in self._root.glob("*/shards/*.parquet"):
            with contextlib.suppress(FileNotFoundError):
                if shard_of_path(f"shards/{path.name}") is not None:
                    held.append((path.stat().st_mtime_ns, path, path.stat().st_size))
        total = sum(entry_size for _, _, entry_size in held)
        # One in use comes last; where its turn comes, whoever reads it may go on until it is closed.
        for _, path, entry_size in sorted(held, key=lambda item: (item[1] in self._in_use, item[0])):
            if total + size <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= entry_size


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a name against other processes and threads; its file is gone afterwards."""
    if sys.platform == "win32":  # no such locks: each process fetches for itself
        yield
        return
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:  # else its last holder has removed it, and others lock a new one
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(file)
