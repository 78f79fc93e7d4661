"""Reading back gives what was written, and damage never passes in silence."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.errors import DamageError, StorageError
from packsvc.shards import ShardMeta, ShardReader, write_shard
from packsvc.storage import Store
from packsvc.types import PackColumns

PLAN_ID = "p" * 64
LENGTHS = np.random.default_rng(5).integers(2, 60, 80).tolist()
META = ShardMeta(plan_id=PLAN_ID, seq_len=64, shard="train-000000-000")


def reader_of(store: Store, entry: Any, seq_len: int = 64, plan_id: str = PLAN_ID) -> ShardReader:
    return ShardReader(store, entry, plan_id=plan_id, seq_len=seq_len)


@pytest.mark.parametrize("weights", [False, True])
def test_what_is_written_is_read(shard_in: Callable[..., Any], equal_packs: Callable[..., bool], weights: bool) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 64, group=7, loss_weights=weights)
    with reader_of(store, entry) as reader:
        assert reader.num_packs == packs.num_packs
        assert reader.loss_weights == weights
        assert equal_packs(reader.read(), packs)


@given(st.data())
def test_any_range_is_that_part_of_the_whole(data: st.DataObject) -> None:
    """Over row group boundaries too."""
    store, entry, packs = _kept_shard()
    start = data.draw(st.integers(0, packs.num_packs))
    stop = data.draw(st.integers(start, packs.num_packs))
    part = reader_of(store, entry).read(start, stop)
    assert np.array_equal(part.input_ids, packs.input_ids[start:stop])
    assert np.array_equal(part.loss_mask, packs.loss_mask[start:stop])
    cu = packs.cu_seqlens[packs.cu_offsets[start] : packs.cu_offsets[stop]]
    assert np.array_equal(part.cu_seqlens, cu)
    assert np.array_equal(part.cu_offsets, packs.cu_offsets[start : stop + 1] - packs.cu_offsets[start])
    rows = packs.segment_row[packs.segment_offsets[start] : packs.segment_offsets[stop]]
    assert np.array_equal(part.segment_row, rows)
    assert np.array_equal(part.num_tokens, packs.num_tokens[start:stop])


_KEPT: list[Any] = []


def _kept_shard() -> tuple[Store, Any, PackColumns]:
    return _KEPT[0]


@pytest.fixture(autouse=True)
def _keep(shard_in: Callable[..., Any]) -> None:
    if not _KEPT:
        store, entry, packs, _ = shard_in(LENGTHS, 64, group=7)
        _KEPT.append((store, entry, packs))


def test_columns_not_asked_for_are_empty_and_counts_are_always_there(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 64)
    part = reader_of(store, entry).read(columns=["cu_seqlens"])
    assert np.array_equal(part.cu_seqlens, packs.cu_seqlens)
    assert np.array_equal(part.num_loss_tokens, packs.num_loss_tokens)
    assert part.input_ids.shape == part.loss_mask.shape == (packs.num_packs, 0)
    assert part.loss_weight is None
    assert part.segment_row.size == 0
    with pytest.raises(ValueError, match="no column 'labels'"):
        reader_of(store, entry).read(columns=["labels"])


def test_chunks_go_row_group_by_row_group(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 64, group=7)
    chunks = list(reader_of(store, entry).chunks())
    assert {chunk.num_packs for chunk in chunks[:-1]} == {7}
    assert np.array_equal(np.concatenate([chunk.input_ids for chunk in chunks]), packs.input_ids)


def test_packs_that_are_not_there_are_refused(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 64)
    with pytest.raises(IndexError, match="packs 0 to"):
        reader_of(store, entry).read(0, packs.num_packs + 1)


def test_the_same_packs_give_the_same_bytes_in_another_process(shard_in: Callable[..., Any], tmp_path: Path) -> None:
    _, _, packs, data = shard_in(LENGTHS, 64)
    np.savez(tmp_path / "packs.npz", **{n: getattr(packs, n) for n in PackColumns.__slots__ if n != "loss_weight"})
    script = (
        "import sys, numpy as np\n"
        "from packsvc.shards import ShardMeta, write_shard\n"
        "from packsvc.types import PackColumns\n"
        f"packs = PackColumns(loss_weight=None, **np.load({str(tmp_path / 'packs.npz')!r}))\n"
        f"meta = ShardMeta(plan_id={PLAN_ID!r}, seq_len=64, shard='train-000000-000')\n"
        "sys.stdout.buffer.write(write_shard([packs], meta=meta, compression='zstd:1', loss_weights=False))\n"
    )
    again = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    assert again == data


def test_a_flipped_bit_in_any_page_is_noticed(shard_in: Callable[..., Any], equal_packs: Callable[..., bool]) -> None:
    """A dozen bits in every column, all over its pages: never another value in silence.

    A few bits of a page's header change nothing of what is read; those must read as before.
    """
    store, entry, packs, data = shard_in(LENGTHS, 64)
    rng = np.random.default_rng(0)
    noticed = unchanged = 0
    for start, stop in _column_chunks(data):
        for _ in range(12):
            bad = bytearray(data)
            bad[int(rng.integers(start, stop))] ^= 1 << int(rng.integers(8))
            store.publish(entry.path, bytes(bad))
            try:
                found = reader_of(store, entry).read()
            except DamageError:
                noticed += 1
            else:
                assert equal_packs(found, packs), "read wrong in silence"
                unchanged += 1
    assert noticed > 100
    assert unchanged < 0.2 * noticed


def _column_chunks(data: bytes) -> list[tuple[int, int]]:
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    columns = [
        metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(metadata.num_columns)
    ]
    return [(c.data_page_offset, c.data_page_offset + c.total_compressed_size) for c in columns]


def test_damage_names_shard_row_group_pack_and_column(shard_in: Callable[..., Any], monkeypatch: Any) -> None:
    """One pack a page, so that the page that fails is the pack."""
    monkeypatch.setattr("packsvc.shards.layout.PAGE_TOKENS", 64)
    store, entry, packs, data = shard_in(LENGTHS, 64, group=16, compression="none")
    at = data.index(packs.input_ids[20].tobytes())
    store.publish(entry.path, data[: at + 9] + bytes([data[at + 9] ^ 4]) + data[at + 10 :])
    with pytest.raises(DamageError, match=r"train-000000-000.*row group 1, pack 20: input_ids is damaged"):
        reader_of(store, entry).read()
    assert reader_of(store, entry).read(0, 16).num_packs == 16, "the other row groups can be read"


def test_i3_a_short_file_under_a_final_name_is_refused_at_opening(shard_in: Callable[..., Any]) -> None:
    store, entry, _, data = shard_in(LENGTHS, 64)
    store.publish(entry.path, data[: len(data) // 2])
    with pytest.raises(DamageError, match=rf"{len(data) // 2} bytes, the manifest says {len(data)}"):
        reader_of(store, entry).open()


def test_a_shard_that_is_gone_is_damage(shard_in: Callable[..., Any]) -> None:
    store, entry, _, _ = shard_in(LENGTHS, 64)
    store.remove(entry.path)
    for touch in (ShardReader.open, ShardReader.verify_hash):
        with pytest.raises(DamageError, match="the shard is gone"):
            touch(reader_of(store, entry))


@pytest.mark.parametrize("cut", [0, 4, -4, -8])
def test_a_file_without_a_footer_is_damage(shard_in: Callable[..., Any], cut: int) -> None:
    store, entry, _, data = shard_in(LENGTHS, 64)
    bad = data[:cut] + bytes(len(data) - len(data[:cut]))
    store.publish(entry.path, bad)
    with pytest.raises(DamageError, match="cannot be read"):
        reader_of(store, entry).open()


def test_a_shard_of_another_plan_length_or_place_is_refused_by_name(shard_in: Callable[..., Any]) -> None:
    store, entry, _, data = shard_in(LENGTHS, 64)
    with pytest.raises(DamageError, match=r"packsvc\.plan_id is 'ppp"):
        reader_of(store, entry, plan_id="q" * 64).open()
    with pytest.raises(DamageError, match=r"packsvc\.seq_len is '64' in the file and must be '32'"):
        reader_of(store, entry, seq_len=32).open()
    moved = dataclasses.replace(entry, path=entry.path.replace("000000-000", "000001-000"))
    store.publish(moved.path, data)
    with pytest.raises(DamageError, match=r"packsvc\.shard is 'train-000000-000'"):
        reader_of(store, moved).open()
    with pytest.raises(DamageError, match="the manifest says 3"):
        reader_of(store, dataclasses.replace(entry, num_packs=3)).open()


def test_the_hash_is_that_of_the_manifest(shard_in: Callable[..., Any]) -> None:
    store, entry, _, data = shard_in(LENGTHS, 64)
    reader_of(store, entry).verify_hash()
    store.publish(entry.path, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamageError, match="sha256 is"):
        reader_of(store, entry).verify_hash()


def rewritten(store: Store, entry: Any, table: pa.Table) -> Any:
    """The shard with another table in it, as a foreign tool would write it."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    store.publish(entry.path, data)
    return dataclasses.replace(entry, size_bytes=len(data))


def test_a_foreign_writer_with_the_same_columns_is_read(
    shard_in: Callable[..., Any], equal_packs: Callable[..., bool]
) -> None:
    """Nullable lists, dictionaries, other codecs, no checksums: the values count."""
    store, entry, packs, _ = shard_in(LENGTHS, 64)
    table = pq.read_table(store.path(entry.path))
    loose = pa.schema(
        [pa.field(f.name, pa.list_(f.type.value_type) if pa.types.is_list(f.type) else f.type) for f in table.schema],
        metadata=table.schema.metadata,
    )
    entry = rewritten(store, entry, table.cast(loose))
    assert equal_packs(reader_of(store, entry).read(), packs)


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("input_ids", lambda rows: [*rows[:2], rows[2][:-1], *rows[3:]], "pack 2: input_ids has 63 values"),
        ("loss_mask", lambda rows: [*rows[:-1], [*rows[-1], True]], "loss_mask has 65 values, seq_len is 64"),
        ("input_ids", lambda rows: [None, *rows[1:]], "input_ids is null in 1 packs"),
        ("input_ids", lambda rows: [[None, *rows[0][1:]], *rows[1:]], "input_ids holds 1 null values"),
        ("cu_seqlens", lambda rows: [rows[0][:-1], *rows[1:]], "pack 0: cu_seqlens has"),
        ("segment_row", lambda rows: [[*rows[0], 5], *rows[1:]], "pack 0: segment_row has"),
        ("num_segments", lambda rows: [rows[0] + 1, *rows[1:]], "pack 0: cu_seqlens has"),
    ],
)
def test_lists_that_do_not_line_up_are_damage(
    shard_in: Callable[..., Any], column: str, change: Callable[[list[Any]], list[Any]], message: str
) -> None:
    store, entry, _, _ = shard_in(LENGTHS, 64)
    table = pq.read_table(store.path(entry.path))
    index = table.schema.get_field_index(column)
    kind = table.schema.types[index]
    loose = pa.list_(kind.value_type) if pa.types.is_list(kind) else kind
    bad = pa.array(change(table.column(column).to_pylist()), type=loose)
    entry = rewritten(store, entry, table.set_column(index, pa.field(column, loose), bad))
    with pytest.raises(DamageError, match=message):
        reader_of(store, entry).read()


def test_a_missing_column_or_another_type_is_damage(shard_in: Callable[..., Any]) -> None:
    store, entry, _, _ = shard_in(LENGTHS, 64)
    table = pq.read_table(store.path(entry.path))
    with pytest.raises(DamageError, match="there is no column cu_seqlens"):
        reader_of(store, rewritten(store, entry, table.drop_columns(["cu_seqlens"]))).open()
    wide = table.set_column(0, "input_ids", table.column("input_ids").cast(pa.list_(pa.int64())))
    with pytest.raises(DamageError, match=r"input_ids is list<.*int64"):
        reader_of(store, rewritten(store, entry, wide)).open()


def test_a_storage_that_fails_is_no_damage(shard_in: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped connection says nothing about the shard: exit 3, not 1."""
    store, entry, _, _ = shard_in(LENGTHS, 64)
    reader = reader_of(store, entry)
    reader.open()

    class Broken:
        def read_row_group(self, *_: Any, **__: Any) -> None:
            raise OSError(5, "Input/output error")

        def close(self) -> None:
            pass

    metadata = reader.row_group_offsets
    assert len(metadata) > 1
    _ = reader.schema
    monkeypatch.setattr(reader, "_names", lambda columns: ["input_ids"])
    monkeypatch.setattr(reader, "_file", Broken())
    with pytest.raises(StorageError, match="Input/output error"):
        reader.read(0, 1)


def test_a_writer_refuses_chunks_that_do_not_fit(packs_of: Callable[..., PackColumns]) -> None:
    packs = packs_of([3, 4], 8)
    meta = ShardMeta(plan_id=PLAN_ID, seq_len=8, shard="train-000000-000")
    with pytest.raises(ValueError, match="packs have 8 tokens, seq_len is 64"):
        write_shard([packs], meta=META, compression="zstd:1", loss_weights=False)
    with pytest.raises(ValueError, match="loss_weights is True"):
        write_shard([packs], meta=meta, compression="zstd:1", loss_weights=True)
    long = packs_of([2**21 + 1] * 2, 2**21 + 1)
    with pytest.raises(ValueError, match="a chunk of 2 packs; a row group holds 1"):
        write_shard([long], meta=dataclasses.replace(meta, seq_len=2**21 + 1), compression="zstd:1", loss_weights=False)


def test_a_remote_store_is_read_the_same_way(shard_in: Callable[..., Any], equal_packs: Callable[..., bool]) -> None:
    _, entry, packs, data = shard_in(LENGTHS, 64)
    store = Store("memory://packsvc-shards")
    store.publish(entry.path, data)
    with reader_of(store, entry) as reader:
        assert equal_packs(reader.read(), packs)
        assert reader.table(["num_tokens"]).column("num_tokens").to_pylist() == packs.num_tokens.tolist()
