"""Any packs of a shard, page by page: the fast twin of `ShardReader`.

pyarrow decodes whole row groups and every level of their lists. Here a page is found by the page index, read by its
byte range, and decompressed; its levels, which say only that all lists are full, are compared with what they must be
and passed over. One page holds one pack (a few where packs are short), so that any order costs the same.

Nothing is believed more than there. Every page's checksum is verified, and so is what no checksum covers: headers
and index against each other and against the counts of each pack. A page or a file of another form than ours is left
to pyarrow, which reads it or says what is wrong with it.

A page is read, not mapped: a disk that fails is then an error that names the shard, where a mapping kills the
process. It costs the same. Safe under threads.
"""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packsvc.compiled import native
from packsvc.errors import DamageError, StorageError
from packsvc.shards.footer import MAGIC, TAIL_BYTES, Footer, Leaf, Span
from packsvc.shards.layout import COUNT_COLUMNS, packs_per_page, schema
from packsvc.shards.page_batch import RawPack
from packsvc.shards.page_index import page_locations, page_minima
from packsvc.shards.page_values import CODECS, PackPages, PageDecoder
from packsvc.shards.reader import ShardReader
from packsvc.shards.recent import RecentlyUsed
from packsvc.shards.thrift import Unfamiliar
from packsvc.storage import retrying

SMALL_BYTES = 1 << 17
"""Up to this a column of a row group is read whole: one read for all its pages, instead of one for each."""
_PHYSICAL = {pa.bool_(): 0, pa.int32(): 1, pa.int64(): 2, pa.float32(): 4}
"""Parquet's number for the type that values have in the file."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Where the pages of a row group are."""

    first: int
    stop: int
    places: tuple[tuple[list[int], list[int]], ...]
    """For each column, offsets and sizes of its pages; empty: the row group is read by pyarrow."""
    codecs: tuple[Any, ...]
    """For each column."""
    spans: tuple[tuple[int, int] | None, ...]
    """For each column, first byte and length of the whole of it where that is small: it is read at once and kept."""
    key: object
    """Under which it is kept; another where the shard is opened again."""


class _LocalFile:
    """A file descriptor that closes when nobody reads any more."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._descriptor >= 0:
            close(self._descriptor)  # held here, since at the end of the process modules go before the last files

    def read(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Byte ranges of (start, length)."""
        descriptor = self._descriptor
        if native is not None:  # gives up the interpreter lock once for all of them
            return cast(list[bytes], native.read_ranges(descriptor, ranges))
        return [os.pread(descriptor, length, start) for start, length in ranges]


class PageReader:
    """The packs of one shard, numbered from 0, in any order; opened at the first use.

    `kept` holds what was read for more packs than were asked for: small columns, decoded pages of several packs, and
    the row groups that pyarrow reads. Readers may share it.
    """

    def __init__(self, shard: ShardReader, kept: RecentlyUsed[Any]) -> None:
        self.shard = shard
        self._kept = kept
        self._per_page = packs_per_page(shard.seq_len)
        self._lock = threading.Lock()
        self._is_open = False
        self._local: _LocalFile | None = None
        self._footer: Footer | None = None
        """None: only pyarrow can read the file."""
        self._numbers: dict[str, int] = {}
        """Places of the columns in it."""
        self._groups: dict[int, _Group] = {}
        self._columns: list[str] = []
        self._decoder = PageDecoder(shard.where, shard.seq_len)
        self._offsets: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether it holds the file."""
        return self._is_open

    def close(self) -> None:
        """Let go of the file; the next use opens it again. Who reads at this moment goes on to its end."""
        with self._lock:
            self.shard.close()
            self._is_open = False
            self._local, self._footer = None, None
            self._groups = {}

    def counts(self) -> dict[str, NDArray[np.int64]]:
        """The count columns of the whole shard. Raises DamageError, StorageError."""
        with self._lock:
            self._open()
            try:
                return self._counts_of_index()
            except Unfamiliar:
                packs = self.shard.read(columns=COUNT_COLUMNS)
        return {name: getattr(packs, name).astype(np.int64) for name in COUNT_COLUMNS}

    def read(self, packs: NDArray[np.int64], counts: dict[str, NDArray[np.int64]]) -> list[PackPages]:
        """Some packs, in the order asked for.

        Args:
            packs: Numbers inside the shard.
            counts: What `counts` gave.

        Raises:
            DamageError: A page is damaged or does not fit the counts; names shard, pack and byte.
            StorageError: The storage does not answer.
        """
        wanted = self._located(packs.tolist())
        if self._per_page > 1 or not all(group.places for group, _, _ in wanted):
            return [self._one_of_several(*item, counts) for item in wanted]
        blobs = self._blobs(wanted)
        return [
            self._decode(group, pack, pack + 1, page, blob, counts)[0]
            for (group, pack, page), blob in zip(wanted, blobs, strict=True)
        ]

    def fetch(self, packs: Sequence[int]) -> list[RawPack] | None:
        """The pages of some packs as they stand in the file, for `open_packs`; None: only `read` can read them.

        Raises:
            DamageError: The shard is damaged, as far as it must be known to find the pages.
            StorageError: The storage does not answer.
        """
        if self._per_page > 1:
            return None
        wanted = self._located(packs)
        if not all(group.places for group, _, _ in wanted):
            return None
        return [RawPack(pages, item[0].codecs) for item, pages in zip(wanted, self._blobs(wanted), strict=True)]

    def _located(self, packs: Sequence[int]) -> list[tuple[_Group, int, int]]:
        """Row group and page of each pack."""
        if not self._is_open:
            with self._lock:
                self._open()
        per_page, offsets, groups = self._per_page, self._offsets, self._groups
        found = []
        for pack in packs:
            number = bisect_right(offsets, pack) - 1
            group = groups.get(number) or self._open_group(number)
            found.append((group, pack, (pack - group.first) // per_page))
        return found

    # --- opening ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Called with the lock held."""
        if self._is_open:
            return
        shard = self.shard
        if shard.store.is_local:
            self._local = self._open_local()
        else:
            shard.check_there()
        try:
            footer = self._read_footer()
            weights = any(leaf.path[0] == b"loss_weight" for leaf in footer.leaves)
            self._numbers = _column_numbers(footer, schema(shard.seq_len, weights))
            shard.check_identity(footer.metadata, footer.num_rows)
            shard.check_weights(weights)
            self._footer = footer
            self._offsets = [0, *itertools.accumulate(footer.group_rows)]
        except Unfamiliar:
            weights = shard.loss_weights
            self._offsets = shard.row_group_offsets.tolist()
        self._columns = ["input_ids", "loss_mask", "cu_seqlens"] + ["loss_weight"] * weights
        self._is_open = True

    def _read_footer(self) -> Footer:
        """Raises Unfamiliar, DamageError, StorageError."""
        end = self.shard.entry.size_bytes - TAIL_BYTES
        tail = self._read([(end, TAIL_BYTES)])[0] if end >= 0 else b""
        size = int.from_bytes(tail[:4], "little")
        if tail[4:] != MAGIC or size > end:
            raise Unfamiliar("footer")
        return Footer.read(self._read([(end - size, size)])[0])

    def _open_local(self) -> _LocalFile:
        shard = self.shard
        try:
            file = retrying(shard.where, lambda: _LocalFile(shard.store.path(shard.entry.path)))
        except FileNotFoundError as error:
            raise shard.gone() from error
        shard.check_size(file.size)
        return file

    def _open_group(self, number: int) -> _Group:
        with self._lock:
            self._open()
            first, stop = self._offsets[number : number + 2]
            try:
                places, codecs = self._locate(number, stop - first)
            except Unfamiliar:
                places, codecs = (), ()
            self._groups[number] = group = _Group(first, stop, places, codecs, _small_spans(places), object())
            return group

    def _locate(self, number: int, num_packs: int) -> tuple[tuple[tuple[list[int], list[int]], ...], tuple[Any, ...]]:
        """Pages of the columns that are read, where they lie as they must. Raises Unfamiliar."""
        footer = self._footer
        if footer is None:
            raise Unfamiliar("footer")
        num_pages = -(-num_packs // self._per_page)
        chunks = [footer.chunk(number, self._numbers[name]) for name in self._columns]
        indexes = self._read([self._inside(chunk.offset_index) for chunk in chunks])
        places, codecs = [], []
        for chunk, index in zip(chunks, indexes, strict=True):
            start, length = self._inside(chunk.pages)
            places.append(page_locations(index, num_pages, start, start + length, self._per_page))
            if chunk.codec not in CODECS:
                raise Unfamiliar("codec")
            codecs.append(CODECS[chunk.codec])
        return tuple(places), tuple(codecs)

    def _counts_of_index(self) -> dict[str, NDArray[np.int64]]:
        """Counts from the column indexes: a page of one pack has its value as its smallest and largest."""
        footer, offsets = self._footer, self._offsets
        if footer is None or self._per_page > 1 or len(offsets) < 2:
            raise Unfamiliar("column index")
        columns = [self._numbers[name] for name in COUNT_COLUMNS]
        groups = range(len(offsets) - 1)
        spans = [self._inside(footer.chunk(group, column).column_index) for group in groups for column in columns]
        # They follow each other, so that one read is enough, and none stands for two columns.
        bounds = [bound for start, length in spans for bound in (start, start + length)]
        if bounds != sorted(bounds):
            raise Unfamiliar("column index")
        begin = bounds[0]
        (region,) = self._read([(begin, bounds[-1] - begin)])
        found = {name: np.zeros(offsets[-1], dtype=np.int64) for name in COUNT_COLUMNS}
        indexes = iter(region[start - begin : start - begin + length] for start, length in spans)
        for first, stop in itertools.pairwise(offsets):
            for name in COUNT_COLUMNS:
                dtype = np.int64 if name == "sum_squared_lengths" else np.int32
                found[name][first:stop] = page_minima(next(indexes), stop - first, dtype)
        return found

    def _inside(self, span: Span | None) -> Span:
        """Bytes of the file, which the footer names. Raises Unfamiliar where it has none of these."""
        if span is None or sum(span) > self.shard.entry.size_bytes:
            raise Unfamiliar("footer")
        return span

    # --- reading ---------------------------------------------------------------------------------------------------

    def _read(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Byte ranges of (start, length), each whole. Raises DamageError, StorageError."""
        shard, local = self.shard, self._local
        try:
            if local is not None:
                found = retrying(shard.where, lambda: local.read(ranges))
            elif shard.store.is_local:
                found = retrying(shard.where, lambda: self._open_local().read(ranges))
            else:
                found = self._read_remote(ranges)
        except FileNotFoundError as error:
            raise StorageError(f"{shard.where}: went away while it was read") from error
        for (start, length), data in zip(ranges, found, strict=True):
            if len(data) != length:
                raise DamageError(
                    f"{shard.where}: the file ends at byte {start + len(data)}; it was longer when opened"
                )
        return found

    def _read_remote(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        store = self.shard.store
        path = store.path(self.shard.entry.path)
        starts = [start for start, _ in ranges]
        stops = [start + length for start, length in ranges]

        def fetch() -> list[bytes]:
            return cast(list[bytes], store.fs.cat_ranges([path] * len(ranges), starts, stops, on_error="raise"))

        return retrying(self.shard.where, fetch)

    def _blobs(self, located: Sequence[tuple[_Group, int, int]]) -> list[list[bytes]]:
        """The bytes of all columns' pages, for packs as `_located` gives them."""
        blobs: list[list[bytes]] = []
        ranges: list[tuple[int, int]] = []
        wanted: list[tuple[list[bytes], int]] = []
        held: dict[int, Sequence[tuple[bytes, list[int], list[int]] | None]] = {}
        for group, _, page in located:
            small = held.get(group.first) or held.setdefault(group.first, self._small(group))
            blob = []
            for column, whole in enumerate(small):
                if whole is not None:
                    data, starts, sizes = whole
                    start = starts[page]
                    blob.append(data[start : start + sizes[page]])
                    continue
                starts, sizes = group.places[column]
                ranges.append((starts[page], sizes[page]))
                wanted.append((blob, column))
                blob.append(b"")
            blobs.append(blob)
        for (blob, column), data in zip(wanted, self._read(ranges), strict=True):
            blob[column] = data
        return blobs

    def _small(self, group: _Group) -> Sequence[tuple[bytes, list[int], list[int]] | None]:
        """The columns that are read whole, and where their pages lie in them; None: one that is not.

        Mask and boundaries take some hundred bytes a pack.
        """
        found: Sequence[tuple[bytes, list[int], list[int]] | None] | None = self._kept.get(group.key)
        if found is None:
            read = iter(self._read([span for span in group.spans if span is not None]))
            found = [
                None if span is None else (next(read), [at - offsets[0] for at in offsets], sizes)
                for span, (offsets, sizes) in zip(group.spans, group.places, strict=True)
            ]
            self._kept.put(group.key, found, sum(len(column[0]) for column in found if column is not None))
        return found

    def _one_of_several(self, group: _Group, pack: int, page: int, counts: dict[str, NDArray[np.int64]]) -> PackPages:
        """A pack of a page with several, or of a row group that pyarrow reads; the others are kept."""
        per_page = self._per_page if group.places else group.stop - group.first
        start = pack - (pack - group.first) % per_page
        key = (self.shard.entry.path, start)
        found = self._kept.get(key)
        if found is None:
            stop = min(group.stop, start + per_page)
            if group.places:
                found = self._decode(group, start, stop, page, self._blobs([(group, pack, page)])[0], counts)
            else:
                found = self._by_pyarrow(start, stop)
            self._kept.put(key, found, sum(one.size_bytes for one in found))
        return found[pack - start]

    # --- decoding --------------------------------------------------------------------------------------------------

    def _decode(
        self, group: _Group, start: int, stop: int, page: int, blobs: list[bytes], counts: dict[str, NDArray[np.int64]]
    ) -> list[PackPages]:
        """Packs [start, stop), which are one page of each column."""
        pages = [
            (name, codec, offsets[page], data)
            for (offsets, _), codec, name, data in zip(group.places, group.codecs, self._columns, blobs, strict=True)
        ]
        try:
            return self._decoder.decode(pages, counts, start, stop)
        except Unfamiliar as strange:
            return self._by_pyarrow(start, stop, str(strange))

    def _by_pyarrow(self, start: int, stop: int, strange: str = "") -> list[PackPages]:
        """The slow twin: what it refuses is damaged, what it reads is right."""
        with self._lock:
            try:
                packs = self.shard.read(start, stop, self._columns)
            except DamageError as error:
                raise DamageError(f"{error} ({strange} is not as it was written)" if strange else str(error)) from error
        return [
            PackPages(
                packs.input_ids[i],
                packs.loss_mask[i],
                None if packs.loss_weight is None else packs.loss_weight[i],
                packs.cu_seqlens[packs.cu_offsets[i] : packs.cu_offsets[i + 1]],
            )
            for i in range(stop - start)
        ]


def _column_numbers(footer: Footer, columns: pa.Schema) -> dict[str, int]:
    """Places of all columns of a shard, each as we write it. Raises Unfamiliar."""
    found = {}
    for number, leaf in enumerate(footer.leaves):
        name = leaf.path[0].decode("utf-8", "replace")
        place = columns.get_field_index(name)
        if place < 0:
            continue
        kind = columns.field(place).type
        wanted = Leaf((leaf.path[0],), _PHYSICAL.get(kind, -1), 0, 0)
        if pa.types.is_list(kind):
            wanted = Leaf((leaf.path[0], b"list", b"element"), _PHYSICAL[kind.value_type], 1, 1)
        if leaf != wanted or name in found:
            raise Unfamiliar("schema")
        found[name] = number
    if len(found) < len(columns):
        raise Unfamiliar("schema")
    return found


def _small_spans(places: Sequence[tuple[list[int], list[int]]]) -> tuple[tuple[int, int] | None, ...]:
    _, *others = [(offsets[0], offsets[-1] + sizes[-1] - offsets[0]) for offsets, sizes in places] or [(0, 0)]
    return (None, *(span if span[1] <= SMALL_BYTES else None for span in others))
