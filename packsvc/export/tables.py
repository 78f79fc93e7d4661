"""Parquet files of list columns, made from flat values and offsets without a Python object per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Column = tuple[NDArray[Any], NDArray[np.int64]]
"""Values of all lists back to back, and where each list starts."""


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
