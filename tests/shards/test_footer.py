"""Footer and page index say what pyarrow says of them; compiled code and Python agree on any bytes."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.compiled import native
from packsvc.errors import DamageError
from packsvc.shards import PageReader, RecentlyUsed, ShardReader, page_index, thrift
from packsvc.shards.footer import Footer, Leaf
from packsvc.shards.page_index import page_head, page_locations, page_minima
from packsvc.shards.thrift import Unfamiliar, read_struct
from tests.marks import needs_compiled
from tests.parquet import footer_start, zigzag

PLAN_ID = "p" * 64
PHYSICAL = ["BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY"]
CODECS = ["UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4_OLD", "ZSTD", "LZ4"]


def footer_of(data: bytes) -> bytes:
    return data[footer_start(data) : -8]


def outcome(read: Callable[..., Any], *arguments: Any) -> Any:
    """What is read, or None where it is refused; arrays as lists."""
    try:
        found = read(*arguments)
    except Unfamiliar:
        return None
    return found.tolist() if isinstance(found, np.ndarray) else found


def by_both(read: Callable[..., Any], *arguments: Any) -> list[Any]:
    """By compiled code, and without it."""
    found = []
    for code in (native, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page_index, "native", code)
            patch.setattr(thrift, "native", code)
            found.append(outcome(read, *arguments))
    return found


TABLES = {
    "packs": lambda: pa.table(
        {"ids": pa.array([[1, 2], [3]] * 50, pa.list_(pa.int32())), "n": pa.array(range(100), pa.int64())}
    ).replace_schema_metadata({"packsvc.shard": "train-000000-000", "empty": ""}),
    "nested": lambda: pa.table(
        {"a": [{"b": [{"c": 1.5, "d": None}], "e": "x"}] * 9, "f": [True] * 9, "g": pa.array([1] * 9, pa.float32())}
    ),
    "empty": lambda: pa.table({"n": pa.array([], pa.int32())}),
    "wide": lambda: pa.table({f"column{i}": [i] for i in range(40)}),
}


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled), False])
@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "compression": "zstd", "write_page_index": True}])
@pytest.mark.parametrize("table", TABLES)
def test_says_what_pyarrow_says(
    monkeypatch: pytest.MonkeyPatch, table: str, options: dict[str, Any], compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(thrift, "native", None)
    sink = io.BytesIO()
    pq.write_table(TABLES[table](), sink, row_group_size=30, **options)
    expected = pq.ParquetFile(sink).metadata
    found = Footer.read(footer_of(sink.getvalue()))
    assert found.num_rows == expected.num_rows
    assert found.metadata == {key.decode(): value.decode() for key, value in (expected.metadata or {}).items()}
    assert found.group_rows == [expected.row_group(i).num_rows for i in range(expected.num_row_groups)]
    assert len(found.leaves) == expected.num_columns
    for number, leaf in enumerate(found.leaves):
        column = expected.schema.column(number)
        assert b".".join(leaf.path).decode() == column.path
        assert PHYSICAL[leaf.physical] == column.physical_type
        assert (leaf.definition, leaf.repetition) == (column.max_definition_level, column.max_repetition_level)
        for group in range(expected.num_row_groups):
            chunk = expected.row_group(group).column(number)
            if chunk.has_dictionary_page:
                with pytest.raises(Unfamiliar):
                    found.chunk(group, number)
                continue
            mine = found.chunk(group, number)
            assert CODECS[mine.codec] == chunk.compression
            assert mine.pages == (chunk.data_page_offset, chunk.total_compressed_size)
            assert (mine.offset_index is not None) == chunk.has_offset_index
            assert (mine.column_index is not None) == chunk.has_column_index
    with pytest.raises((Unfamiliar, IndexError)):
        found.chunk(expected.num_row_groups, 0)


def test_no_bytes_are_anything_but_read_or_refused() -> None:
    """Each byte of a footer changed, and each part of it cut off."""
    sink = io.BytesIO()
    pq.write_table(TABLES["packs"](), sink, row_group_size=30, use_dictionary=False, write_page_index=True)
    footer = footer_of(sink.getvalue())
    refused = 0
    for at in range(len(footer)):
        for flip in (1, 2, 4, 8, 0x40, 0x80):
            changed = bytearray(footer)
            changed[at] ^= flip
            found = outcome(Footer.read, bytes(changed))
            refused += found is None
            for group in range(len(found.group_rows) if found else 0):
                outcome(found.chunk, group, 0)
        assert outcome(Footer.read, footer[:at]) is None
    assert refused > len(footer)
    assert outcome(Footer.read, footer + b"\0") is None


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_a_footer_raises_or_harms_nothing(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, data = shard_in([3000, 2000, 1096, 4096], 4096)
    reader = ShardReader(store, entry, plan_id=PLAN_ID, seq_len=4096)
    outcomes = Counter[str]()
    for at in range(footer_start(data), len(data), 3):
        bad = bytearray(data)
        bad[at] ^= 1 << at // 3 % 8
        Path(store.path(entry.path)).write_bytes(bad)
        pages = PageReader(reader, RecentlyUsed(1 << 20))
        try:
            counts = pages.counts()
            found = pages.read(np.arange(packs.num_packs), counts)
        except DamageError as error:
            outcomes["named" if "train-000000-000" in str(error) else str(error)] += 1
        else:
            assert np.array_equal(np.stack([one.input_ids for one in found]), packs.input_ids)
            assert np.array_equal(counts["num_tokens"], packs.num_tokens)
            outcomes["harmless"] += 1
        pages.close()
    assert set(outcomes) == {"named", "harmless"}
    assert outcomes["named"] > 100


@pytest.mark.parametrize(
    "footer",
    [
        b"\x29\x1c\x48\x01s\x15\x00\x00\x16\x00\x19\x18\x00\x00",  # a row group is a binary
        b"\x29\x18\x01a\x16\x00\x19\x0c\x00",  # a part of the schema is
        b"\x29\x1c\x48\x01s\x15\x02\x00\x16\x00\x19\x0c\x00",  # columns are missing
    ],
)
def test_footers_of_other_shapes_are_refused(footer: bytes) -> None:
    assert outcome(read_struct, footer, 2) is not None
    assert outcome(Footer.read, footer) is None


@pytest.mark.parametrize("meta", [b"\x18\x01a", b"\x19\x15\x02", b"\x1c\x00"])
def test_chunks_of_other_shapes_are_refused(meta: bytes) -> None:
    """What a column says of itself is a binary, a short list, an empty struct."""
    leaf = Leaf((b"a",), 1, 0, 0)
    footer = Footer({}, 1, [1], [leaf], [{1: [b"\x26\x08" + meta + b"\x00"], 3: 1}])
    assert outcome(footer.chunk, 0, 0) is None


def test_row_groups_that_contradict_the_file_are_damage(shard_in: Callable[..., Any]) -> None:
    """Their sizes are not what pyarrow checks."""
    store, entry, packs, data = shard_in([3000, 2000, 1096, 4096], 4096)
    footer = footer_of(data)
    group = Footer.read(footer)._groups[0]
    tail = b"\x16" + zigzag(group[2]) + b"\x16" + zigzag(packs.num_packs)
    assert footer.count(tail) == 1
    for rows in (packs.num_packs + 1, packs.num_packs - 1):
        bad = data.replace(tail, tail[:-1] + zigzag(rows))
        assert len(bad) == len(data)
        Path(store.path(entry.path)).write_bytes(bad)
        reader = ShardReader(store, entry, plan_id=PLAN_ID, seq_len=4096)
        for read in (PageReader(reader, RecentlyUsed(1 << 20)).counts, reader.read):
            with pytest.raises(DamageError, match=rf"{packs.num_packs} packs, its row groups say \[{rows}\]"):
                read()


@pytest.mark.parametrize(
    "struct",
    [
        b"\x15\x02\x15\x03\x00",  # field 1 is 1, field 2 is -2
        b"\x11\x12\x00",  # true, false
        b"\x05\x80\x02\x02\x00",  # field 128, said at length
        b"\x18\x03abc\x00",
        b"\x19\x32\x01\x02\x00\x00",  # three bools
        b"\x1c\x15\x04\x00\x00",
        b"\x19\xfc\x10" + b"\x00" * 17,  # sixteen empty structs
    ],
)
def test_structs_by_hand(struct: bytes) -> None:
    expected = {
        0x15: {1: 1, 2: -2},
        0x11: {1: True, 2: False},
        0x05: {128: 1},
        0x18: {1: b"abc"},
        0x1C: {1: {1: 2}},
        0x19: {1: [True, False, False]} if struct[1] == 0x32 else {1: [{}] * 16},
    }[struct[0]]
    assert by_both(read_struct, struct) == [expected, expected]
    for end in range(len(struct)):
        assert by_both(read_struct, struct[:end]) == [None, None]


def test_structs_below_some_levels_are_left_as_their_bytes() -> None:
    inner = b"\x15\x06\x19\x2c\x15\x02\x00\x00\x00"  # 3, and a list of two structs
    outer = b"\x1c" + inner + b"\x1c" + inner + b"\x00"
    deep = {1: 3, 2: [{1: 1}, {}]}
    assert by_both(read_struct, outer, 3) == [{1: deep, 2: deep}] * 2
    assert by_both(read_struct, outer, 2) == [{k: {1: 3, 2: [b"\x15\x02\x00", b"\x00"]} for k in (1, 2)}] * 2
    assert by_both(read_struct, outer, 1) == [{1: inner, 2: inner}] * 2
    assert by_both(read_struct, outer[:-2], 1) == [None, None], "what is left as bytes is looked through"


@pytest.mark.parametrize("struct", [b"\x17" + bytes(9), b"\x1b\x00\x00", b"\x1c" * 40 + bytes(41), b"\x19\xfc\x7f\x00"])
def test_what_no_footer_has_is_refused(struct: bytes) -> None:
    """A double, a map, structs too deep, a list longer than what is left."""
    assert by_both(read_struct, struct) == [None, None]


@needs_compiled
@settings(max_examples=500)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_struct_to_compiled_code_and_to_python_alike(raw: bytes) -> None:
    fast, slow = by_both(read_struct, raw)
    assert fast == slow


@needs_compiled
@settings(max_examples=500)
@given(st.data())
def test_a_changed_footer_is_read_by_compiled_code_as_by_python(data: st.DataObject) -> None:
    if not _FOOTERS:
        for table in TABLES.values():
            sink = io.BytesIO()
            pq.write_table(table(), sink, row_group_size=30, write_page_index=True)
            _FOOTERS.append(footer_of(sink.getvalue()))
    footer, levels = data.draw(st.sampled_from(_FOOTERS)), data.draw(st.integers(1, 5))
    fast, slow = by_both(read_struct, footer, levels)
    assert fast is not None
    assert fast == slow
    at, put = data.draw(st.integers(0, len(footer) - 1)), data.draw(st.binary(max_size=2))
    fast, slow = by_both(read_struct, footer[:at] + put + footer[at + data.draw(st.integers(0, 2)) :], levels)
    assert fast == slow


_FOOTERS: list[bytes] = []


@needs_compiled
@settings(max_examples=300)
@given(st.lists(st.integers(0, 2**30), max_size=20), st.integers(0, 2**40), st.integers(1, 9), st.data())
def test_an_offset_index_is_read_by_compiled_code_as_by_python(
    sizes: list[int], start: int, per_page: int, data: st.DataObject
) -> None:
    """Written out, and with a byte changed, left out or put in."""
    offsets = [start + sum(sizes[:i]) for i in range(len(sizes))]
    head = bytes([len(sizes) << 4 | 0x0C]) if len(sizes) < 15 else bytes([0xFC, len(sizes)])
    pages = [
        b"\x16" + zigzag(offset) + b"\x15" + zigzag(size) + b"\x16" + zigzag(i * per_page) + b"\0"
        for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]
    index = b"\x19" + head + b"".join(pages) + b"\0"
    count, stop = len(sizes), start + sum(sizes)
    assert by_both(page_locations, index, count, start, stop, per_page) == [(offsets, sizes)] * 2
    assert by_both(page_locations, index, count, start, stop + 1, per_page) == [None, None]
    assert by_both(page_locations, index, count + 1, start, stop, per_page) == [None, None]
    at, put = data.draw(st.integers(0, len(index) - 1)), data.draw(st.binary(max_size=2))
    changed = index[:at] + put + index[at + data.draw(st.integers(0, 2)) :]
    fast, slow = by_both(page_locations, changed, count, start, stop, per_page)
    assert fast is None or fast == slow


@needs_compiled
@settings(max_examples=300)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), st.sampled_from([np.int32, np.int64]), st.data())
def test_a_column_index_is_read_by_compiled_code_as_by_numpy(
    values: list[int], dtype: Any, data: st.DataObject
) -> None:
    """As Arrow writes it, and with a byte changed, left out or put in."""
    width = np.dtype(dtype).itemsize

    def of(kind: int) -> bytes:
        return bytes([len(values) << 4 | kind]) if len(values) < 15 else bytes([0xF0 | kind, len(values)])

    numbers = b"".join(bytes([width]) + np.array([value], dtype).tobytes() for value in values)
    index = b"\x19" + of(2) + b"\2" * len(values) + (b"\x19" + of(8) + numbers) * 2 + b"\x15\x02\x00"
    assert by_both(page_minima, index, len(values), dtype) == [values, values]
    assert by_both(page_minima, index, len(values) + 1, dtype) == [None, None]
    at, put = data.draw(st.integers(0, len(index) - 1)), data.draw(st.binary(max_size=2))
    changed = index[:at] + put + index[at + data.draw(st.integers(0, 2)) :]
    fast, slow = by_both(page_minima, changed, len(values), dtype)
    assert fast == slow


@given(st.binary(max_size=80), st.integers(0, 20))
def test_index_bytes_of_any_kind_are_refused_or_read(raw: bytes, count: int) -> None:
    outcome(page_locations, raw, count, 0, 1 << 20, 1)
    outcome(page_minima, raw, count, np.int32)
    page_head(raw)
