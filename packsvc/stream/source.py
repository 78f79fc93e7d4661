"""The packs of one output by number: counts first, rows after, each shard checked when it is first touched.

Packs are read page by page, in any order; what a shard needs in memory is its counts and where its pages are. Where
shards are kept in a cache, the first packs need not wait for whole shards: they are read by ranges while these are
fetched. Safe under several threads, which may read the same shard at the same time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards import COUNT_COLUMNS, Manifest, PackPages, PageReader, RecentlyUsed, ShardReader
from packsvc.storage import Store
from packsvc.stream.cache import ShardCache
from packsvc.stream.geometry import check_packs

CACHE_BYTES = 64 << 20
"""Packs decoded beside those asked for, kept in memory for each output: where a page holds several, or a shard is in
a form that only pyarrow reads."""
COUNT_BYTES = 64 << 20
MAX_OPEN_SHARDS = 64
FETCHES_AT_ONCE = 4

V = TypeVar("V")
Counts = dict[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCounts:
    """What the small columns say of some packs, in the order asked for."""

    num_tokens: NDArray[np.int64]
    num_loss_tokens: NDArray[np.int64]
    sum_squared_lengths: NDArray[np.int64]


@dataclass(slots=True)
class PackRow:
    """One pack; the arrays are views and are not to be written to."""

    input_ids: NDArray[np.int32]
    """(seq_len,)"""
    loss_mask: NDArray[np.bool_]
    """(seq_len,)"""
    loss_weight: NDArray[np.float32] | None
    """(seq_len,)"""
    boundaries: NDArray[np.int32]
    """(num_segments + 1,): 0 first, the number of real tokens last."""


class PackSource:
    """One output, opened in this process."""

    def __init__(self, store: Store, manifest: Manifest, cache: ShardCache | None = None) -> None:
        self._offsets = manifest.pack_offsets
        self._cache = cache
        self._is_remote = not store.is_local
        self._max_open = MAX_OPEN_SHARDS if cache is None else min(MAX_OPEN_SHARDS, cache.num_shards)
        held = store if cache is None else cache.store
        self._kept: RecentlyUsed[list[PackPages]] = RecentlyUsed(CACHE_BYTES)
        self._readers = [
            PageReader(ShardReader(held, entry, plan_id=manifest.plan_id, seq_len=manifest.seq_len), self._kept)
            for entry in manifest.shards
        ]
        self._store = store
        self._far: dict[int, PageReader] = {}
        """Readers of shards that are being fetched."""
        self._fetches: dict[int, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._begun = False
        """Packs have been read: from now on, reading waits for the cache."""
        self._locks = [threading.Lock() for _ in self._readers]
        self._opened: OrderedDict[int, None] = OrderedDict()
        self._busy = [0] * len(self._readers)
        self._opened_lock = threading.Lock()
        self._counts: RecentlyUsed[Counts] = RecentlyUsed(COUNT_BYTES)

    def touch(self, shard: int) -> Counts:
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
        names = ("num_tokens", "num_loss_tokens", "sum_squared_lengths")
        values = {name: np.empty(len(packs), dtype=np.int64) for name in names}
        for shard, places, inside in self._by_shard(packs):
            columns = self._touch_for(shard, packs[places])
            for name in names:
                values[name][places] = columns[name][inside]
        return PackCounts(**values)

    def rows(self, packs: NDArray[np.int64]) -> list[PackRow]:
        """Packs by their manifest numbers, in the order asked for, repeats allowed.

        Raises:
            DamageError: A shard, a page or a pack is damaged; the message names shard and pack.
        """
        found: list[PackPages] = [_NOTHING] * len(packs)
        of = {name: np.empty(len(packs), dtype=np.int64) for name in COUNT_COLUMNS}
        for shard, places, inside in self._by_shard(packs):
            counts = self._touch_for(shard, packs[places])
            try:
                read = self._read(shard, partial(PageReader.read, packs=inside, counts=counts))
            except DamageError as error:
                raise DamageError(self._name(shard, packs[places], inside, counts, error)) from error
            for place, pages in zip(places.tolist(), read, strict=True):
                found[place] = pages
            for name, column in counts.items():
                of[name][places] = column[inside]
        self._begun = True
        check_packs(found, of, lambda place: self._place(int(packs[place])))
        return [
            PackRow(pages.input_ids, pages.loss_mask, pages.loss_weight, pages.cu_seqlens[: num_segments + 1])
            for pages, num_segments in zip(found, of["num_segments"].tolist(), strict=True)
        ]

    def close(self) -> None:
        """Let go of all files; what is being fetched is waited for."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        for shard in range(len(self._readers)):
            with self._locks[shard]:
                self._close(shard)

    def _by_shard(self, packs: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """For each shard: which of these packs are in it, and their numbers there."""
        offsets = self._offsets
        shards = offsets.searchsorted(packs, side="right") - 1
        inside = packs - offsets[shards]
        for shard in sorted(set(shards.tolist())):
            places = (shards == shard).nonzero()[0]
            yield shard, places, inside[places]

    def _place(self, pack: int) -> str:
        """How errors call a pack."""
        shard = int(self._offsets.searchsorted(pack, side="right")) - 1
        where = self._readers[shard].shard.where
        return f"pack {pack} cannot be used: {where}, pack {pack - int(self._offsets[shard])} of the shard"

    def _touch_for(self, shard: int, packs: NDArray[np.int64]) -> Counts:
        try:
            return self.touch(shard)
        except DamageError as error:
            raise DamageError(f"pack {int(packs.min())} cannot be read: {error}") from error

    def _name(
        self, shard: int, packs: NDArray[np.int64], inside: NDArray[np.int64], counts: Counts, error: DamageError
    ) -> str:
        """What to say of packs that could not be read together: which is the first that cannot be read alone."""
        for pack, number in zip(packs.tolist(), inside.tolist(), strict=True):
            try:
                self._reader(shard).read(np.array([number]), counts)
            except DamageError as alone:
                return f"pack {pack} cannot be read: {alone}"
        return f"pack {int(packs.min())} or one near it cannot be read: {error}"

    def _read(self, shard: int, read: Callable[[PageReader], V]) -> V:
        """Read from one shard; where it was fetched from afar and is damaged, fetch it once more."""
        with self._at_hand(shard):
            try:
                return read(self._reader(shard))
            except DamageError:
                if not self._is_remote:
                    raise
            with self._locks[shard]:
                reader = self._readers[shard]
                reader.close()
                if self._cache is not None:
                    if self._far.pop(shard, None) is None:
                        self._cache.forget(reader.shard.entry)
                    self._fetch(shard)
            return read(reader)

    def _reader(self, shard: int) -> PageReader:
        return self._far.get(shard) or self._readers[shard]

    def _read_counts(self, reader: PageReader) -> Counts:
        found = reader.counts()
        for name in ("num_segments", "num_tokens", "num_loss_tokens"):
            total, expected = int(found[name].sum()), getattr(reader.shard.entry, name)
            if total != expected:
                raise DamageError(f"{reader.shard.where}: {name} adds up to {total}, the manifest says {expected}")
        return found

    @contextlib.contextmanager
    def _at_hand(self, shard: int) -> Iterator[None]:
        """Have a shard open, or ready to be opened, while the block runs."""
        with self._opened_lock:
            self._busy[shard] += 1
        try:
            with self._locks[shard]:
                self._use(shard)
            yield
        finally:
            with self._opened_lock:
                self._busy[shard] -= 1

    def _use(self, shard: int) -> None:
        """Keep the number of open files bounded, and fetch the shard where it is far. With the shard's lock held."""
        with self._opened_lock:
            is_open = shard in self._opened and shard not in self._far
            self._opened[shard] = None
            self._opened.move_to_end(shard)
            spare = [] if is_open else list(self._opened)[: max(0, len(self._opened) - self._max_open)]
        if is_open:
            return
        for other in spare:
            # One that another thread is reading is passed over; its turn comes.
            if other != shard and self._locks[other].acquire(blocking=False):
                try:
                    if not self._busy[other]:
                        self._close(other)
                finally:
                    self._locks[other].release()
        if self._cache is None:
            return
        if self._begun or self._cache.holds(self._readers[shard].shard.entry):
            self._fetch(shard)
            self._far.pop(shard, None)
        elif shard not in self._far:
            near = self._readers[shard].shard
            far = ShardReader(self._store, near.entry, plan_id=near.plan_id, seq_len=near.seq_len)
            self._far[shard] = PageReader(far, self._kept)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="packsvc-fetch")
            self._fetches[shard] = self._pool.submit(self._cache.fetch, near.entry)

    def _fetch(self, shard: int) -> None:
        """Have a shard in the cache. With the shard's lock held."""
        assert self._cache is not None
        begun = self._fetches.pop(shard, None)
        if begun is not None:
            begun.result()
        self._cache.fetch(self._readers[shard].shard.entry)

    def _close(self, shard: int) -> None:
        """Called with the shard's lock held."""
        reader = self._readers[shard]
        reader.close()
        self._far.pop(shard, None)
        if self._cache is not None:
            self._cache.release(reader.shard.entry)
        with self._opened_lock:
            self._opened.pop(shard, None)


_NOTHING = PackPages(np.zeros(0, np.int32), np.zeros(0, np.bool_), None, np.zeros(0, np.int32))
