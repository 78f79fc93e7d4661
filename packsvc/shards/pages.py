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

import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packsvc.compiled import native
from packsvc.errors import DamageError, StorageError
from packsvc.shards.layout import COUNT_COLUMNS, packs_per_page
from packsvc.shards.page_batch import RawPack
from packsvc.shards.page_index import (
    IndexPlace,
    Unfamiliar,
    chunk_codecs,
    index_places,
    page_locations,
    page_minima,
)
from packsvc.shards.page_values import CODECS, PackPages, PageDecoder
from packsvc.shards.reader import ShardReader
from packsvc.shards.recent import RecentlyUsed
from packsvc.storage import retrying

SMALL_BYTES = 1 << 17
"""Up to this a column of a row group is read whole: one read for all its pages, instead of one for each."""
_PHYSICAL = {"input_ids": "INT32", "loss_mask": "BOOLEAN", "cu_seqlens": "INT32", "loss_weight": "FLOAT"}


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

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

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
        self._local: _LocalFile | None = None
        self._places: list[IndexPlace] | None = None
        self._groups: dict[int, _Group] = {}
        self._columns: list[str] = []
        self._numbers: dict[str, int] = {}
        self._codecs: dict[str, list[int]] = {}
        self._decoder = PageDecoder(shard.where, shard.seq_len)
        self._offsets: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether it holds the file."""
        return self._places is not None

    def close(self) -> None:
        """Let go of the file; the next use opens it again. Who reads at this moment goes on to its end."""
        with self._lock:
            self.shard.close()
            self._local, self._places = None, None
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
        blobs = self._blobs([(group, page) for group, _, page in wanted])
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
        blobs = self._blobs([(group, page) for group, _, page in wanted])
        return [RawPack(pages, group.codecs) for (group, _, _), pages in zip(wanted, blobs, strict=True)]

    def _located(self, packs: Sequence[int]) -> list[tuple[_Group, int, int]]:
        """Row group and page of each pack."""
        if self._places is None:
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
        if self._places is not None:
            return
        shard = self.shard
        metadata = shard.open().metadata
        self._columns = ["input_ids", "loss_mask", "cu_seqlens"] + ["loss_weight"] * shard.loss_weights
        if shard.store.is_local:
            self._local = self._open_local()
        self._offsets = shard.row_group_offsets.tolist()
        self._places = []
        try:
            self._numbers = self._column_numbers(metadata)
            size = shard.entry.size_bytes
            end = size - 8
            footer = self._read([(end - metadata.serialized_size, metadata.serialized_size)])[0]
            num_groups = metadata.num_row_groups
            self._codecs = {name: chunk_codecs(footer, name, num_groups) for name in self._columns}
            self._places = index_places(footer, end - metadata.serialized_size, num_groups * metadata.num_columns)
        except Unfamiliar:
            pass

    def _open_local(self) -> _LocalFile:
        shard = self.shard
        try:
            file = retrying(shard.where, lambda: _LocalFile(shard.store.path(shard.entry.path)))
        except FileNotFoundError as error:
            raise DamageError(f"{shard.where}: the shard is gone, but the manifest names it") from error
        if file.size != shard.entry.size_bytes:
            raise DamageError(f"{shard.where}: {file.size} bytes, the manifest says {shard.entry.size_bytes}")
        return file

    def _column_numbers(self, metadata: Any) -> dict[str, int]:
        """Places of the columns that are read, all of them as we write them. Raises Unfamiliar."""
        found = {}
        for number in range(metadata.num_columns):
            column = metadata.schema.column(number)
            name, dot, _ = column.path.partition(".")
            levels = (column.max_definition_level, column.max_repetition_level)
            if levels == ((1, 1) if dot else (0, 0)):
                if name in _PHYSICAL and column.physical_type != _PHYSICAL[name]:
                    continue
                found[name] = number
        if any(name not in found for name in (*self._columns, *COUNT_COLUMNS)):
            raise Unfamiliar("schema")
        return found

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
        if not self._places:
            raise Unfamiliar("page index")
        metadata = self.shard.open().metadata
        row_group = metadata.row_group(number)
        per_page = self._per_page
        num_pages = -(-num_packs // per_page)
        spans = [self._places[number * metadata.num_columns + self._numbers[name]] for name in self._columns]
        indexes = self._read([span.offset_index for span in spans])
        places, codecs = [], []
        for name, index in zip(self._columns, indexes, strict=True):
            begin, length, codec = self._chunk(row_group, number, name)
            table = page_locations(index, num_pages)
            offsets, sizes, rows = table.T
            ends = offsets + sizes
            if (
                offsets[0] != begin
                or ends[-1] != begin + length
                or (ends[:-1] != offsets[1:]).any()
                or (rows != np.arange(num_pages) * per_page).any()
            ):
                raise Unfamiliar("pages")
            places.append((offsets.tolist(), sizes.tolist()))
            codecs.append(codec)
        return tuple(places), tuple(codecs)

    def _chunk(self, row_group: Any, number: int, name: str) -> tuple[int, int, Any]:
        """First byte, length and codec of a column chunk. Raises Unfamiliar."""
        codec = self._codecs[name][number]
        try:
            chunk = row_group.column(self._numbers[name])
            span = chunk.data_page_offset, chunk.total_compressed_size
        except (IndexError, pa.ArrowException, OSError):
            raise Unfamiliar("column chunk") from None
        if codec not in CODECS or chunk.has_dictionary_page:
            raise Unfamiliar("codec")
        return (*span, CODECS[codec])

    def _counts_of_index(self) -> dict[str, NDArray[np.int64]]:
        """Counts from the column indexes: a page of one pack has its value as its smallest and largest."""
        shard = self.shard
        if not self._places or self._per_page > 1:
            raise Unfamiliar("column index")
        num_columns = shard.open().metadata.num_columns
        firsts = shard.row_group_offsets
        sizes = np.diff(firsts).tolist()
        found = {name: np.zeros(firsts[-1], dtype=np.int64) for name in COUNT_COLUMNS}
        # Indexes of equal form are read at once: most row groups have as many packs.
        alike: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        for group, size in enumerate(sizes):
            for name in COUNT_COLUMNS:
                span = self._places[group * num_columns + self._numbers[name]].column_index
                if span is None:
                    raise Unfamiliar("column index")
                alike.setdefault((name, size, span[1]), []).append((int(firsts[group]), span[0]))
        if not alike:
            raise Unfamiliar("column index")
        start = min(begin for places in alike.values() for _, begin in places)
        stop = max(begin + length for (_, _, length), places in alike.items() for _, begin in places)
        region = np.frombuffer(self._read([(start, stop - start)])[0], dtype=np.uint8)
        for (name, size, length), places in alike.items():
            dtype = np.int64 if name == "sum_squared_lengths" else np.int32
            indexes = np.stack([region[begin - start : begin - start + length] for _, begin in places])
            for (first, _), values in zip(places, page_minima(indexes, size, dtype), strict=True):
                found[name][first : first + size] = values
        return found

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

    def _blobs(self, pages: Sequence[tuple[_Group, int]]) -> list[list[bytes]]:
        """The bytes of all columns' pages."""
        blobs: list[list[bytes]] = []
        ranges: list[tuple[int, int]] = []
        wanted: list[tuple[list[bytes], int]] = []
        last: _Group | None = None
        small: Sequence[tuple[bytes, list[int], list[int]] | None] = ()
        for group, page in pages:
            if group is not last:
                last, small = group, self._small(group)
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
                found = self._decode(group, start, stop, page, self._blobs([(group, page)])[0], counts)
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


def _small_spans(places: Sequence[tuple[list[int], list[int]]]) -> tuple[tuple[int, int] | None, ...]:
    _, *others = [(offsets[0], offsets[-1] + sizes[-1] - offsets[0]) for offsets, sizes in places] or [(0, 0)]
    return (None, *(span if span[1] <= SMALL_BYTES else None for span in others))
