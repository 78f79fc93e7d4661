"""The page reader gives what the plain reader gives, for any pack in any order, and passes no damage on in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards import COUNT_COLUMNS, PackPages, PageReader, RecentlyUsed, ShardReader
from packsvc.shards import pages as pages_module
from packsvc.shards.page_index import varint
from packsvc.shards.thrift import Unfamiliar
from packsvc.storage import Store
from packsvc.types import PackColumns
from tests.parquet import zigzag

PLAN_ID = "p" * 64
LENGTHS = np.random.default_rng(5).integers(2, 60, 80).tolist()


def plain(store: Store, entry: Any, seq_len: int) -> ShardReader:
    return ShardReader(store, entry, plan_id=PLAN_ID, seq_len=seq_len)


def paged(store: Store, entry: Any, seq_len: int) -> PageReader:
    return PageReader(plain(store, entry, seq_len), RecentlyUsed(1 << 20))


def equal(found: list[PackPages], packs: PackColumns, numbers: list[int]) -> bool:
    """Each pack as it stands at its number."""
    assert len(found) == len(numbers)
    for one, i in zip(found, numbers, strict=True):
        bounds = packs.cu_seqlens[packs.cu_offsets[i] : packs.cu_offsets[i + 1]]
        weight = None if packs.loss_weight is None else packs.loss_weight[i]
        assert (one.loss_weight is None) == (weight is None)
        pairs = [(one.input_ids, packs.input_ids[i]), (one.loss_mask, packs.loss_mask[i]), (one.cu_seqlens, bounds)]
        for a, b in [*pairs, *([(one.loss_weight, weight)] if weight is not None else [])]:
            if a is None or a.dtype != b.dtype or not np.array_equal(a, b):
                return False
    return True


@pytest.fixture
def never_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow twin would hide that the fast one does nothing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the packs were read by pyarrow")

    monkeypatch.setattr(PageReader, "_by_pyarrow", refuse)


@pytest.mark.parametrize("codec", ["zstd:1", "zstd:3", "none", "lz4", "snappy"])
@pytest.mark.parametrize(("seq_len", "longest"), [(7, 7), (64, 60), (100, 90), (4096, 900), (5000, 4999), (9000, 3000)])
@pytest.mark.parametrize("weights", [False, True])
def test_equals_the_plain_reader(
    shard_in: Callable[..., Any], never_pyarrow: None, seq_len: int, longest: int, codec: str, weights: bool
) -> None:
    """Lengths that are no multiple of 8, several packs a page, a short last page, several row groups."""
    lengths = np.random.default_rng(seq_len).integers(2, longest + 1, 120).tolist()
    store, entry, packs, _ = shard_in(lengths, seq_len, loss_weights=weights, compression=codec, group=11)
    reader = paged(store, entry, seq_len)
    counts = reader.counts()
    for name in COUNT_COLUMNS:
        assert counts[name].dtype == np.int64
        assert np.array_equal(counts[name], getattr(packs, name))
    numbers = np.random.default_rng(1).permutation(packs.num_packs)
    numbers = np.concatenate((numbers, numbers[:3], np.arange(packs.num_packs)))
    assert equal(reader.read(numbers, counts), plain(store, entry, seq_len).read(), numbers.tolist())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_packs_in_any_order(data: st.DataObject) -> None:
    reader, counts, packs = _KEPT[0]
    numbers = data.draw(st.lists(st.integers(0, packs.num_packs - 1), max_size=8))
    assert equal(reader.read(np.array(numbers, dtype=np.int64), counts), packs, numbers)


_KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def _keep(shard_in: Callable[..., Any]) -> None:
    if not _KEPT:
        store, entry, packs, _ = shard_in([3000, 2000, 1096, 4096, 9, 3000] * 5, 4096, group=3)
        reader = paged(store, entry, 4096)
        _KEPT.append((reader, reader.counts(), packs))


def test_counts_are_those_of_the_pages_where_a_page_holds_several(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 64)
    reader = paged(store, entry, 64)
    reader._open()
    with pytest.raises(Unfamiliar):
        reader._counts_of_index()
    assert np.array_equal(paged(store, entry, 64).counts()["num_tokens"], packs.num_tokens)


def test_a_remote_store_is_read_by_ranges(shard_in: Callable[..., Any], never_pyarrow: None) -> None:
    _, entry, packs, data = shard_in([3000, 2000, 1096, 4096, 9, 3000] * 5, 4096, group=3)
    store = Store("memory://packsvc-pages")
    store.publish(entry.path, data)
    reader = paged(store, entry, 4096)
    counts = reader.counts()
    assert equal(reader.read(np.array([7, 0, 3]), counts), packs, [7, 0, 3])


def test_reading_goes_on_where_the_file_was_closed(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 64, group=3)
    reader = paged(store, entry, 64)
    counts = reader.counts()
    for number in range(packs.num_packs):
        assert equal(reader.read(np.array([number]), counts), packs, [number])
        reader.close()
        assert not reader.is_open


def rewritten(store: Store, entry: Any, data: bytes) -> Any:
    store.publish(entry.path, data)
    return dataclasses.replace(entry, size_bytes=len(data))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"use_dictionary": False, "write_page_index": True, "write_page_checksum": True},
        {"use_dictionary": False, "write_page_index": True, "write_page_checksum": True, "max_rows_per_page": 2},
        {"use_dictionary": False, "write_page_index": True, "data_page_version": "2.0", "max_rows_per_page": 1},
        {"use_dictionary": False, "write_page_index": True, "compression": "gzip", "max_rows_per_page": 1},
        {"column_encoding": {"input_ids.list.element": "DELTA_BINARY_PACKED"}, "use_dictionary": False},
    ],
)
def test_other_forms_of_the_same_columns_are_read_by_pyarrow(
    shard_in: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Dictionaries, no index, other pages, codecs, encodings: the values count."""
    store, entry, packs, _ = shard_in([3000, 2000, 1096, 4096, 9, 3000] * 5, 4096)
    sink = pa.BufferOutputStream()
    pq.write_table(pq.read_table(store.path(entry.path)), sink, row_group_size=4, **options)
    entry = rewritten(store, entry, sink.getvalue().to_pybytes())
    reader = paged(store, entry, 4096)
    numbers = [7, 0, 3, 7, 8]
    assert equal(reader.read(np.array(numbers), reader.counts()), packs, numbers)


@pytest.mark.parametrize("has", [True, False])
def test_weights_that_are_there_or_missing_against_the_job_are_damage(shard_in: Callable[..., Any], has: bool) -> None:
    """Else a flipped bit in the column's name would drop the weights of a shard in silence."""
    store, entry, _, _ = shard_in([3000, 2000, 1096, 4096], 4096, loss_weights=has)
    for weighted in (has, None):
        reader = ShardReader(store, entry, plan_id=PLAN_ID, seq_len=4096, weighted=weighted)
        assert PageReader(reader, RecentlyUsed(1 << 20)).counts()["num_tokens"].sum()
    reader = ShardReader(store, entry, plan_id=PLAN_ID, seq_len=4096, weighted=not has)
    for read in (PageReader(reader, RecentlyUsed(1 << 20)).counts, reader.read):
        with pytest.raises(DamageError, match=f"loss_weight, and the job has loss_weights: {str(not has).lower()}"):
            read()


def test_a_column_that_is_there_twice_is_damage(shard_in: Callable[..., Any]) -> None:
    store, entry, _, _ = shard_in([3000, 2000, 1096, 4096], 4096)
    table = pq.read_table(store.path(entry.path))
    twice = pa.table(
        [*table.columns, table.column("input_ids")], schema=table.schema.append(table.schema.field("input_ids"))
    )
    sink = pa.BufferOutputStream()
    pq.write_table(twice, sink, use_dictionary=False, write_page_index=True, max_rows_per_page=1)
    entry = rewritten(store, entry, sink.getvalue().to_pybytes())
    with pytest.raises(DamageError, match="input_ids"):
        paged(store, entry, 4096).counts()


def read_all(
    store: Store, entry: Any, seq_len: int
) -> tuple[dict[str, NDArray[np.int64]], list[PackPages]] | DamageError:
    """Counts and packs, or what stopped the reading."""
    reader = paged(store, entry, seq_len)
    try:
        counts = reader.counts()
        if any(int(counts[n].sum()) != getattr(entry, n) for n in ("num_segments", "num_tokens", "num_loss_tokens")):
            return DamageError(f"{reader.shard.where}: the counts do not add up")
        return counts, reader.read(np.arange(entry.num_packs), counts)
    except DamageError as error:
        return error


@pytest.mark.parametrize(("seq_len", "codec"), [(64, "zstd:1"), (4096, "zstd:1"), (4096, "none"), (64, "none")])
def test_a_flipped_bit_anywhere_raises_or_harms_nothing(
    shard_in: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, seq_len: int, codec: str
) -> None:
    """Headers, index and footer too, which no checksum covers."""
    lengths = np.random.default_rng(3).integers(2, 60 if seq_len == 64 else 3000, 40 if seq_len == 64 else 24).tolist()
    store, entry, packs, data = shard_in(lengths, seq_len, compression=codec, group=5)
    rng = np.random.default_rng(8)
    raised = 0
    heads = np.flatnonzero(np.frombuffer(data, np.uint8)[:-1] == 0x15)
    tail = np.arange(len(data) - 6000, len(data))
    for at in [*rng.choice(heads, 80).tolist(), *rng.integers(0, len(data), 40).tolist(), *rng.choice(tail, 80)]:
        at = int(at) + int(rng.integers(0, 2)) * (at < len(data) - 1)
        bad = bytearray(data)
        bad[at] ^= 1 << int(rng.integers(8))
        Path(store.path(entry.path)).write_bytes(bad)
        outcome = read_all(store, entry, seq_len)
        if isinstance(outcome, DamageError):
            assert "train-000000-000" in str(outcome)
            raised += 1
            continue
        counts, found = outcome
        assert equal(found, packs, list(range(packs.num_packs))), f"silently wrong at byte {at}"
        for name in ("num_segments", "num_tokens", "num_loss_tokens"):
            assert np.array_equal(counts[name], getattr(packs, name)), f"{name} silently wrong at byte {at}"
    assert raised > 50


@pytest.mark.parametrize("column", ["input_ids", "loss_mask", "cu_seqlens"])
def test_damage_names_shard_pack_column_and_byte(shard_in: Callable[..., Any], column: str) -> None:
    store, entry, _, data = shard_in([3000, 2000, 1096, 4096, 9, 3000] * 5, 4096, group=3)
    good = paged(store, entry, 4096)
    counts = good.counts()
    good.read(np.array([4]), counts)
    offset = good._groups[1].places[good._columns.index(column)][0][1]
    size = good._groups[1].places[good._columns.index(column)][1][1]
    bad = bytearray(data)
    bad[offset + size - 1] ^= 4
    store.publish(entry.path, bytes(bad))
    reader = paged(store, entry, 4096)
    message = rf"train-000000-000.*pack 4: {column} is damaged: the page at byte {offset} does not have the checksum"
    with pytest.raises(DamageError, match=message):
        reader.read(np.array([4]), counts)
    assert len(reader.read(np.array([3, 5]), counts)) == 2, "its neighbours can be read"


def test_a_header_that_is_not_ours_is_judged_by_pyarrow(shard_in: Callable[..., Any]) -> None:
    """Its checksum does not cover it, so that the page below is whole."""
    store, entry, _, data = shard_in([3000, 2000, 1096, 4096, 9, 3000] * 5, 4096, group=3)
    good = paged(store, entry, 4096)
    counts = good.counts()
    good.read(np.array([0]), counts)
    offset = good._groups[0].places[0][0][0]
    bad = bytearray(data)
    bad[offset + 3] ^= 1
    store.publish(entry.path, bytes(bad))
    with pytest.raises(DamageError, match=rf"pack.*the page.* at byte {offset} is not as it was written"):
        paged(store, entry, 4096).read(np.array([0]), counts)


def test_a_file_that_became_shorter_is_damage_and_not_a_crash(shard_in: Callable[..., Any]) -> None:
    store, entry, _, _ = shard_in([3000, 2000, 1096, 4096, 9, 3000] * 5, 4096, group=3)
    reader = paged(store, entry, 4096)
    counts = reader.counts()
    reader.read(np.array([0]), counts)
    with open(store.path(entry.path), "r+b") as file:
        file.truncate(1000)
    with pytest.raises(DamageError, match="it was longer when opened"):
        reader.read(np.array([2]), counts)


@pytest.mark.parametrize("value", [0, -1, 1, -64, 64, 2**31 - 1, -(2**31), 2**40])
def test_zigzag_integers(value: int) -> None:
    assert varint(zigzag(value)) == value


def test_pages_kept_for_their_neighbours_are_bounded(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 64, group=7)
    kept: RecentlyUsed[list[PackPages]] = RecentlyUsed(1)
    reader = PageReader(plain(store, entry, 64), kept)
    numbers = np.arange(packs.num_packs)
    assert equal(reader.read(numbers, reader.counts()), packs, numbers.tolist())
    assert len(kept._held) == 1


def test_pyarrow_is_asked_for_nothing(shard_in: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    store, entry, packs, _ = shard_in([3000, 2000, 1096, 4096, 9, 3000] * 5, 4096, group=3)
    monkeypatch.setattr(pages_module.ShardReader, "open", None)
    reader = paged(store, entry, 4096)
    assert equal(reader.read(np.array([3]), reader.counts()), packs, [3])
