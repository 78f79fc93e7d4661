"""The packs of one output by number: counts first, rows after, each shard checked when it is first touched.

Packs are read by their pages, in any order, all that are asked for opened together; where anything about them is not
as usual, they are read again one by one, and what is wrong is named. What a shard needs in memory is its counts, where
its pages are, and the small columns of the row groups in use. Where shards are kept in a cache, the first packs need
not wait for whole shards: they are read by ranges while these are fetched. Safe under several threads, which may read
the same shard at the same time.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from packsvc.compiled import native
from packsvc.errors import DamageError
from packsvc.shards import (
    COUNT_COLUMNS,
    Manifest,
    PackPages,
    PageReader,
    RawPack,
    RecentlyUsed,
    ShardReader,
    Unfamiliar,
    num_boundaries,
    open_packs,
)
from packsvc.storage import Store
from packsvc.stream.cache import ShardCache

if TYPE_CHECKING:
    from packsvc._native import PackContent

CACHE_BYTES = 64 << 20
"""What is kept in memory of each output beside the packs asked for: the small columns of row groups as they stand in
the file, and decoded packs where a page holds several or a shard is in a form that only pyarrow reads."""
COUNT_BYTES = 64 << 20
MAX_OPEN_SHARDS = 64
FETCHES_AT_ONCE = 4

V = TypeVar("V")
Counts = NDArray[np.int64]


class PackSource:
    """One output, opened in this process."""

    def __init__(self, store: Store, manifest: Manifest, cache: ShardCache | None = None) -> None:
        self._manifest = manifest
        self._firsts = manifest.pack_offsets.tolist()
        self._seq_len = manifest.seq_len
        self._cache = cache
        self._is_remote = not store.is_local
        self._max_open = MAX_OPEN_SHARDS if cache is None else min(MAX_OPEN_SHARDS, cache.num_shards)
        held = store if cache is None else cache.store
        self._kept: RecentlyUsed[Any] = RecentlyUsed(CACHE_BYTES)
        self._readers = [PageReader(ShardReader.of(held, entry, manifest), self._kept) for entry in manifest.shards]
        self._store = store
        self._far: dict[int, PageReader] = {}
        """Readers of shards that are being fetched."""
        self._fetches: dict[int, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._begun = False
        """Packs have been read: from now on, reading waits for the cache."""
        self._locks = [threading.Lock() for _ in self._readers]
        self._opened: OrderedDict[int, None] = OrderedDict()
        self._ready: set[int] = set()
        """Those of the opened that can be read at once."""
        self._busy = [0] * len(self._readers)
        self._opened_lock = threading.Lock()
        self._counts: RecentlyUsed[Counts] = RecentlyUsed(COUNT_BYTES)

    def touch(self, shard: int) -> Counts:
        """The small columns of a shard, after its size, metadata and sums were compared with the manifest.

        Returns:
            (packs, 4) in the order of `COUNT_COLUMNS`.

        Raises:
            DamageError: The shard is not what the manifest says; the message names it.
        """
        found = self._counts.get(shard)
        if found is None:
            found = self._read(shard, self._read_counts)
            self._counts.put(shard, found, found.nbytes)
        return found

    def counts(self, packs: NDArray[np.int64]) -> Counts:
        """What the small columns say of packs, given by their manifest numbers. Touches their shards.

        Returns:
            (packs, 4) in the order asked for, columns in the order of `COUNT_COLUMNS`.

        Raises:
            DamageError: A shard is not what the manifest says; the message names it and a pack asked for.
        """
        values = np.empty((len(packs), len(COUNT_COLUMNS)), dtype=np.int64)
        for shard, places, inside in self._by_shard(packs):
            values[places] = self._touch_for(shard, packs, places)[inside]
        return values

    def contents(self, packs: NDArray[np.int64], counts: Counts) -> list[PackContent] | None:
        """Packs by their manifest numbers, in the order asked for, repeats allowed; opened together, for `lay_row`.

        Args:
            packs: At least one.
            counts: What `counts` gave for them.

        Returns:
            None where something about them is not as usual: `pages` reads them, or says what is wrong.
        """
        if native is None:
            return None
        raws: list[RawPack] = [_NOTHING] * len(packs)
        try:
            for shard, places, inside in self._by_shard(packs):
                read = self._read_once(shard, partial(PageReader.fetch, packs=inside))
                if read is None:
                    return None
                for place, raw in zip(places, read, strict=True):
                    raws[place] = raw
            segments, tokens = counts[:, :2].T.tolist()
            found = open_packs(raws, num_boundaries(segments, tokens, self._seq_len), self._seq_len)
        except (Unfamiliar, DamageError):
            return None
        self._begun = True
        return found

    def pages(self, packs: NDArray[np.int64]) -> list[PackPages]:
        """The slow twin: shard by shard and page by page; what is damaged is fetched again, or named.

        Raises:
            DamageError: A shard or a page is damaged; the message names shard and pack.
        """
        found: dict[int, PackPages] = {}
        for shard, places, inside in self._by_shard(packs):
            counts = dict(zip(COUNT_COLUMNS, self._touch_for(shard, packs, places).T, strict=True))
            numbers = np.array(inside, dtype=np.int64)
            try:
                read = self._read(shard, partial(PageReader.read, packs=numbers, counts=counts))
            except DamageError as error:
                raise DamageError(self._name(shard, packs[places], numbers, counts, error)) from error
            found.update(zip(places, read, strict=True))
        self._begun = True
        return [found[place] for place in range(len(packs))]

    def place(self, pack: int) -> str:
        """How an error calls a pack that cannot be used."""
        shard = bisect_right(self._firsts, pack) - 1
        where = self._readers[shard].shard.where
        return f"pack {pack} cannot be used: {where}, pack {pack - self._firsts[shard]} of the shard"

    def close(self) -> None:
        """Let go of all files; what is being fetched is waited for."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        for shard in range(len(self._readers)):
            with self._locks[shard]:
                self._close(shard)

    def _by_shard(self, packs: NDArray[np.int64]) -> Iterable[tuple[int, list[int], list[int]]]:
        """For each shard: which of these packs are in it, and their numbers there."""
        firsts = self._firsts
        found: dict[int, tuple[int, list[int], list[int]]] = {}
        for place, pack in enumerate(packs.tolist()):
            shard = bisect_right(firsts, pack) - 1
            _, places, inside = found.get(shard) or found.setdefault(shard, (shard, [], []))
            places.append(place)
            inside.append(pack - firsts[shard])
        return found.values()

    def _touch_for(self, shard: int, packs: NDArray[np.int64], places: list[int]) -> Counts:
        try:
            return self.touch(shard)
        except DamageError as error:
            raise DamageError(f"pack {int(packs[places].min())} cannot be read: {error}") from error

    def _name(
        self,
        shard: int,
        packs: NDArray[np.int64],
        inside: NDArray[np.int64],
        counts: dict[str, Counts],
        error: DamageError,
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
        self._take(shard)
        try:
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
        finally:
            self._give_back(shard)

    def _read_once(self, shard: int, read: Callable[[PageReader], V]) -> V:
        """Read from one shard, whatever comes of it."""
        self._take(shard)
        try:
            return read(self._reader(shard))
        finally:
            self._give_back(shard)

    def _reader(self, shard: int) -> PageReader:
        return self._far.get(shard) or self._readers[shard]

    def _read_counts(self, reader: PageReader) -> Counts:
        found = reader.counts()
        for name in ("num_segments", "num_tokens", "num_loss_tokens"):
            total, expected = int(found[name].sum()), getattr(reader.shard.entry, name)
            if total != expected:
                raise DamageError(f"{reader.shard.where}: {name} adds up to {total}, the manifest says {expected}")
        return np.stack([found[name] for name in COUNT_COLUMNS], axis=1)

    def _take(self, shard: int) -> None:
        """Have a shard open, or ready to be opened, until it is given back."""
        with self._opened_lock:
            self._busy[shard] += 1
            if shard in self._ready:
                self._opened.move_to_end(shard)
                return
        try:
            with self._locks[shard]:
                self._use(shard)
        except BaseException:
            self._give_back(shard)
            raise

    def _give_back(self, shard: int) -> None:
        with self._opened_lock:
            self._busy[shard] -= 1

    def _use(self, shard: int) -> None:
        """Keep the number of open files bounded, and fetch the shard where it is far. With the shard's lock held."""
        with self._opened_lock:
            self._opened[shard] = None
            self._opened.move_to_end(shard)
            spare = list(self._opened)[: max(0, len(self._opened) - self._max_open)]
            if shard in self._ready:
                return
        for other in spare:
            # One that another thread is reading is passed over; its turn comes.
            if other != shard and self._locks[other].acquire(blocking=False):
                try:
                    with self._opened_lock:
                        is_free = not self._busy[other]
                        if is_free:
                            self._ready.discard(other)
                    if is_free:
                        self._close(other)
                finally:
                    self._locks[other].release()
        if self._cache is not None:
            self._bring(shard, self._cache)
        if shard not in self._far:
            with self._opened_lock:
                self._ready.add(shard)

    def _bring(self, shard: int, cache: ShardCache) -> None:
        """Have a shard in the cache, or begin to fetch it and read it from afar. With the shard's lock held."""
        if self._begun or cache.holds(self._readers[shard].shard.entry):
            self._fetch(shard)
            self._far.pop(shard, None)
        elif shard not in self._far:
            entry = self._readers[shard].shard.entry
            far = ShardReader.of(self._store, entry, self._manifest)
            self._far[shard] = PageReader(far, self._kept)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="packsvc-fetch")
            self._fetches[shard] = self._pool.submit(cache.fetch, entry)

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
            self._ready.discard(shard)


_NOTHING = RawPack([], ())
