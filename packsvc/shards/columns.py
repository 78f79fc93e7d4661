"""`PackColumns` to an Arrow table and back, without a Python object per token.

A list column is its flat values and its offsets; both directions hand those over as they are. What an Arrow
table holds is checked on the way in: a null, a ragged row or a strange type is a `DamageError`, since arrays
that do not line up would shift every mask after them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards.layout import COUNT_COLUMNS, TOKEN_COLUMNS, schema
from packsvc.types import PackColumns

_OFFSETS_OF = {
    "cu_seqlens": "cu_offsets",
    "segment_file": "segment_offsets",
    "segment_row": "segment_offsets",
    "segment_part": "segment_offsets",
}


def to_table(packs: PackColumns, *, loss_weights: bool) -> pa.Table:
    """Packs as a table with the schema of a shard."""
    num_packs, seq_len = packs.input_ids.shape
    wanted = schema(seq_len, loss_weights)
    fixed = np.arange(num_packs + 1, dtype=np.int32) * np.int32(seq_len)
    arrays: list[Any] = []
    for field in wanted:
        values: NDArray[Any] = getattr(packs, field.name)
        if field.name in COUNT_COLUMNS:
            arrays.append(pa.array(values, type=field.type))
            continue
        offsets = fixed
        if field.name in _OFFSETS_OF:
            offsets = getattr(packs, _OFFSETS_OF[field.name]).astype(np.int32)
        flat = pa.array(np.ascontiguousarray(values).reshape(-1), type=field.type.value_type)
        arrays.append(cast(Any, pa.ListArray).from_arrays(pa.array(offsets), flat, type=field.type))
    return pa.Table.from_arrays(arrays, schema=wanted)


def from_tables(
    tables: Sequence[pa.Table], *, seq_len: int, names: Collection[str], where: str, first_pack: int = 0
) -> PackColumns:
    """The packs of some tables, one after the other.

    Args:
        tables: Chunks with at least the columns `names`, in order.
        seq_len: Length that every list of a token column must have.
        names: Columns to take; the arrays of the others are empty.
        where: What to call the place in an error.
        first_pack: Number of the first pack, for errors.

    Raises:
        DamageError: A null, a ragged row, or a column that is missing or of another type.
    """
    num_packs = sum(table.num_rows for table in tables)
    types = {field.name: field.type for field in schema(seq_len, True)}
    arrays: dict[str, NDArray[Any] | None] = {}
    offsets: dict[str, NDArray[np.int64]] = {}
    for name, type_ in types.items():
        dtype = (type_.value_type if pa.types.is_list(type_) else type_).to_pandas_dtype()
        if name not in names:
            shape = (num_packs, 0) if name in TOKEN_COLUMNS else 0
            arrays[name] = None if name == "loss_weight" else np.empty(shape, dtype=dtype)
            continue
        chunks = [chunk for table in tables for chunk in _chunks(table, name, type_, where)]
        if name in COUNT_COLUMNS:
            arrays[name] = _joined([_numpy(chunk) for chunk in chunks], dtype)
            continue
        flat, sizes = _flat(chunks, dtype, where=where, name=name)
        if name in TOKEN_COLUMNS:
            ragged = np.flatnonzero(sizes != seq_len)
            if len(ragged):
                pack = int(ragged[0])
                raise DamageError(
                    f"{where}, pack {first_pack + pack}: {name} has {int(sizes[pack])} values, seq_len is {seq_len}"
                )
            arrays[name] = flat.reshape(num_packs, seq_len)
            continue
        arrays[name] = flat
        starts = np.zeros(num_packs + 1, dtype=np.int64)
        np.cumsum(sizes, out=starts[1:])
        kind = _OFFSETS_OF[name]
        if kind in offsets and not np.array_equal(offsets[kind], starts):
            pack = int(np.flatnonzero(np.diff(offsets[kind]) != sizes)[0])
            raise DamageError(
                f"{where}, pack {first_pack + pack}: {name} has {int(sizes[pack])} values, "
                f"the other origin columns have {int(np.diff(offsets[kind])[pack])}"
            )
        offsets[kind] = starts
    none = np.zeros(num_packs + 1, dtype=np.int64)
    return PackColumns(
        cu_offsets=offsets.get("cu_offsets", none),
        segment_offsets=offsets.get("segment_offsets", none),
        **cast(dict[str, Any], arrays),
    )


def check_list_sizes(packs: PackColumns, *, seq_len: int, names: Collection[str], where: str, first_pack: int) -> None:
    """Compare how long the lists of segments are with the counts of each pack.

    A page's checksum covers its content, not its header: one flipped bit there can end a page one value early.

    Raises:
        DamageError: A list is longer or shorter than the pack's counts say.
    """
    expected = {
        "cu_offsets": packs.num_segments.astype(np.int64) + 1 + (packs.num_tokens < seq_len),
        "segment_offsets": packs.num_segments.astype(np.int64),
    }
    for name in names:
        if name not in _OFFSETS_OF:
            continue
        kind = _OFFSETS_OF[name]
        sizes = np.diff(getattr(packs, kind))
        wrong = np.flatnonzero(sizes != expected[kind])
        if len(wrong):
            pack = int(wrong[0])
            raise DamageError(
                f"{where}, pack {first_pack + pack}: {name} has {int(sizes[pack])} values; with "
                f"{int(packs.num_segments[pack])} segments and {int(packs.num_tokens[pack])} tokens it must have "
                f"{int(expected[kind][pack])}"
            )


def same_shape(one: pa.DataType, other: pa.DataType) -> bool:
    """Equal types, whatever the items of a list are called and whether they could be null."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return bool(one.value_type == other.value_type)
    return bool(one == other)


def _chunks(table: pa.Table, name: str, type_: pa.DataType, where: str) -> list[Any]:
    index = table.schema.get_field_index(name)
    if index < 0:
        raise DamageError(f"{where}: there is no column {name}")
    column = table.column(index)
    if not same_shape(column.type, type_):
        raise DamageError(f"{where}: {name} is {column.type}, must be {type_}")
    if column.null_count:
        raise DamageError(f"{where}: {name} is null in {column.null_count} packs")
    return column.chunks


def _flat(chunks: Sequence[Any], dtype: Any, *, where: str, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of list chunks back to back, and the length of each list."""
    values, sizes = [], []
    for chunk in chunks:
        starts = np.asarray(chunk.offsets)
        sizes.append(np.diff(starts).astype(np.int64))
        flat = chunk.values[int(starts[0]) : int(starts[-1])]
        if flat.null_count:
            raise DamageError(f"{where}: {name} holds {flat.null_count} null values")
        values.append(_numpy(flat))
    return _joined(values, dtype), _joined(sizes, np.int64)


def _numpy(array: Any) -> NDArray[Any]:
    """A flat array without nulls; only booleans, which Arrow keeps as bits, are copied."""
    return cast("NDArray[Any]", array.to_numpy(zero_copy_only=False))


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
