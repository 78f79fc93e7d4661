"""A shard's file, opened with distrust: hash, metadata, schema, then row group by row group as arrays.

Deliberately not the reader that training uses: a fault which both shared would stay unseen. Nothing here raises
for damage; whatever does not fit becomes a finding, and what still lines up goes on to the other checks. A local
file is mapped, a remote one read whole; its bytes are hashed in the same pass. Memory: one row group as arrays
(about 20 bytes per token at 2^21 tokens) besides the compressed file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from packsvc.errors import StorageError
from packsvc.shards import ShardEntry, schema, shard_of_path
from packsvc.storage import Store
from packsvc.types import PackColumns
from packsvc.validation.report import Failure, Findings

LIST_COLUMNS = ("cu_seqlens", "segment_file", "segment_row", "segment_part")
COUNT_COLUMNS = ("num_segments", "num_tokens", "num_loss_tokens", "sum_squared_lengths")
HASH_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What the checks of every shard need to know of the job."""

    plan_id: str
    seq_len: int
    vocab_size: int
    pad_id: int
    loss_weights: bool
    align: int
    max_segments: int | None
    row_limits: NDArray[np.int64]
    """(inputs,) one more than the largest row number an input can have."""
    source_of_input: NDArray[np.int64]
    """(inputs,) index of each input's source in the sorted names of sources."""
    num_sources: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Packs of one row group that line up, and where they stand."""

    shard: str
    row_group: int
    numbers: NDArray[np.int64]
    """(P,) number of each pack over all shards."""
    packs: PackColumns

    def failure(self, check: str, message: str, pack: int, segment: int | None = None) -> Failure:
        """A failure at the chunk's `pack`-th pack."""
        return Failure(
            check=check,
            message=message,
            shard=self.shard,
            row_group=self.row_group,
            pack=int(self.numbers[pack]),
            segment=segment,
        )

    def select(self, keep: NDArray[np.bool_]) -> Chunk:
        """The packs that `keep` marks."""
        if keep.all():
            return self
        p = self.packs
        cu_sizes, segment_sizes = np.diff(p.cu_offsets), np.diff(p.segment_offsets)
        cu, segments = np.repeat(keep, cu_sizes), np.repeat(keep, segment_sizes)
        packs = PackColumns(
            input_ids=p.input_ids[keep],
            position_ids=p.position_ids[keep],
            loss_mask=p.loss_mask[keep],
            loss_weight=None if p.loss_weight is None else p.loss_weight[keep],
            cu_seqlens=p.cu_seqlens[cu],
            cu_offsets=offsets_of(cu_sizes[keep]),
            segment_file=p.segment_file[segments],
            segment_row=p.segment_row[segments],
            segment_part=p.segment_part[segments],
            segment_offsets=offsets_of(segment_sizes[keep]),
            num_segments=p.num_segments[keep],
            num_tokens=p.num_tokens[keep],
            num_loss_tokens=p.num_loss_tokens[keep],
            sum_squared_lengths=p.sum_squared_lengths[keep],
        )
        return Chunk(shard=self.shard, row_group=self.row_group, numbers=self.numbers[keep], packs=packs)


def offsets_of(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Sizes to offsets: [2, 3] gives [0, 2, 5]."""
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def open_shard(store: Store, entry: ShardEntry, facts: ShardFacts, findings: Findings) -> pq.ParquetFile | None:
    """Hash a shard and open it; None when there is nothing that could be read."""
    data = fetch(store, entry.path, entry.size_bytes, entry.sha256, findings)
    if data is None:
        return None
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        _ = file.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        findings.fail("schema", f"cannot be opened as Parquet: {one_line(error)}", shard=entry.path)
        return None
    return file if check_schema(file, entry, facts, findings) else None


def fetch(store: Store, path: str, size_bytes: int, sha256: str, findings: Findings) -> pa.Buffer | None:
    """The bytes of a file that the manifest names, compared with its size and hash; None when it is gone."""
    findings.saw("hashes", 1, "files")
    try:
        if store.is_local:
            with pa.memory_map(store.path(path), "r") as mapped:
                data = mapped.read_buffer()
        else:
            data = pa.py_buffer(store.read(path))
    except FileNotFoundError:
        findings.fail("hashes", "the file is gone, but the manifest names it", shard=path)
        return None
    except OSError as error:
        raise StorageError(f"{store.describe(path)}: {one_line(error)}") from error
    if data.size != size_bytes:
        findings.fail("hashes", f"the manifest says {size_bytes} bytes, the file has {data.size}", shard=path)
    digest = hashlib.sha256()
    view = memoryview(data)
    for start in range(0, len(view), HASH_BYTES):
        digest.update(view[start : start + HASH_BYTES])
    if digest.hexdigest() != sha256:
        findings.fail("hashes", f"sha256 is {digest.hexdigest()}, the manifest says {sha256}", shard=path)
    return data


def check_schema(file: pq.ParquetFile, entry: ShardEntry, facts: ShardFacts, findings: Findings) -> bool:
    """Metadata, names and types; False when the columns cannot be read as what they must be."""
    findings.saw("schema", 1, "shards")
    pairs = (file.metadata.metadata or {}).items()
    stored = {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in pairs}
    wanted = {
        "packsvc.format": "1",
        "packsvc.plan_id": facts.plan_id,
        "packsvc.seq_len": str(facts.seq_len),
        "packsvc.shard": shard_of_path(entry.path),
    }
    for key, value in wanted.items():
        if stored.get(key) != value:
            findings.fail("schema", f"{key} is {stored.get(key)!r}, must be {value!r}", shard=entry.path)
    stem = entry.path.removesuffix(".parquet").rsplit("-", 1)[-1]
    if stem != entry.sha256[:12]:
        findings.fail(
            "hashes", f"the name ends in {stem}, the sha256 begins with {entry.sha256[:12]}", shard=entry.path
        )
    found, required = file.schema_arrow, schema(facts.seq_len, facts.loss_weights)
    usable = True
    for field in required:
        index = found.get_field_index(field.name)
        if index < 0:
            findings.fail("schema", f"there is no column {field.name}", shard=entry.path)
            usable = False
        elif not same_type(found.field(index).type, field.type):
            message = f"column {field.name} is {found.field(index).type}, must be {field.type}"
            findings.fail("schema", message, shard=entry.path)
            usable = False
    for name in found.names:
        if name == "loss_weight" and not facts.loss_weights:
            findings.fail("weights", "there is a column loss_weight, but loss_weights is false", shard=entry.path)
        elif name not in required.names:
            findings.fail("schema", f"column {name} is not one of format 1", shard=entry.path)
    return usable


def same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Equal types; what the item of a list is called, and whether it might be null, is the writer's choice."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return bool(one.value_type == other.value_type)
    return bool(one == other)


def chunks(
    file: pq.ParquetFile, entry: ShardEntry, facts: ShardFacts, first_pack: int, findings: Findings
) -> Iterator[Chunk]:
    """Row group by row group, the packs whose columns line up; the others become findings."""
    names = schema(facts.seq_len, facts.loss_weights).names
    start = first_pack
    for group in range(file.metadata.num_row_groups):
        first, rows = start, file.metadata.row_group(group).num_rows
        start += rows
        try:
            table = file.read_row_group(group, columns=names, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            where = locate(file, group, names, first)
            message = f"{where[0]} cannot be read: {one_line(error)}"
            findings.fail("hashes", message, shard=entry.path, row_group=group, pack=where[1])
            continue
        if table.num_rows != rows:
            message = f"{table.num_rows} packs can be read, the footer says {rows}"
            findings.fail("counts", message, shard=entry.path, row_group=group)
            continue
        numbers = np.arange(first, start, dtype=np.int64)
        chunk = lined_up(table.combine_chunks(), entry.path, group, numbers, facts, findings)
        if chunk is not None:
            yield chunk


def locate(file: pq.ParquetFile, group: int, names: list[str], first: int) -> tuple[str, int]:
    """The first column, and its pack, that cannot be read: each column again, pack by pack."""
    for name in names:
        pack = first
        try:
            for batch in file.iter_batches(batch_size=1, row_groups=[group], columns=[name], use_threads=False):
                pack += batch.num_rows
        except (pa.ArrowException, OSError, ValueError):
            return f"column {name}", pack
    return "the row group", first


def lined_up(
    table: pa.Table,
    shard: str,
    group: int,
    numbers: NDArray[np.int64],
    facts: ShardFacts,
    findings: Findings,
) -> Chunk | None:
    """The packs of a table as arrays, without those that hold nulls or whose lists have wrong lengths."""
    good = np.ones(table.num_rows, dtype=np.bool_)
    sizes: dict[str, NDArray[np.int64]] = {}

    def drop(bad: NDArray[np.bool_], check: str, message: str) -> None:
        def describe(i: int) -> Failure:
            return Failure(check=check, message=message, shard=shard, row_group=group, pack=int(numbers[i]))

        findings.each(check, bad & good, describe)
        good[bad] = False

    for name in table.column_names:
        column = table.column(name)
        array: Any = column.chunk(0) if column.num_chunks else pa.array([], type=column.type)
        if array.null_count:
            drop(np.asarray(array.is_null()), "schema", f"{name} is null")
        if pa.types.is_list(array.type):
            if array.values.null_count:
                inner = np.asarray(array.values.is_null())
                running = offsets_of(inner)
                offsets = np.asarray(array.offsets)
                drop(running[offsets[1:]] > running[offsets[:-1]], "schema", f"{name} holds nulls")
            sizes[name] = np.diff(np.asarray(array.offsets)).astype(np.int64)
    for name in ("input_ids", "position_ids", "loss_mask", "loss_weight"):
        if name in sizes:
            drop(sizes[name] != facts.seq_len, "geometry", f"{name} does not have seq_len ({facts.seq_len}) values")
    for name in ("segment_row", "segment_part"):
        differs = sizes[name] != sizes["segment_file"]
        drop(differs, "geometry", f"{name} and segment_file have different lengths")
    if not good.all():
        table = table.filter(pa.array(good)).combine_chunks()
    if table.num_rows == 0:
        return None
    return Chunk(shard=shard, row_group=group, numbers=numbers[good], packs=to_packs(table, facts.seq_len))


def to_packs(table: pa.Table, seq_len: int) -> PackColumns:
    """A table without nulls and with lists that line up, as arrays."""
    arrays: dict[str, Any] = {"loss_weight": None}
    offsets: dict[str, NDArray[np.int64]] = {}
    for name in table.column_names:
        array: Any = table.column(name).chunk(0)
        if not pa.types.is_list(array.type):
            arrays[name] = np.asarray(array)
            continue
        starts = np.asarray(array.offsets).astype(np.int64)
        values = array.values.slice(starts[0], starts[-1] - starts[0])
        flat = bits(values) if pa.types.is_boolean(values.type) else np.asarray(values)
        if name in LIST_COLUMNS:
            arrays[name], offsets[name] = flat, starts - starts[0]
        else:
            arrays[name] = flat.reshape(table.num_rows, seq_len)
    return PackColumns(cu_offsets=offsets["cu_seqlens"], segment_offsets=offsets["segment_file"], **arrays)


def bits(array: pa.BooleanArray) -> NDArray[np.bool_]:
    """A boolean array as bytes; numpy unpacks bits several times faster than Arrow hands them over."""
    buffer: Any = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros(len(array), dtype=np.bool_)
    packed = np.frombuffer(buffer, dtype=np.uint8)
    first = array.offset // 8
    shift = array.offset - first * 8
    last = (array.offset + len(array) + 7) // 8
    unpacked = np.unpackbits(packed[first:last], bitorder="little")
    return cast("NDArray[np.bool_]", unpacked[shift : shift + len(array)].view(np.bool_))


def one_line(error: BaseException) -> str:
    """An error's text on one line, shortened."""
    return " ".join(str(error).split())[:300]
