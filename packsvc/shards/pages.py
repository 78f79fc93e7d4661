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
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packsvc.errors import DamageError, StorageError
from packsvc.shards.layout import COUNT_COLUMNS, packs_per_page
from packsvc.shards.page_index import (
    IndexPlace,
    PageHead,
    Unfamiliar,
    chunk_codecs,
    index_places,
    level_blocks_end,
    page_head,
    page_locations,
    page_minima,
    repetition_starts,
)
from packsvc.shards.reader import ShardReader
from packsvc.shards.recent import RecentlyUsed
from packsvc.storage import retrying

_CODECS = {0: None, 1: pa.Codec("snappy"), 6: pa.Codec("zstd"), 7: pa.Codec("lz4_raw")}
"""By the numbers of Parquet. They keep no state, so that threads may share them."""
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_PHYSICAL = {"input_ids": "INT32", "loss_mask": "BOOLEAN", "cu_seqlens": "INT32", "loss_weight": "FLOAT"}


@dataclass(frozen=True, slots=True)
class PackPages:
    """One pack as its pages say; views that are not to be written to. Its lists are as long as its counts say."""

    input_ids: NDArray[np.int32]
    """(seq_len,)"""
    loss_mask: NDArray[np.bool_]
    """(seq_len,)"""
    loss_weight: NDArray[np.float32] | None
    """(seq_len,)"""
    cu_seqlens: NDArray[np.int32]
    """0 first, seq_len last."""

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        weight = 0 if self.loss_weight is None else self.loss_weight.nbytes
        return self.input_ids.nbytes + self.loss_mask.nbytes + weight + self.cu_seqlens.nbytes


@dataclass(frozen=True, slots=True)
class _Group:
    """Where the pages of a row group are."""

    first: int
    stop: int
    places: tuple[tuple[list[int], list[int]], ...]
    """For each column, offsets and sizes of its pages; empty: the row group is read by pyarrow."""
    codecs: tuple[Any, ...]
    """For each column."""


class _LocalFile:
    """A file descriptor that closes when nobody reads any more."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Byte ranges of (start, length)."""
        descriptor = self._descriptor
        return [os.pread(descriptor, length, start) for start, length in ranges]


class PageReader:
    """The packs of one shard, numbered from 0, in any order; opened at the first use.

    `kept` holds what was decoded for more packs than were asked for: pages of several packs, and the row groups that
    pyarrow reads. Readers may share it.
    """

    def __init__(self, shard: ShardReader, kept: RecentlyUsed[list[PackPages]]) -> None:
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
        self._levels: dict[int, bytes] = {}
        """By lists in a page: the levels of full ones, as seen last."""
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
        if self._places is None:
            with self._lock:
                self._open()
        per_page, offsets, groups = self._per_page, self._offsets, self._groups
        wanted = []
        for pack in packs.tolist():
            number = bisect_right(offsets, pack) - 1
            group = groups.get(number) or self._open_group(number)
            wanted.append((group, pack, (pack - group.first) // per_page))
        if per_page > 1 or not all(group.places for group, _, _ in wanted):
            return [self._one_of_several(*item, counts) for item in wanted]
        blobs = self._blobs([(group, page) for group, _, page in wanted])
        return [
            self._decode(group, pack, pack + 1, page, blob, counts)[0]
            for (group, pack, page), blob in zip(wanted, blobs, strict=True)
        ]

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
            self._groups[number] = group = _Group(first, stop, places, codecs)
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
        if codec not in _CODECS or chunk.has_dictionary_page:
            raise Unfamiliar("codec")
        return (*span, _CODECS[codec])

    def _counts_of_index(self) -> dict[str, NDArray[np.int64]]:
        """Counts from the column indexes: a page of one pack has its value as its smallest and largest."""
        shard = self.shard
        if not self._places or self._per_page > 1:
            raise Unfamiliar("column index")
        num_columns = shard.open().metadata.num_columns
        sizes = np.diff(shard.row_group_offsets).tolist()
        spans = []
        for group in range(len(sizes)):
            for name in COUNT_COLUMNS:
                place = self._places[group * num_columns + self._numbers[name]].column_index
                if place is None:
                    raise Unfamiliar("column index")
                spans.append(place)
        if not spans:
            raise Unfamiliar("column index")
        start, stop = spans[0][0], sum(spans[-1])
        region = memoryview(self._read([(start, stop - start)])[0])
        found: dict[str, list[NDArray[Any]]] = {name: [] for name in COUNT_COLUMNS}
        for number, (offset, length) in enumerate(spans):
            name = COUNT_COLUMNS[number % len(COUNT_COLUMNS)]
            dtype = np.int64 if name == "sum_squared_lengths" else np.int32
            index = region[offset - start : offset - start + length]
            found[name].append(page_minima(index, sizes[number // len(COUNT_COLUMNS)], dtype))
        return {name: np.concatenate(parts).astype(np.int64) for name, parts in found.items()}

    # --- reading ---------------------------------------------------------------------------------------------------

    def _read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
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
        ranges = [(o[page], s[page]) for group, page in pages for o, s in group.places]
        found = iter(self._read(ranges))
        return [[next(found) for _ in group.places] for group, _ in pages]

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
        rows, seq_len = stop - start, self.shard.seq_len
        arrays: list[Any] = []
        try:
            for (offsets, _), codec, name, data in zip(group.places, group.codecs, self._columns, blobs, strict=True):
                at = offsets[page]
                head = page_head(data)
                if head is None or head.size + head.compressed != len(data):
                    raise Unfamiliar(f"the page header at byte {at}")
                body = self._body(head, data, codec, start, stop, name, at)
                if name == "cu_seqlens":
                    arrays.append(_lists(head, body, _list_sizes(counts, start, stop, seq_len), at))
                else:
                    begin = self._values_begin(head, body, rows, at)
                    arrays.append(_rows(name, body, begin, rows, seq_len, at))
        except Unfamiliar as strange:
            return self._by_pyarrow(start, stop, str(strange))
        if len(arrays) == 3:
            arrays.append([None] * rows)
        ids, mask, bounds, weight = arrays
        return [PackPages(ids[i], mask[i], weight[i], bounds[i]) for i in range(rows)]

    def _body(self, head: PageHead, data: bytes, codec: Any, start: int, stop: int, name: str, at: int) -> Any:
        """The content of a page, its checksum verified."""
        body = memoryview(data)[head.size :]
        if zlib.crc32(body) != head.crc:
            packs = f"pack {start}" if stop == start + 1 else f"packs {start} to {stop - 1}"
            raise DamageError(
                f"{self.shard.where}, {packs}: {name} is damaged: the page at byte {at} does not have the checksum "
                "that its header gives"
            )
        if codec is None:
            if head.uncompressed != len(body):
                raise Unfamiliar(f"the page header at byte {at}")
            return body
        if not 0 <= head.uncompressed <= 8 * (stop - start) * self.shard.seq_len + 1024:
            raise Unfamiliar(f"the page header at byte {at}")
        try:
            return codec.decompress(body, decompressed_size=head.uncompressed, asbytes=True)
        except (pa.ArrowException, ValueError, OSError):
            raise Unfamiliar(f"the page at byte {at}") from None

    def _values_begin(self, head: PageHead, body: Any, rows: int, at: int) -> int:
        """Where the values of a token column begin, its levels being those of `rows` full lists."""
        seq_len = self.shard.seq_len
        if head.num_values != rows * seq_len:
            raise Unfamiliar(f"the page header at byte {at}")
        known = self._levels.get(rows, b"?")
        if body[: len(known)] != known:
            known = bytes(body[: level_blocks_end(body)])
            starts, full = repetition_starts(body, head.num_values)
            if not full or not np.array_equal(starts, np.arange(rows) * seq_len):
                raise Unfamiliar(f"the levels of the page at byte {at}")
            self._levels[rows] = known
        return len(known)

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


def _list_sizes(counts: dict[str, NDArray[np.int64]], start: int, stop: int, seq_len: int) -> list[int]:
    """Boundaries of each pack by its counts: one more than its segments, and one for a tail."""
    if stop == start + 1:
        return [int(counts["num_segments"][start]) + 1 + bool(counts["num_tokens"][start] < seq_len)]
    segments = counts["num_segments"][start:stop].tolist()
    tokens = counts["num_tokens"][start:stop].tolist()
    return [n + 1 + (t < seq_len) for n, t in zip(segments, tokens, strict=True)]


def _lists(head: PageHead, body: Any, sizes: list[int], at: int) -> list[NDArray[np.int32]]:
    """The lists of a page of boundaries, as long as the counts say. Raises Unfamiliar."""
    begin, total = level_blocks_end(body), sum(sizes)
    if head.num_values != total or len(body) != begin + 4 * total:
        raise Unfamiliar(f"the number of boundaries in the page at byte {at}")
    values = np.frombuffer(body, dtype=_INT32, offset=begin)
    if len(sizes) == 1:
        return [values]
    starts, full = repetition_starts(body, total)
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    if not full or not np.array_equal(starts, bounds[:-1]):
        raise Unfamiliar(f"the number of boundaries in the page at byte {at}")
    return [values[a:b] for a, b in itertools.pairwise(bounds)]


def _rows(name: str, body: Any, begin: int, rows: int, seq_len: int, at: int) -> NDArray[Any]:
    """(rows, seq_len) values of a token column. Raises Unfamiliar."""
    count = rows * seq_len
    if name == "loss_mask":
        if len(body) != begin + (count + 7) // 8:
            raise Unfamiliar(f"the length of the page at byte {at}")
        bits = np.frombuffer(body, dtype=np.uint8, offset=begin)
        flat: NDArray[Any] = np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)
    else:
        if len(body) != begin + 4 * count:
            raise Unfamiliar(f"the length of the page at byte {at}")
        flat = np.frombuffer(body, dtype=_FLOAT32 if name == "loss_weight" else _INT32, offset=begin)
    return flat.reshape(rows, seq_len)
