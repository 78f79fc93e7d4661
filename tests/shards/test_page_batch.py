"""Pages of several packs opened together are what they are one by one, or are refused."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packsvc.compiled import native
from packsvc.shards import PageReader, RawPack, RecentlyUsed, ShardReader, Unfamiliar, open_packs
from packsvc.shards.page_index import page_head
from packsvc.storage import Store
from packsvc.types import PackColumns
from tests.marks import needs_compiled
from tests.shards.test_pages import PLAN_ID

pytestmark = needs_compiled

LENGTHS = [3000, 2000, 1096, 4096, 9, 3000] * 4


def paged(store: Store, entry: Any, seq_len: int) -> PageReader:
    return PageReader(ShardReader(store, entry, plan_id=PLAN_ID, seq_len=seq_len), RecentlyUsed(1 << 20))


def sizes_of(packs: PackColumns, numbers: list[int]) -> list[int]:
    return [int(packs.cu_offsets[i + 1] - packs.cu_offsets[i]) for i in numbers]


def raws_of(reader: PageReader, numbers: list[int]) -> list[RawPack]:
    raws = reader.fetch(numbers)
    assert raws is not None
    return raws


def one_by_one(raw: RawPack) -> list[bytes]:
    """The content of each page."""
    found = []
    for page, codec in zip(raw.pages, raw.codecs, strict=True):
        head = page_head(page)
        assert head is not None
        body = page[head.size :]
        found.append(body if codec is None else codec.decompress(body, head.uncompressed, asbytes=True))
    return found


def contents(opened: Any) -> list[bytes]:
    content, *places = opened
    return [content[start:stop] for start, stop in pairwise(places)]


@pytest.mark.parametrize("codec", ["zstd:1", "zstd:3", "none", "lz4", "snappy"])
@pytest.mark.parametrize(("seq_len", "longest"), [(2500, 60), (4096, 900), (5001, 5001), (9000, 3000)])
@pytest.mark.parametrize("weights", [False, True])
def test_equals_one_by_one(shard_in: Callable[..., Any], seq_len: int, longest: int, codec: str, weights: bool) -> None:
    """Any packs in any order, many and few at a time; lengths that are no multiple of 8, several row groups."""
    lengths = np.random.default_rng(seq_len).integers(2, longest + 1, 60).tolist()
    store, entry, packs, _ = shard_in(lengths, seq_len, loss_weights=weights, compression=codec, group=3)
    reader = paged(store, entry, seq_len)
    numbers = np.random.default_rng(1).permutation(packs.num_packs).tolist()
    for some in ([numbers[0]], numbers + numbers[:3], numbers[:2]):
        raws = raws_of(reader, some)
        found = open_packs(raws, sizes_of(packs, some), seq_len)
        assert [contents(pack) for pack in found] == [one_by_one(raw) for raw in raws]


def test_packs_of_two_codecs_are_left_to_the_slow_twin(shard_in: Callable[..., Any]) -> None:
    mixed = []
    for codec in ("zstd:1", "none"):
        store, entry, packs, _ = shard_in(LENGTHS, 4096, compression=codec)
        mixed += raws_of(paged(store, entry, 4096), [0])
    with pytest.raises(Unfamiliar):
        open_packs(mixed, sizes_of(packs, [0, 0]), 4096)


def read(raws: list[RawPack], packs: PackColumns, numbers: list[int]) -> Any:
    """A row of packs of 4096 tokens; None where they are refused."""
    columns = (packs.num_segments, packs.num_tokens, packs.num_loss_tokens, packs.sum_squared_lengths)
    counts = np.stack(columns, axis=1)[numbers].astype(np.int64)
    try:
        return native.lay_row(open_packs(raws, sizes_of(packs, numbers), 4096), counts, 4096, 1, 0, False, 0)
    except Unfamiliar:
        return None


@pytest.mark.parametrize("codec", ["zstd:1", "none", "lz4"])
def test_a_flipped_bit_in_any_page_is_refused(shard_in: Callable[..., Any], codec: str) -> None:
    """In headers too: all their bits for small pages, many for large ones."""
    store, entry, packs, _ = shard_in(LENGTHS, 4096, compression=codec)
    numbers = list(range(5))
    raws = raws_of(paged(store, entry, 4096), numbers)
    rng = np.random.default_rng(2)
    expected = read(raws, packs, numbers)
    for round_ in range(900):
        pack, column = int(rng.integers(5)), int(rng.integers(3))
        page = bytearray(raws[pack].pages[column])
        at = int(rng.integers(len(page))) if round_ % 3 == 0 else round_ % min(60, len(page))
        page[at] ^= 1 << int(rng.integers(8))
        bad = [RawPack(list(raw.pages), raw.codecs) for raw in raws]
        bad[pack].pages[column] = bytes(page)
        assert read(bad, packs, numbers) is None
    assert read(raws, packs, numbers) == expected


def test_another_number_of_boundaries_than_the_counts_say_is_refused(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 4096)
    raws, (size,) = raws_of(paged(store, entry, 4096), [0]), sizes_of(packs, [0])
    for wrong in (size - 1, size + 1):
        with pytest.raises(Unfamiliar):
            open_packs(raws, [wrong], 4096)


def test_pages_cut_short_or_exchanged_are_refused(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 4096)
    raws = raws_of(paged(store, entry, 4096), [0, 1])
    assert read(raws, packs, [0, 1]) is not None
    ids, mask, bounds = raws[0].pages
    for pages in (
        [ids[:-1], mask, bounds], [b"", mask, bounds], [ids[:9], mask, bounds], [mask, ids, bounds],
        [ids + b"\0", mask, bounds], [ids, mask, ids],
    ):  # fmt: skip
        assert read([RawPack(pages, raws[0].codecs), raws[1]], packs, [0, 1]) is None


def test_pages_of_several_packs_are_left_to_the_slow_twin(shard_in: Callable[..., Any]) -> None:
    store, entry, _, _ = shard_in([60, 50, 40], 64)
    assert paged(store, entry, 64).fetch([0]) is None


def number(value: int) -> bytes:
    """An integer of Thrift's compact protocol."""
    value = (value << 1) ^ (value >> 63)
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def page_of(body: bytes, *, uncompressed: int, num_values: int, crc: int | None = None) -> bytes:
    """A page as Arrow writes it."""
    said = zlib.crc32(body) if crc is None else crc
    signed = said - (1 << 32) if said >> 31 else said
    return (
        b"\x15\x00\x15" + number(uncompressed) + b"\x15" + number(len(body)) + b"\x15" + number(signed)
        + b"\x1c\x15" + number(num_values) + b"\x15\x00\x15\x06\x15\x06\x00\x00" + body
    )  # fmt: skip


@given(st.binary(max_size=300), st.integers(0, 1200), st.integers(0, 400))
@example(b"", 0, 0)
@example(b"a", 1024, 0)
def test_a_header_of_any_numbers_is_read(body: bytes, uncompressed: int, num_values: int) -> None:
    """As the parser reads it; what a page may hold is bounded by its number of values."""
    page = page_of(body, uncompressed=uncompressed, num_values=num_values)
    head = page_head(page)
    assert head is not None
    assert page[head.size :] == body
    opened = native.open_pages([page], [num_values], False)
    fits = uncompressed <= 4 * num_values + 1024
    assert opened == ((body, [len(body)], [uncompressed]) if fits else None)
    assert native.open_pages([page], [num_values + 1], False) is None
    wrong = page_of(body, uncompressed=uncompressed, num_values=num_values, crc=zlib.crc32(body) ^ 0x8000)
    assert native.open_pages([wrong], [num_values], False) is None


@settings(max_examples=40)
@given(st.sampled_from([1, 200, 255, 256, 257, 65_791, 65_792, 70_000, 600_000]), st.integers(1, 5))
def test_a_frame_must_say_the_size_that_the_header_says(size: int, level: int) -> None:
    codec = pa.Codec("zstd", compression_level=level)
    frame = codec.compress(np.random.default_rng(size).integers(0, 9, size, dtype=np.uint8).tobytes(), asbytes=True)
    for said in (size - 1, size, size + 1, size + 256, size + 65_536):
        page = page_of(frame, uncompressed=said, num_values=said)
        assert (native.open_pages([page], [said], True) is not None) == (said == size)
    for other in (b"\0" + frame, frame[:4], b"", b"\x50\x2a\x4d\x18" + frame[4:]):
        assert native.open_pages([page_of(other, uncompressed=size, num_values=size)], [size], True) is None


@given(st.binary(max_size=400))
@example(bytes(64))
@example(bytes(79) + b"\1")
@example(bytes(range(256)) * 3)
def test_checksums_are_those_of_zlib(data: bytes) -> None:
    assert native.crc32(data) == zlib.crc32(data)
    assert native.crc32(data * 7) == zlib.crc32(data * 7)


@given(st.lists(st.binary(max_size=80), max_size=4), st.booleans())
def test_pages_of_anything_are_refused(pages: list[bytes], is_zstd: bool) -> None:
    expected = (b"", [], []) if not pages else None
    assert native.open_pages(pages, [8] * len(pages), is_zstd) == expected
    start = b"\x15\x00\x15\x10\x15"
    assert native.open_pages([start + page for page in pages], [8] * len(pages), is_zstd) == expected


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError):
        native.open_pages([b""], [], True)
    with pytest.raises(TypeError):
        native.open_pages([""], [1], True)
    with pytest.raises(TypeError):
        native.open_pages([b""], ["1"], True)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), max_size=5))
def test_ranges_of_a_file_are_what_pread_gives(ranges: list[tuple[int, int]]) -> None:
    """Short where the file ends, empty behind its end."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(80)))
        file.flush()
        found = native.read_ranges(file.fileno(), ranges)
        assert found == [os.pread(file.fileno(), length, start) for start, length in ranges]


def test_a_range_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.read_ranges(-1, [(0, 1)])
    with tempfile.TemporaryFile() as file:
        with pytest.raises(OSError, match="Invalid argument"):
            native.read_ranges(file.fileno(), [(-1, 1)])
        with pytest.raises(ValueError, match="below 0"):
            native.read_ranges(file.fileno(), [(0, -1)])
        with pytest.raises(TypeError):
            native.read_ranges(file.fileno(), [(0, 1, 2)])
