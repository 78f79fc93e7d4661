"""What a shard looks like to tools that know nothing of us."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packsvc.shards import (
    ShardMeta,
    packs_per_page,
    packs_per_row_group,
    packs_per_shard,
    schema,
    shard_file_name,
    shard_name,
    shard_of_path,
)

LENGTHS = [5, 3, 8, 2, 7, 1, 6, 4, 4, 4, 8, 8, 3, 3, 3]


def test_pyarrow_alone_sees_the_table_of_the_format(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 8, loss_weights=True)
    table = pq.read_table(store.path(entry.path))
    listed = {name: str(type_) for name, type_ in zip(table.schema.names, table.schema.types, strict=True)}
    assert listed == {
        "input_ids": "list<element: int32 not null>",
        "position_ids": "list<element: int32 not null>",
        "loss_mask": "list<element: bool not null>",
        "loss_weight": "list<element: float not null>",
        "cu_seqlens": "list<element: int32 not null>",
        "segment_file": "list<element: int32 not null>",
        "segment_row": "list<element: int64 not null>",
        "segment_part": "list<element: int32 not null>",
        "num_segments": "int32",
        "num_tokens": "int32",
        "num_loss_tokens": "int32",
        "sum_squared_lengths": "int64",
    }
    assert not any(field.nullable for field in table.schema)
    assert table.num_rows == packs.num_packs
    for row, ids in zip(table.to_pylist(), packs.input_ids.tolist(), strict=True):
        cu, n = row["cu_seqlens"], row["num_segments"]
        lengths = [b - a for a, b in itertools.pairwise(cu)]
        assert row["input_ids"] == ids
        assert row["position_ids"] == [i for length in lengths for i in range(length)]
        assert (cu[0], cu[-1]) == (0, 8)
        assert len(cu) == n + 1 + (row["num_tokens"] < 8)
        assert row["num_tokens"] == sum(lengths[:n])
        assert row["num_loss_tokens"] == sum(row["loss_mask"])
        assert row["sum_squared_lengths"] == sum(length**2 for length in lengths[:n])
        assert not any(row["loss_mask"][at] for at in cu[:-1])
        assert all(w == 0 for w, m in zip(row["loss_weight"], row["loss_mask"], strict=True) if not m)
        assert len(row["segment_file"]) == len(row["segment_row"]) == len(row["segment_part"]) == n


def test_the_weight_column_is_there_only_when_the_job_has_weights(shard_in: Callable[..., Any]) -> None:
    store, entry, _, _ = shard_in(LENGTHS, 8)
    assert "loss_weight" not in pq.read_schema(store.path(entry.path)).names


def test_duckdb_polars_and_datasets_read_the_same_table(
    shard_in: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import duckdb
    import polars

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    import datasets

    store, entry, packs, _ = shard_in(LENGTHS, 8)
    path = store.path(entry.path)
    expected = pq.read_table(path).to_pylist()

    rows = duckdb.sql(f"select * from read_parquet('{path}')")
    assert [dict(zip(rows.columns, row, strict=True)) for row in rows.fetchall()] == expected
    total = duckdb.sql(f"select sum(list_sum(loss_mask::int[])) from read_parquet('{path}')").fetchall()
    assert total == [(int(packs.num_loss_tokens.sum()),)]

    assert polars.read_parquet(path).to_dicts() == expected

    loaded = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.to_list() == expected
    assert loaded.features["input_ids"].feature.dtype == "int32"


def test_encodings_codec_pages_and_metadata_are_those_of_the_format(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 8, group=3)
    metadata = pq.ParquetFile(store.path(entry.path)).metadata
    keys = {k.decode(): v.decode() for k, v in metadata.metadata.items() if k.startswith(b"packsvc")}
    assert keys == {
        "packsvc.format": "1",
        "packsvc.plan_id": "p" * 64,
        "packsvc.seq_len": "8",
        "packsvc.shard": "train-000000-000",
    }
    assert metadata.num_row_groups == -(-packs.num_packs // 3)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name = column.path_in_schema.split(".")[0]
            assert column.compression == "ZSTD"
            assert not column.has_dictionary_page
            assert column.has_offset_index
            assert column.is_stats_set == (
                name in ("num_segments", "num_tokens", "num_loss_tokens", "sum_squared_lengths")
            )
            if name in ("input_ids", "loss_mask", "cu_seqlens"):
                assert "PLAIN" in column.encodings
                assert "DELTA_BINARY_PACKED" not in column.encodings
            if name == "position_ids":
                assert "DELTA_BINARY_PACKED" in column.encodings


@pytest.mark.parametrize(
    ("compression", "codec"), [("none", "UNCOMPRESSED"), ("lz4", "LZ4"), ("snappy", "SNAPPY"), ("zstd:3", "ZSTD")]
)
def test_every_codec_of_a_job_can_be_written_and_read(
    shard_in: Callable[..., Any], compression: str, codec: str
) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 8, compression=compression)
    file = pq.ParquetFile(store.path(entry.path))
    assert file.metadata.row_group(0).column(0).compression == codec
    assert file.read().column("input_ids").to_pylist() == packs.input_ids.tolist()


def test_sizes_follow_the_contract() -> None:
    assert packs_per_row_group(4096) == 512
    assert packs_per_row_group(2**21 + 1) == 1
    assert packs_per_shard(256_000_000, 4096) == 31250
    assert packs_per_shard(1, 4096) == 1
    assert packs_per_page(4096) == packs_per_page(131072) == 1
    assert packs_per_page(512) == 8


@pytest.mark.parametrize("seq_len", [2, 4096, 2**21, 2**30])
def test_i1_a_row_group_stays_below_the_32_bit_offsets_of_a_list(seq_len: int) -> None:
    assert packs_per_row_group(seq_len) * seq_len < 2**31


def test_names_carry_split_group_number_and_content() -> None:
    assert shard_name("valid", 12, 3) == "valid-000012-003"
    path = shard_file_name("valid-000012-003", "0123456789abcdef" * 4)
    assert path == "shards/valid-000012-003-0123456789ab.parquet"
    assert shard_of_path(path) == "valid-000012-003"
    for other in ("shards/x.parquet", f"{path}.tmp", f"../{path}", "shards/Valid-000012-003-0123456789ab.parquet"):
        assert shard_of_path(other) is None


@pytest.mark.parametrize("shard", ["train", "train-1-000", "Train-000000-000", "train-000000-000.parquet", ""])
def test_a_shard_must_be_named_as_the_format_says(shard: str) -> None:
    with pytest.raises(ValueError, match="no shard name"):
        ShardMeta(plan_id="x", seq_len=8, shard=shard)


def test_the_schema_has_no_room_for_nulls() -> None:
    for field in schema(8, True):
        assert not field.nullable
        assert not pa.types.is_list(field.type) or not field.type.value_field.nullable
