"""Pages of many packs decoded together are what they are one by one, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packsvc.shards import BatchDecoder, PackPages, Packs, PageReader, RawPack, RecentlyUsed, ShardReader, Unfamiliar
from packsvc.shards.page_batch import _frame_head
from packsvc.shards.page_index import head_before_checksum, head_ends, page_head, varint, zigzag_bytes
from packsvc.storage import Store
from packsvc.types import PackColumns
from tests.shards.test_pages import PLAN_ID

LENGTHS = [3000, 2000, 1096, 4096, 9, 3000] * 4


def paged(store: Store, entry: Any, seq_len: int) -> PageReader:
    return PageReader(ShardReader(store, entry, plan_id=PLAN_ID, seq_len=seq_len), RecentlyUsed(1 << 20))


def sizes_of(packs: PackColumns, numbers: list[int]) -> list[int]:
    return [int(packs.cu_offsets[i + 1] - packs.cu_offsets[i]) for i in numbers]


def raws_of(reader: PageReader, numbers: list[int]) -> list[RawPack]:
    raws = reader.fetch(numbers)
    assert raws is not None
    return raws


def same(one: Packs, other: Packs) -> bool:
    """Equal in every value."""
    weights = (one.loss_weight is None) == (other.loss_weight is None) and list(one.loss_weight or []) == list(
        other.loss_weight or []
    )
    return (
        list(one.input_ids) == list(other.input_ids)
        and np.array_equal(one.loss_mask, other.loss_mask)
        and one.loss_mask.dtype == other.loss_mask.dtype == np.bool_
        and weights
        and np.array_equal(one.cu_seqlens, other.cu_seqlens)
        and list(one.sizes) == list(other.sizes)
    )


@pytest.mark.parametrize("codec", ["zstd:1", "zstd:3", "none", "lz4", "snappy"])
@pytest.mark.parametrize(("seq_len", "longest"), [(2500, 60), (4096, 900), (5001, 5001), (9000, 3000)])
@pytest.mark.parametrize("weights", [False, True])
def test_equals_the_slow_twin(
    shard_in: Callable[..., Any], seq_len: int, longest: int, codec: str, weights: bool
) -> None:
    """Any packs in any order, many and few at a time; lengths that are no multiple of 8, several row groups."""
    lengths = np.random.default_rng(seq_len).integers(2, longest + 1, 60).tolist()
    store, entry, packs, _ = shard_in(lengths, seq_len, loss_weights=weights, compression=codec, group=3)
    reader, decoder = paged(store, entry, seq_len), BatchDecoder(seq_len)
    counts = reader.counts()
    numbers = np.random.default_rng(1).permutation(packs.num_packs).tolist()
    for some in ([numbers[0]], numbers + numbers[:3], numbers[:2]):
        found = decoder.decode(raws_of(reader, some), sizes_of(packs, some))
        assert same(found, Packs.of(reader.read(np.array(some), counts)))


def test_one_decoder_reads_files_that_were_written_otherwise(shard_in: Callable[..., Any], tmp_path: Any) -> None:
    """Codecs and levels in turn; packs of two codecs at once are left to the slow twin."""
    decoder, mixed = BatchDecoder(4096), []
    for codec in ("zstd:1", "none", "zstd:9", "lz4", "zstd:1"):
        store, entry, packs, _ = shard_in(LENGTHS, 4096, compression=codec)
        reader = paged(store, entry, 4096)
        numbers = list(range(packs.num_packs))
        mixed.append(raws_of(reader, numbers)[0])
        found = decoder.decode(raws_of(reader, numbers), sizes_of(packs, numbers))
        assert same(found, Packs.of(reader.read(np.array(numbers), reader.counts())))
    with pytest.raises(Unfamiliar):
        decoder.decode(mixed[:2], sizes_of(packs, [0, 0]))


@pytest.mark.parametrize("codec", ["zstd:1", "none", "lz4"])
@pytest.mark.parametrize("seen", [True, False])
def test_a_flipped_bit_in_any_page_is_refused(shard_in: Callable[..., Any], codec: str, seen: bool) -> None:
    """In headers too; by a decoder that knows the form of the pages, and by one that sees them for the first time."""
    store, entry, packs, _ = shard_in(LENGTHS, 4096, compression=codec)
    numbers = list(range(5))
    raws, sizes = raws_of(paged(store, entry, 4096), numbers), sizes_of(packs, numbers)
    decoder = BatchDecoder(4096)
    decoder.decode(raws, sizes)
    rng = np.random.default_rng(2)
    for round_ in range(240):
        pack, column = int(rng.integers(5)), int(rng.integers(3))
        page = bytearray(raws[pack].pages[column])
        at = int(rng.integers(min(60, len(page)) if round_ % 2 else len(page)))
        page[at] ^= 1 << int(rng.integers(8))
        bad = [RawPack(list(raw.pages), raw.codecs) for raw in raws]
        bad[pack].pages[column] = bytes(page)
        with pytest.raises(Unfamiliar):
            (decoder if seen else BatchDecoder(4096)).decode(bad, sizes)
    decoder.decode(raws, sizes)


def test_another_number_of_boundaries_than_the_counts_say_is_refused(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 4096)
    raws, (size,) = raws_of(paged(store, entry, 4096), [0]), sizes_of(packs, [0])
    for wrong in (size - 1, size + 1):
        with pytest.raises(Unfamiliar):
            BatchDecoder(4096).decode(raws, [wrong])


def test_pages_cut_short_or_exchanged_are_refused(shard_in: Callable[..., Any]) -> None:
    store, entry, packs, _ = shard_in(LENGTHS, 4096)
    raws, sizes = raws_of(paged(store, entry, 4096), [0, 1]), sizes_of(packs, [0, 1])
    decoder = BatchDecoder(4096)
    decoder.decode(raws, sizes)
    ids, mask, bounds = raws[0].pages
    for pages in ([ids[:-1], mask, bounds], [b"", mask, bounds], [mask, ids, bounds], [ids + b"\0", mask, bounds]):
        with pytest.raises(Unfamiliar):
            decoder.decode([RawPack(pages, raws[0].codecs), raws[1]], sizes)


def test_pages_of_several_packs_are_left_to_the_slow_twin(shard_in: Callable[..., Any]) -> None:
    store, entry, _, _ = shard_in([60, 50, 40], 64)
    assert paged(store, entry, 64).fetch([0]) is None


@given(st.integers(0, 1 << 27), st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(0, 2**32 - 1))
@example(0, 0, 0, 0)
@example(63, 64, 64, 127)
def test_the_expected_header_is_what_the_parser_reads(body: int, uncompressed: int, count: int, crc: int) -> None:
    """A header of any numbers; its size is found from that of the page."""
    field = zigzag_bytes(crc)
    first, after = head_ends(uncompressed, count)
    header = first + zigzag_bytes(body) + b"\x15" + field + after
    parsed = page_head(header)
    assert parsed is not None
    assert parsed == (len(header), uncompressed, body, crc, count)
    before = head_before_checksum(len(header) + body, first, len(field + after))
    assert before + field + after == header


@given(st.integers(0, 2**32 - 1))
@example(2**31)
@example(2**28)
def test_zigzag_bytes_are_read_back(value: int) -> None:
    assert varint(zigzag_bytes(value)) & 0xFFFFFFFF == value


@settings(max_examples=40)
@given(st.sampled_from([1, 200, 255, 256, 257, 65_791, 65_792, 70_000, 600_000]), st.integers(1, 5))
def test_a_frame_head_says_the_size(size: int, level: int) -> None:
    codec = pa.Codec("zstd", compression_level=level)
    frame = codec.compress(np.random.default_rng(size).integers(0, 9, size, dtype=np.uint8).tobytes(), asbytes=True)
    head = _frame_head(frame, size)
    assert frame.startswith(head)
    assert 6 <= len(head) <= 14
    for wrong in (size - 1, size + 1):
        with pytest.raises(Unfamiliar):
            _frame_head(frame, wrong)
    with pytest.raises(Unfamiliar):
        _frame_head(b"\0" + frame, size)


def test_packs_decoded_one_by_one_stand_side_by_side() -> None:
    ids, mask = np.arange(6, dtype=np.int32).reshape(2, 3), np.array([[0, 1, 0], [0, 0, 1]], dtype=np.bool_)
    cu = [np.array([0, 3], dtype=np.int32), np.array([0, 2, 3], dtype=np.int32)]
    packs = Packs.of([PackPages(ids[i], mask[i], None, cu[i]) for i in range(2)])
    assert [bytes(row) for row in packs.input_ids] == [ids[0].tobytes(), ids[1].tobytes()]
    assert packs.loss_mask.tolist() == mask.tolist()
    assert packs.cu_seqlens.tolist() == [0, 3, 0, 2, 3]
    assert packs.sizes == [2, 3]
    assert packs.loss_weight is None
