"""The compiled code lays packs into rows as numpy does, and refuses what numpy refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packsvc.compiled import native
from packsvc.shards.page_index import level_blocks_end, repetition_starts
from packsvc.shards.thrift import Unfamiliar
from packsvc.stream.collate import RowShape, lay
from packsvc.stream.options import Layout
from tests.parquet import varint
from tests.stream.contents import block, content_of, groups, joined, levels, run
from tests.stream.oracle import fields_of, slow_batch
from tests.stream.outputs import PAD, encoded

from packsvc.assemble import assemble  # isort: skip
from packsvc.plan import place  # isort: skip
from tests.marks import needs_compiled

pytestmark = needs_compiled

COUNTS = ("num_segments", "num_tokens", "num_loss_tokens", "sum_squared_lengths")


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=14),
    seq_len=st.sampled_from([300, 303, 320]),
    layout=st.sampled_from(["trimmed", "padded"]),
    align=st.sampled_from([1, 2, 16]),
    weights=st.sampled_from(["none", "some", "all"]),
    repeated=st.integers(0, 2),
    dense=st.booleans(),
)
def test_equals_the_slow_twin(lengths, seq_len, layout, align, weights, repeated, dense):
    seq_len += -seq_len % align
    batch = encoded(lengths, seed=len(lengths), weights=weights != "none")
    if dense:  # targets in long runs, as real ones are
        inside = np.arange(len(batch.input_ids)) - np.repeat(batch.offsets[:-1], lengths)
        batch.loss_mask[:] = inside > np.repeat(np.array(lengths) // 3, lengths)
    placement = place(lengths, seq_len, align=align)
    packs = [
        assemble(batch, placement, start=i, stop=i + 1, seq_len=seq_len, pad_id=PAD) for i in range(placement.num_packs)
    ]
    repeated = min(repeated, len(packs))
    contents = []
    for i, pack in enumerate(packs):
        weight = None if pack.loss_weight is None else pack.loss_weight[0]
        if weights == "some" and i % 2:
            weight = None
            packs[i] = replace(pack, loss_weight=pack.loss_mask.astype(np.float32))  # it has loss in full
        contents.append(content_of(pack.input_ids[0], pack.loss_mask[0], pack.cu_seqlens, weight))
    counts = np.concatenate([np.stack([getattr(pack, name) for name in COUNTS], axis=1) for pack in packs])
    found = lay(
        contents,
        counts.astype(np.int64),
        shape=RowShape(layout=Layout(layout), align=align, seq_len=seq_len, pad_id=PAD),
        pack_indices=range(len(packs)),
        num_repeated_packs=repeated,
        num_loss_tokens_global=99,
    )
    assert found is not None
    expected, got = slow_batch(packs, layout=layout, align=align, repeated=repeated), fields_of(found)
    logical, expected_weights = expected.pop("cu_seqlens_logical"), expected.pop("loss_weights")
    assert got["cu_seqlens_logical"] == (None if logical == expected["cu_seqlens"] else logical)
    assert got["loss_weights"] == (expected_weights if weights != "none" else None)
    for name, values in expected.items():
        assert got[name] == values, name
    targets = [label != -100 for label in expected["labels"]]
    assert found.num_loss_tokens == sum(targets)
    assert found.num_segments == len(lengths)
    assert found.num_tokens == sum(lengths)
    assert found.max_seqlen == max(b - a for a, b in pairwise(got["cu_seqlens"]))
    assert found.fractional_weights == (
        weights != "none" and any(on and weight != 1 for on, weight in zip(targets, expected_weights, strict=True))
    )


def test_a_mixture_of_packs_with_and_without_weights_keeps_them():
    ids, bounds = np.arange(4, dtype=np.int32), np.array([0, 4], dtype=np.int32)
    mask, weight = np.array([False, True, True, False]), np.array([0, 0.5, 1, 0], dtype=np.float32)
    counts = np.array([[1, 4, 2, 16]] * 2, dtype=np.int64)
    contents = [content_of(ids, mask, bounds, weight), content_of(ids, mask, bounds)]
    laid = native.lay_row(contents, counts, 4, 1, PAD, False, 0)
    assert np.frombuffer(laid[7], dtype=np.float32).tolist() == [0, 0.5, 1, 0, 0, 1, 1, 0]
    assert laid[-1] == 1


def lay_ids(page: bytes, count: int) -> Any:
    """A pack whose ids stand in `page`."""
    content, _, *others = content_of(np.zeros(count, np.int32), np.zeros(count, np.bool_), np.array([0, count]))
    pages = [page, *(content[start:stop] for start, stop in pairwise(others))]
    return native.lay_row([joined(pages)], np.array([[1, count, 0, count * count]]), count, 1, PAD, False, 0)


@given(st.integers(1, 70), st.data())
def test_levels_may_be_written_in_any_way(count: int, data: st.DataObject):
    """Runs and groups of bits in any mixture."""

    def written(values: list[int]) -> bytes:
        found, place = b"", 0
        while place < len(values):
            if data.draw(st.booleans()):
                size = data.draw(st.integers(1, 3)) * 8
                found += groups(values[place : place + size])
            else:
                size = 1
                while place + size < len(values) and values[place + size] == values[place] and data.draw(st.booleans()):
                    size += 1
                found += run(size, values[place])
            place += size
        return block(found)

    values = np.arange(count, dtype="<i4").tobytes()
    page = written([0] + [1] * (count - 1)) + written([1] * count) + values
    assert lay_ids(page, count)[0] == values
    for wrong in (data.draw(st.integers(0, count - 1)), count - 1):
        other = [0] + [1] * (count - 1)
        other[wrong] ^= 1  # a list more, or none that begins
        assert lay_ids(written(other) + written([1] * count) + values, count) is None
        other = [1] * count
        other[wrong] = 0  # an empty list
        assert lay_ids(written([0] + [1] * (count - 1)) + written(other) + values, count) is None


@settings(max_examples=300)
@given(st.binary(max_size=12), st.binary(max_size=12), st.integers(1, 40))
@example(run(1, 0) + varint(1 << 40), run(40, 1), 40)
def test_levels_that_are_anything_are_read_as_numpy_does(first: bytes, second: bytes, count: int):
    page = block(first) + block(second) + bytes(4 * count)
    try:
        starts, full = repetition_starts(page, count)
        expected = full and starts.tolist() == [0]
    except Unfamiliar:
        expected = False
    found = lay_ids(page, count) is not None
    assert found <= expected
    assert level_blocks_end(page) == len(page) - 4 * count


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), min_size=3, max_size=4), st.integers(1, 20), st.data())
def test_pages_of_anything_are_refused(pages: list[bytes], seq_len: int, data: st.DataObject):
    """Most are; whatever they are, nothing is read beside them."""
    counts = np.array([[data.draw(st.integers(-2, 1 << 40)) for _ in range(4)]], dtype=np.int64)
    assert native.lay_row([joined(pages)], counts, seq_len, 1, PAD, True, 0) is None


def test_pages_with_too_few_or_too_many_values_are_refused():
    right = [levels(4) + bytes(16), levels(4) + bytes(1), levels(2) + np.array([0, 4], dtype="<i4").tobytes()]
    counts = np.array([[1, 4, 0, 16]])
    assert native.lay_row([joined(right)], counts, 4, 1, PAD, False, 0) is not None
    for page in range(3):
        for other in (right[page][:-1], right[page] + b"\0", b"", right[page][:3]):
            pages = [*right[:page], other, *right[page + 1 :]]
            assert native.lay_row([joined(pages)], counts, 4, 1, PAD, False, 0) is None


def test_wrong_arguments_are_errors():
    pack, counts = content_of(np.zeros(4, np.int32), np.zeros(4, np.bool_), np.array([0, 4])), np.array([[1, 4, 0, 16]])
    for packs, numbers, seq_len, align in (
        ([], counts, 4, 1), ([pack], counts[0, :3].copy(), 4, 1), ([pack, pack], counts, 4, 1), ([pack], counts, 0, 1),
        ([pack], counts, 4, 0), ([pack[:3]], counts, 4, 1), ([(pack[0], 0, 5, 4, 9)], counts, 4, 1),
        ([(pack[0], -1, 5, 6, 9)], counts, 4, 1), ([(*pack[:4], 9999)], counts, 4, 1), (["pack"], counts, 4, 1),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            native.lay_row(packs, numbers, seq_len, align, PAD, False, 0)
    with pytest.raises(TypeError):
        native.lay_row([("pack", *pack[1:])], counts, 4, 1, PAD, False, 0)
