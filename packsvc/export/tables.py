"""Parquet files of list columns, made from flat values and offsets without a Python object per token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.export.layout import Source
from packsvc.export.segments import Segments

Column = tuple[NDArray[Any], NDArray[np.int64]]
"""Values of all lists back to back, and where each list starts."""


class ListRows(ABC):
    """A format whose shards are one Parquet file of list columns each; what differs is the columns and the notes."""

    rows_per_group: ClassVar[int] = 1000
    suffix: ClassVar[str] = ".parquet"

    def __init__(self, source: Source) -> None:
        self._source = source

    def write(self, chunks: Iterable[Segments], *, number: int, folder: Path) -> Iterator[Path]:
        """See `Format`."""
        path = folder / parquet_name(self._source.split, number, self._source.num_shards, self.suffix)
        write_parquet(path, map(self.table, chunks), rows_per_group=self.rows_per_group)
        yield path

    def extra_files(self) -> dict[str, bytes]:
        """See `Format`."""
        return {}

    @abstractmethod
    def notes(self) -> list[str]:
        """See `Format`."""

    @abstractmethod
    def table(self, segments: Segments) -> pa.Table:
        """The rows of some segments."""


def list_table(columns: Mapping[str, Column]) -> pa.Table:
    """A table of one list column for each name; the lists have the type of their values."""
    arrays = []
    for values, offsets in columns.values():
        arrays.append(cast(Any, pa.ListArray).from_arrays(_array(offsets.astype(np.int32)), _array(values)))
    return pa.Table.from_arrays(arrays, names=list(columns))


def _array(values: NDArray[Any]) -> Any:
    """A flat Arrow array over the same memory; `pa.array` would import pandas first, where that is installed."""
    whole: Any = np.ascontiguousarray(values)
    return cast(Any, pa.Array).from_buffers(pa.from_numpy_dtype(whole.dtype), len(whole), [None, pa.py_buffer(whole)])


def write_parquet(path: Path, tables: Iterable[pa.Table], *, rows_per_group: int) -> None:
    """Write tables one after the other; memory holds one. The same tables give the same bytes."""
    writer: pq.ParquetWriter | None = None
    try:
        for table in tables:
            if writer is None:
                writer = pq.ParquetWriter(
                    path,
                    table.schema,
                    compression="zstd",
                    compression_level=1,
                    use_dictionary=False,
                    write_statistics=False,
                    write_page_checksum=True,
                )
            writer.write_table(table, row_group_size=rows_per_group)
    finally:
        if writer is not None:
            writer.close()


def parquet_name(split: str, number: int, num_shards: int, suffix: str = ".parquet") -> str:
    """A file name that sorts as packs are counted, and from which `datasets` tells the split.

    >>> parquet_name("train", 3, 12)
    'train-00003-of-00012.parquet'
    """
    return f"{split}-{number:05d}-of-{num_shards:05d}{suffix}"
