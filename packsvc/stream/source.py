"""The packs of one output by number: counts first, rows after, each shard checked when it is first touched.

This is the plain path through pyarrow: it decodes whole row groups and keeps the last used ones, up to a limit in
bytes. `counts` and `rows` are all that the stream asks for; a faster reader of the same files need give no more.

Safe under several threads: a shard is read by one at a time, different shards at the same time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards import COUNT_COLUMNS, Manifest, ShardReader
from packsvc.storage import Store
from packsvc.stream.cache import ShardCache
from packsvc.stream.geometry import check_geometry
from packsvc.types import PackColumns

CACHE_BYTES = 256 << 20
"""Decoded row groups kept in memory, for each output."""
COUNT_BYTES = 64 << 20
MAX_OPEN_SHARDS = 64

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCounts:
    """What the small columns say of some packs, in the order asked for."""

    num_tokens: NDArray[np.int64]
    num_loss_tokens: NDArray[np.int64]
    sum_squared_lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRow:
    """One pack; the arrays are views into a cache and are not to be written to."""

    input_ids: NDArray[np.int32]
    """(seq_len,)"""
    loss_mask: NDArray[np.bool_]
    """(seq_len,)"""
    loss_weight: NDArray[np.float32] | None
    """(seq_len,)"""
    boundaries: NDArray[np.int32]
    """(num_segments + 1,): 0 first, the number of real tokens last."""


class RecentlyUsed(Generic[V]):
    """Values by key up to a number of bytes, least recently used out first. The newest always stays."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Any, tuple[V, int]] = OrderedDict()
        self._size = 0

    def get(self, key: Any) -> V | None:
        """The value, now the most recently used; None where there is none."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: Any, value: V, size_bytes: int) -> None:
        """Keep a value, and let go of the oldest ones over the limit."""
        with self._lock:
            old = self._held.pop(key, None)
            self._size += size_bytes - (old[1] if old else 0)
            self._held[key] = (value, size_bytes)
            while self._size > self._limit and len(self._held) > 1:
                _, (_, size) = self._held.popitem(last=False)
                self._size -= size


class PackSource:
    """One output, opened in this process."""

    def __init__(self, store: Store, manifest: Manifest, cache: ShardCache | None = None) -> None:
        self._manifest = manifest
        self._cache = cache
        self._is_remote = not store.is_local
        self._max_open = MAX_OPEN_SHARDS if cache is None else min(MAX_OPEN_SHARDS, cache.num_shards)
        held = store if cache is None else cache.store
        self._readers = [
            ShardReader(held, entry, plan_id=manifest.plan_id, seq_len=manifest.seq_len) for entry in manifest.shards
        ]
        self._locks = [threading.Lock() for _ in self._readers]
        self._opened: OrderedDict[int, None] = OrderedDict()
        self._opened_lock = threading.Lock()
        self._counts: RecentlyUsed[dict[str, NDArray[np.int64]]] = RecentlyUsed(COUNT_BYTES)
        self._groups: RecentlyUsed[PackColumns] = RecentlyUsed(CACHE_BYTES)

    def touch(self, shard: int) -> dict[str, NDArray[np.int64]]:
        """The small columns of a shard, after its size, metadata and sums were compared with the manifest.

        Raises:
            DamageError: The shard is not what the manifest says; the message names it.
        """
        found = self._counts.get(shard)
        if found is None:
            found = self._read(shard, self._read_counts)
            self._counts.put(shard, found, sum(column.nbytes for column in found.values()))
        return found

    def counts(self, packs: NDArray[np.int64]) -> PackCounts:
        """What the small columns say of packs, given by their manifest numbers. Touches their shards.

        Raises:
            DamageError: A shard is not what the manifest says; the message names it and a pack asked for.
        """
        shards, inside = self._locate(packs)
        names = ("num_tokens", "num_loss_tokens", "sum_squared_lengths")
        values = {name: np.empty(len(packs), dtype=np.int64) for name in names}
        for shard in np.unique(shards):
            chosen = shards == shard
            try:
                columns = self.touch(int(shard))
            except DamageError as error:
                raise DamageError(f"pack {int(packs[chosen].min())} cannot be read: {error}") from error
            for name in names:
                values[name][chosen] = columns[name][inside[chosen]]
        return PackCounts(**values)

    def rows(self, packs: NDArray[np.int64]) -> list[PackRow]:
        """Packs by their manifest numbers, in the order asked for, repeats allowed.

        Raises:
            DamageError: A shard, a page or a pack is damaged; the message names shard and pack.
        """
        shards, inside = self._locate(packs)
        return [self._row(int(p), int(s), int(i)) for p, s, i in zip(packs, shards, inside, strict=True)]

    def close(self) -> None:
        """Let go of all files."""
        for shard in range(len(self._readers)):
            with self._locks[shard]:
                self._close(shard)

    def _locate(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        offsets = self._manifest.pack_offsets
        shards = np.searchsorted(offsets, packs, side="right") - 1
        return shards, packs - offsets[shards]

    def _row(self, pack: int, shard: int, inside: int) -> PackRow:
        try:
            self.touch(shard)
            first, group = self._read(shard, lambda reader: self._read_group(shard, reader, inside))
        except DamageError as error:
            raise DamageError(f"pack {pack} cannot be read: {error}") from error
        i = inside - first
        start = int(group.cu_offsets[i])
        return PackRow(
            input_ids=group.input_ids[i],
            loss_mask=group.loss_mask[i],
            loss_weight=None if group.loss_weight is None else group.loss_weight[i],
            boundaries=group.cu_seqlens[start : start + int(group.num_segments[i]) + 1],
        )

    def _read(self, shard: int, read: Callable[[ShardReader], V]) -> V:
        """Read from one shard; where it was fetched from afar and is damaged, fetch it once more."""
        with self._locks[shard]:
            try:
                self._use(shard)
                return read(self._readers[shard])
            except DamageError:
                if not self._is_remote:
                    raise
            self._close(shard)
            if self._cache is not None:
                self._cache.forget(self._readers[shard].entry)
            self._use(shard)
            return read(self._readers[shard])

    def _read_counts(self, reader: ShardReader) -> dict[str, NDArray[np.int64]]:
        packs = reader.read(columns=COUNT_COLUMNS)
        found = {name: getattr(packs, name).astype(np.int64) for name in COUNT_COLUMNS}
        for name in ("num_segments", "num_tokens", "num_loss_tokens"):
            total, expected = int(found[name].sum()), getattr(reader.entry, name)
            if total != expected:
                raise DamageError(f"{reader.where}: {name} adds up to {total}, the manifest says {expected}")
        return found

    def _read_group(self, shard: int, reader: ShardReader, inside: int) -> tuple[int, PackColumns]:
        """The decoded row group that holds a pack, and the number of its first pack inside the shard."""
        offsets = reader.row_group_offsets
        group = int(np.searchsorted(offsets, inside, side="right")) - 1
        first, stop = int(offsets[group]), int(offsets[group + 1])
        found = self._groups.get((shard, group))
        if found is None:
            columns = ["input_ids", "loss_mask", "cu_seqlens"] + ["loss_weight"] * reader.loss_weights
            found = reader.read(first, stop, columns=columns)
            check_geometry(found, where=reader.where, first_pack=first)
            size = found.input_ids.nbytes + found.loss_mask.nbytes + found.cu_seqlens.nbytes
            size += 0 if found.loss_weight is None else found.loss_weight.nbytes
            self._groups.put((shard, group), found, size)
        return first, found

    def _use(self, shard: int) -> None:
        """Have a shard at hand, and keep the number of open files bounded. Called with the shard's lock held."""
        with self._opened_lock:
            is_open = shard in self._opened
            self._opened[shard] = None
            self._opened.move_to_end(shard)
            spare = list(self._opened)[: max(0, len(self._opened) - self._max_open)]
        if is_open:
            return
        for other in spare:
            # One that another thread is reading is passed over; its turn comes.
            if other != shard and self._locks[other].acquire(blocking=False):
                try:
                    self._close(other)
                finally:
                    self._locks[other].release()
        if self._cache is not None:
            self._cache.fetch(self._readers[shard].entry)

    def _close(self, shard: int) -> None:
        """Called with the shard's lock held."""
        self._readers[shard].close()
        if self._cache is not None:
            self._cache.release(self._readers[shard].entry)
        with self._opened_lock:
            self._opened.pop(shard, None)
