"""Packs that contradict themselves are refused, whatever the contradiction, and no others; by compiled code too."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.assemble import assemble
from packsvc.compiled import native
from packsvc.errors import DamageError
from packsvc.plan import place
from packsvc.shards import COUNT_COLUMNS, PackPages
from packsvc.stream.geometry import check_packs
from tests.stream.contents import content_of
from tests.stream.outputs import PAD, encoded

SEQ_LEN = 16


def contradicts(cu: list[int], mask: list[bool], counts: list[int]) -> bool:
    """Whether one pack does, demand by demand."""
    num_segments, num_tokens, num_targets, squares = counts
    lengths = [b - a for a, b in pairwise(cu)]
    fits = (
        num_segments > 0
        and len(cu) == num_segments + 1 + (num_tokens < SEQ_LEN)
        and cu[0] == 0
        and cu[-1] == SEQ_LEN
        and all(n > 0 for n in lengths)
        and cu[num_segments] == num_tokens
    )
    return not (
        fits
        and not any(mask[start] for start in cu[:-1])
        and not any(mask[num_tokens:])
        and sum(mask) == num_targets
        and sum(n * n for n in lengths[:num_segments]) == squares
    )


def packs_of(lengths: list[int]) -> tuple[list[PackPages], np.ndarray]:
    batch, placement = encoded(lengths, seed=len(lengths)), place(lengths, SEQ_LEN)
    columns = assemble(batch, placement, start=0, stop=placement.num_packs, seq_len=SEQ_LEN, pad_id=PAD)
    packs = [
        PackPages(
            columns.input_ids[i],
            columns.loss_mask[i].copy(),
            None,
            columns.cu_seqlens[columns.cu_offsets[i] : columns.cu_offsets[i + 1]].copy(),
        )
        for i in range(placement.num_packs)
    ]
    return packs, np.stack([getattr(columns, name) for name in COUNT_COLUMNS], axis=1).astype(np.int64)


def laid(packs: list[PackPages], counts: np.ndarray) -> object:
    """What the compiled code says of packs."""
    contents = [content_of(pack.input_ids, pack.loss_mask, pack.cu_seqlens, pack.loss_weight) for pack in packs]
    return native.lay_row(contents, counts, SEQ_LEN, 1, PAD, False, 0)


@settings(max_examples=300)
@given(st.lists(st.integers(2, 16), min_size=1, max_size=12), st.data())
def test_a_change_anywhere_is_refused_where_it_contradicts(lengths: list[int], data: st.DataObject):
    packs, counts = packs_of(lengths)
    one = data.draw(st.integers(0, len(packs) - 1))
    for _ in range(data.draw(st.integers(0, 2))):
        what = data.draw(st.sampled_from(["mask", "cu", "counts"]))
        if what == "mask":
            at = data.draw(st.integers(0, SEQ_LEN - 1))
            packs[one].loss_mask[at] ^= True
        elif what == "cu":
            at = data.draw(st.integers(0, len(packs[one].cu_seqlens) - 1))
            packs[one].cu_seqlens[at] = data.draw(st.integers(-1, SEQ_LEN + 1))
        else:
            counts[one, data.draw(st.integers(0, 3))] += data.draw(st.sampled_from([-1, 1, 4]))
    bad = [
        i
        for i, pack in enumerate(packs)
        if contradicts(pack.cu_seqlens.tolist(), pack.loss_mask.tolist(), counts[i].tolist())
    ]
    if bad:
        if native is not None:
            assert laid(packs, counts) is None
        with pytest.raises(DamageError, match=rf"^pack-{bad[0]}: .*run `packsvc validate` and pack again"):
            check_packs(packs, counts, lambda i: f"pack-{i}")
        return
    if native is not None:
        assert laid(packs, counts) is not None
    rows = check_packs(packs, counts, lambda i: f"pack-{i}")
    ends = [0, *np.cumsum(rows.num_tokens).tolist()]
    for pack, (start, stop) in zip(packs, pairwise(ends), strict=True):
        assert np.array_equal(rows.loss_mask[start:stop], pack.loss_mask[: stop - start])
    ids = [pack.input_ids[:n] for pack, n in zip(packs, rows.num_tokens, strict=True)]
    assert np.array_equal(rows.input_ids, np.concatenate(ids))
    assert rows.lengths.tolist() == [
        b - a
        for pack, n in zip(packs, rows.num_segments, strict=True)
        for a, b in pairwise(pack.cu_seqlens[: n + 1].tolist())
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packs, counts: counts.__setitem__((1, 0), 9), "cu_seqlens and num_segments disagree"),
        (lambda packs, counts: packs[1].cu_seqlens.__setitem__(0, 1), "cu_seqlens does not span the row"),
        (lambda packs, counts: packs[1].cu_seqlens.__setitem__(-1, 17), "cu_seqlens does not span the row"),
        (lambda packs, counts: packs[1].cu_seqlens.__setitem__(1, 9), "cu_seqlens does not rise"),
        (lambda packs, counts: counts.__setitem__((1, 1), 9), "cu_seqlens and num_tokens disagree"),
        (lambda packs, counts: packs[1].loss_mask.__setitem__(5, True), "a segment's first token has loss"),
        (lambda packs, counts: packs[1].loss_mask.__setitem__(15, True), "the padding tail has loss"),
        (lambda packs, counts: counts.__setitem__((1, 2), 1), "loss_mask and num_loss_tokens disagree"),
        (lambda packs, counts: counts.__setitem__((1, 3), 1), "cu_seqlens and sum_squared_lengths disagree"),
    ],
)
def test_what_contradicts_what_is_named(change, message: str):
    mask = np.zeros(SEQ_LEN, dtype=np.bool_)
    mask[[3, 7, 8]] = True
    ids, cu = np.arange(SEQ_LEN, dtype=np.int32), np.array([0, 5, 9, 14, 16], dtype=np.int32)
    packs = [PackPages(ids, mask.copy(), None, cu.copy()) for _ in range(3)]
    counts = np.tile(np.array([3, 14, 3, 25 + 16 + 25], dtype=np.int64), (3, 1))
    check_packs(packs, counts, str)
    change(packs, counts)
    with pytest.raises(DamageError, match=f"^1: {message}"):
        check_packs(packs, counts, str)
