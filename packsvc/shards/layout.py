"""What a shard is, format 1: its columns, its encodings, its sizes and its name.

A shard is an ordinary Parquet file that any tool reads; one row is one pack. Lists hold no nulls and are never
null, so that a reader may skip their levels. Ids are PLAIN under zstd (repeated text makes that smaller than
byte-stream split on real data, and the value bytes lie contiguous behind the levels); positions and the integers
about segments are DELTA_BINARY_PACKED. Pages end on pack boundaries and carry checksums: a flipped bit under
zstd is otherwise read silently wrong more often than not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

FORMAT_VERSION = 1
ROW_GROUP_TOKENS = 2**21
BYTES_PER_TOKEN = 2
"""What `shard_size` reckons with."""
PAGE_TOKENS = 4096
"""Packs share a page up to this many tokens."""

KEY_FORMAT, KEY_PLAN_ID, KEY_SEQ_LEN, KEY_SHARD = (
    "packsvc.format",
    "packsvc.plan_id",
    "packsvc.seq_len",
    "packsvc.shard",
)
TOKEN_COLUMNS = ("input_ids", "position_ids", "loss_mask", "loss_weight")
"""Lists of `seq_len` values; `loss_weight` is optional."""
ORIGIN_COLUMNS = ("segment_file", "segment_row", "segment_part")
COUNT_COLUMNS = ("num_segments", "num_tokens", "num_loss_tokens", "sum_squared_lengths")

_SHARD_NAME = re.compile(r"[a-z0-9_]+-[0-9]{6,}-[0-9]{3,}\Z")
_SHARD_FILE = re.compile(r"shards/(?P<shard>[a-z0-9_]+-[0-9]{6,}-[0-9]{3,})-(?P<sha12>[0-9a-f]{12})\.parquet\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeta:
    """What a shard says about itself in its file metadata."""

    plan_id: str
    seq_len: int
    shard: str
    """`<split>-<group>-<k>`, group six digits, k three."""

    def __post_init__(self) -> None:
        if not _SHARD_NAME.match(self.shard):
            raise ValueError(f"{self.shard!r} is no shard name; it must look like train-000012-000")
        if self.seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, not {self.seq_len}")

    def to_metadata(self) -> dict[bytes, bytes]:
        """The key-value metadata of the file."""
        values = {
            KEY_FORMAT: str(FORMAT_VERSION),
            KEY_PLAN_ID: self.plan_id,
            KEY_SEQ_LEN: str(self.seq_len),
            KEY_SHARD: self.shard,
        }
        return {key.encode(): value.encode() for key, value in values.items()}


def shard_name(split: str, group: int, k: int) -> str:
    """The name a shard carries inside: `train-000012-003`."""
    return f"{split}-{group:06d}-{k:03d}"


def shard_file_name(shard: str, sha256: str) -> str:
    """Where a shard lies under OUT; it is named after its content, so a half-known one can never be in its place."""
    return f"shards/{shard}-{sha256[:12]}.parquet"


def shard_of_path(path: str) -> str | None:
    """The shard name in a path under OUT, None where it is no shard's path.

    >>> shard_of_path("shards/train-000000-002-0123456789ab.parquet")
    'train-000000-002'
    """
    match = _SHARD_FILE.match(path)
    return match["shard"] if match else None


def packs_per_row_group(seq_len: int) -> int:
    """Packs in a row group: 2^21 tokens, at least one pack."""
    return max(1, ROW_GROUP_TOKENS // seq_len)


def packs_per_shard(shard_size: int, seq_len: int) -> int:
    """Packs in every shard of a group but the last, for a `shard_size` in bytes."""
    return max(1, shard_size // (BYTES_PER_TOKEN * seq_len))


def packs_per_page(seq_len: int) -> int:
    """Packs in a page of every column."""
    return max(1, PAGE_TOKENS // seq_len)


def list_type(value: pa.DataType) -> pa.DataType:
    """A list of non-null `value`; Parquet calls the item "element", and so do we."""
    return pa.list_(pa.field("element", value, nullable=False))


def schema(seq_len: int, loss_weights: bool) -> pa.Schema:
    """The columns of a shard, in order, all of them non-null. `seq_len` is the length of the token columns."""
    types: dict[str, pa.DataType] = {
        "input_ids": list_type(pa.int32()),
        "position_ids": list_type(pa.int32()),
        "loss_mask": list_type(pa.bool_()),
    }
    if loss_weights:
        types["loss_weight"] = list_type(pa.float32())
    types |= {
        "cu_seqlens": list_type(pa.int32()),
        "segment_file": list_type(pa.int32()),
        "segment_row": list_type(pa.int64()),
        "segment_part": list_type(pa.int32()),
        "num_segments": pa.int32(),
        "num_tokens": pa.int32(),
        "num_loss_tokens": pa.int32(),
        "sum_squared_lengths": pa.int64(),
    }
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in types.items()])


def writer_options(*, seq_len: int, compression: str, loss_weights: bool) -> dict[str, Any]:
    """How pyarrow must write a shard; nothing here depends on the machine or the day."""
    codec, _, level = compression.partition(":")
    encodings = {
        "input_ids.list.element": "PLAIN",
        "position_ids.list.element": "DELTA_BINARY_PACKED",
        "loss_mask.list.element": "PLAIN",
        "cu_seqlens.list.element": "PLAIN",
        "segment_file.list.element": "DELTA_BINARY_PACKED",
        "segment_row.list.element": "DELTA_BINARY_PACKED",
        "segment_part.list.element": "DELTA_BINARY_PACKED",
        **dict.fromkeys(COUNT_COLUMNS, "PLAIN"),
    }
    if loss_weights:
        encodings["loss_weight.list.element"] = "PLAIN"
    return {
        "version": "2.6",
        "compression": codec,
        "compression_level": int(level) if level else None,
        "use_dictionary": False,
        "column_encoding": encodings,
        "write_statistics": list(COUNT_COLUMNS),
        "write_page_index": True,
        "write_page_checksum": True,
        "max_rows_per_page": packs_per_page(seq_len),
        # A page holds whole packs whatever their size; the limit in bytes must never cut earlier.
        "data_page_size": 2**30,
        "data_page_version": "1.0",
    }
