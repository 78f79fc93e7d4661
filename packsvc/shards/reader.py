"""One shard, read by pyarrow: the plain path that checks everything, and the slow twin of faster readers.

Opening compares size, file metadata, columns and number of packs with the manifest; page checksums are verified
at every read, and lists are as long as the pack's counts say. Whatever does not fit is a `DamageError` that names
the shard and, where it can be told, the row group, the column and the pack. Reading goes row group by row group
and never joins Arrow lists: their 32-bit offsets overflow beyond 2^31 values.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.errors import DamageError, StorageError
from packsvc.shards.columns import check_list_sizes, from_tables, same_shape
from packsvc.shards.entries import ShardEntry
from packsvc.shards.footer import as_text
from packsvc.shards.layout import (
    COUNT_COLUMNS,
    FORMAT_VERSION,
    KEY_FORMAT,
    KEY_PLAN_ID,
    KEY_SEQ_LEN,
    KEY_SHARD,
    packs_per_page,
    schema,
    shard_of_path,
)
from packsvc.shards.manifest import Manifest
from packsvc.storage import Store, is_passing, retrying
from packsvc.types import PackColumns

T = TypeVar("T")
_PAGE = re.compile(r"page_ordinal (\d+)")
"""How Arrow names the page whose checksum is wrong."""


class ShardReader:
    """The packs of one shard, numbered from 0; opened at the first use."""

    def __init__(
        self, store: Store, entry: ShardEntry, *, plan_id: str, seq_len: int, weighted: bool | None = None
    ) -> None:
        """`weighted`: whether it must have the column `loss_weight`; None: it may."""
        self.store = store
        self.entry = entry
        self.plan_id = plan_id
        self.seq_len = seq_len
        self.weighted = weighted
        self._file: pq.ParquetFile | None = None
        self._source: Any = None
        self._offsets: NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    @classmethod
    def of(cls, store: Store, entry: ShardEntry, manifest: Manifest) -> ShardReader:
        """The reader of a shard that a manifest lists."""
        return cls(store, entry, plan_id=manifest.plan_id, seq_len=manifest.seq_len, weighted=manifest.loss_weights)

    def __enter__(self) -> ShardReader:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def where(self) -> str:
        """The shard as errors name it."""
        return self.store.describe(self.entry.path)

    @property
    def num_packs(self) -> int:
        """Packs in the shard."""
        return int(self._row_group_offsets()[-1])

    @property
    def num_row_groups(self) -> int:
        return len(self._row_group_offsets()) - 1

    @property
    def row_group_offsets(self) -> NDArray[np.int64]:
        """(row groups + 1,) first pack of each row group."""
        return self._row_group_offsets()

    @property
    def schema(self) -> pa.Schema:
        """The columns as the file has them."""
        return self.open().schema_arrow

    @property
    def loss_weights(self) -> bool:
        """Whether the shard has the column `loss_weight`."""
        return "loss_weight" in self.schema.names

    def open(self) -> pq.ParquetFile:
        """The file, checked against the manifest. Raises DamageError, StorageError."""
        if self._file is None:
            self.check_there()
            self._file = self._guarded(self._open_file)
            try:
                found = self._file.metadata
                self.check_identity(as_text((found.metadata or {}).items()), found.num_rows)
                self._check_columns(self._file)
            except BaseException:
                self.close()
                raise
        return self._file

    def read(self, start: int = 0, stop: int | None = None, columns: Sequence[str] | None = None) -> PackColumns:
        """Packs [start, stop) of the shard.

        Args:
            start: Number of the first pack inside the shard.
            stop: One past the last; None: all the rest.
            columns: Which columns to read besides the counts; None: all. What is not read is an empty array
                ((num_packs, 0) for token columns), `loss_weight` None.

        Raises:
            DamageError: A page's checksum is wrong, or the content does not line up.
            IndexError: No such packs.
        """
        offsets = self._row_group_offsets()
        stop = self.num_packs if stop is None else stop
        if not 0 <= start <= stop <= self.num_packs:
            raise IndexError(f"{self.where}: packs {start} to {stop} of {self.num_packs}")
        names = self._names(columns)
        tables = []
        for group in range(len(offsets) - 1):
            first, last = int(offsets[group]), int(offsets[group + 1])
            if first < stop and last > start:
                low, high = max(start, first), min(stop, last)
                tables.append(self.row_group(group, names).slice(low - first, high - low))
        packs = from_tables(tables, seq_len=self.seq_len, names=names, where=self.where, first_pack=start)
        check_list_sizes(packs, seq_len=self.seq_len, names=names, where=self.where, first_pack=start)
        return packs

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[PackColumns]:
        """The packs row group by row group: memory holds one of them."""
        offsets = self._row_group_offsets()
        for group in range(len(offsets) - 1):
            yield self.read(int(offsets[group]), int(offsets[group + 1]), columns)

    def row_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """One row group as a table. Raises DamageError naming row group, column and pack."""
        names = self._names(columns)
        file = self.open()
        try:
            table: pa.Table = self._guarded(lambda: file.read_row_group(group, columns=names, use_threads=False))
        except DamageError as error:
            raise DamageError(self._locate(group, names) or f"{error} (row group {group})") from error
        expected = int(self._row_group_offsets()[group + 1] - self._row_group_offsets()[group])
        if table.num_rows != expected:
            raise DamageError(f"{self.where}: row group {group} has {table.num_rows} packs, the footer says {expected}")
        return table

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The whole shard as a chunked table, one chunk a row group."""
        names = self._names(columns)
        tables = [self.row_group(group, names) for group in range(self.num_row_groups)]
        return pa.concat_tables(tables) if tables else self.schema.empty_table().select(names)

    def verify_hash(self) -> None:
        """Compare the file's sha256 with the manifest. Raises DamageError."""
        try:
            digest = hashlib.sha256(self.store.read(self.entry.path)).hexdigest()
        except FileNotFoundError as error:
            raise self.gone() from error
        if digest != self.entry.sha256:
            raise DamageError(f"{self.where}: sha256 is {digest}, the manifest says {self.entry.sha256}")

    def check_identity(self, stored: Mapping[str, str], num_rows: int) -> None:
        """Compare what a file says of itself with the manifest.

        Args:
            stored: Its file metadata.
            num_rows: Its rows.

        Raises:
            DamageError: It is another shard; says what differs.
        """
        wanted = {
            KEY_FORMAT: str(FORMAT_VERSION),
            KEY_PLAN_ID: self.plan_id,
            KEY_SEQ_LEN: str(self.seq_len),
            KEY_SHARD: shard_of_path(self.entry.path),
        }
        for key, value in wanted.items():
            if stored.get(key) != value:
                raise DamageError(
                    f"{self.where}: {key} is {stored.get(key)!r} in the file and must be {value!r}; "
                    "this is another shard, or one of another data set, in its place"
                )
        if num_rows != self.entry.num_packs:
            raise DamageError(f"{self.where}: {num_rows} packs, the manifest says {self.entry.num_packs}")

    def check_weights(self, is_weighted: bool) -> None:
        """Compare whether the file has the column `loss_weight` with the job. Raises DamageError."""
        if self.weighted is not None and is_weighted != self.weighted:
            raise DamageError(
                f"{self.where}: there is {'a' if is_weighted else 'no'} column loss_weight, and the job has "
                f"loss_weights: {str(self.weighted).lower()}"
            )

    def check_there(self) -> None:
        """Ask the storage for the file, and compare its size with the manifest. Raises DamageError, StorageError."""
        info = self.store.info(self.entry.path)
        if info is None:
            raise self.gone()
        self.check_size(info.size_bytes)

    def check_size(self, size_bytes: int) -> None:
        """Compare the size of the file with the manifest. Raises DamageError."""
        if size_bytes != self.entry.size_bytes:
            raise DamageError(f"{self.where}: {size_bytes} bytes, the manifest says {self.entry.size_bytes}")

    def gone(self) -> DamageError:
        """What to raise where there is no such file."""
        return DamageError(f"{self.where}: the shard is gone, but the manifest names it")

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        file, source = self._file, self._source
        self._file = self._source = None
        for handle in (file, source):
            if handle is not None:
                with contextlib.suppress(OSError):
                    handle.close()

    def _open_file(self) -> pq.ParquetFile:
        path = self.entry.path
        try:
            self._source = pa.OSFile(self.store.path(path), "rb") if self.store.is_local else self.store.open(path)
        except FileNotFoundError as error:
            raise self.gone() from error
        return pq.ParquetFile(self._source, page_checksum_verification=True)

    def _check_columns(self, file: pq.ParquetFile) -> None:
        found = file.schema_arrow
        self.check_weights("loss_weight" in found.names)
        required = schema(self.seq_len, "loss_weight" in found.names)
        for field in required:
            index = found.get_field_index(field.name)
            if index < 0:
                raise DamageError(f"{self.where}: there is no column {field.name}")
            if not same_shape(found.field(index).type, field.type):
                raise DamageError(f"{self.where}: {field.name} is {found.field(index).type}, must be {field.type}")

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        known = schema(self.seq_len, self.loss_weights).names
        if columns is None:
            return known
        unknown = [name for name in columns if name not in known]
        if unknown:
            raise ValueError(f"{self.where}: no column {unknown[0]!r}; there are {', '.join(known)}")
        return [name for name in known if name in columns or name in COUNT_COLUMNS]

    def _row_group_offsets(self) -> NDArray[np.int64]:
        if len(self._offsets) == 1:
            metadata = self.open().metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            if min(sizes, default=0) < 0 or sum(sizes) != metadata.num_rows:
                raise DamageError(f"{self.where}: {metadata.num_rows} packs, its row groups say {sizes}")
            self._offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64)
        return self._offsets

    def _guarded(self, call: Callable[[], T]) -> T:
        """Run a read: faults of the storage stay faults of the storage, everything else is damage."""

        def attempt() -> T:
            try:
                return call()
            except (pa.ArrowException, ValueError, OSError, EOFError) as error:
                if is_passing(error) or (isinstance(error, OSError) and error.errno is not None):
                    raise
                raise DamageError(f"{self.where}: cannot be read: {_one_line(error)}") from error

        try:
            return retrying(self.where, attempt)
        except FileNotFoundError as error:
            raise StorageError(f"{self.where}: went away while it was read") from error

    def _locate(self, group: int, names: Sequence[str]) -> str | None:
        """Where in a row group reading fails first: each column again, pack by pack."""
        first, last = (int(bound) for bound in self._row_group_offsets()[group : group + 2])
        for name in names:
            pack = first
            try:
                for batch in self.open().iter_batches(batch_size=1, row_groups=[group], columns=[name]):
                    pack += batch.num_rows
            except (pa.ArrowException, ValueError, OSError) as error:
                place = f"near pack {pack}"  # the end of a list is found on the page after it
                if page := _PAGE.search(str(error)):
                    size = packs_per_page(self.seq_len)
                    start = first + int(page[1]) * size
                    stop = min(start + size, last) - 1
                    place = f"pack {start}" if start == stop else f"packs {start} to {stop}"
                return f"{self.where}, row group {group}, {place}: {name} is damaged: {_one_line(error)}"
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
