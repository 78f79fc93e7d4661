"""The last round: which packs are sent, and that what is sent comes back as it was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.errors import DamageError
from packsvc.plan import place
from packsvc.run.tails import read_tails, select_tails, tail_groups, tails_name, write_tails
from packsvc.storage import Store
from packsvc.types import Counts, EncodedBatch


def batch(lengths, *, weights=False):
    lengths = np.asarray(lengths, np.int64)
    n = int(lengths.sum())
    rng = np.random.default_rng(n)
    return EncodedBatch(
        input_ids=rng.integers(0, 1000, n).astype(np.int32),
        loss_mask=rng.random(n) < 0.5,
        loss_weight=rng.random(n).astype(np.float32) if weights else None,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        file=np.arange(len(lengths), dtype=np.int32) % 3,
        row=np.arange(len(lengths), dtype=np.int64),
        part=np.zeros(len(lengths), np.int32),
        split=np.arange(len(lengths), dtype=np.int16) % 2,
        rejects=[],
        counts=Counts(),
    )


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.sampled_from([1, 8]))
def test_the_emptiest_packs_are_sent_and_at_most_a_twentieth(lengths, align):
    lengths = np.asarray(lengths, np.int64)
    placement = place(lengths, 104, align=align, seed=3)
    kept, sent = select_tails(placement, lengths, capacity=104, align=align, num_segments=len(lengths))
    assert len(sent) <= 0.05 * len(lengths)
    assert sorted([*kept.order, *sent]) == list(range(len(lengths)))
    room = -(-lengths // align) * align
    used = [room[kept.order[a:b]].sum() for a, b in zip(kept.pack_offsets, kept.pack_offsets[1:], strict=False)]
    before = [
        room[placement.order[a:b]].sum()
        for a, b in zip(placement.pack_offsets, placement.pack_offsets[1:], strict=False)
    ]
    assert len(used) <= len(before)
    if len(used) < len(before):
        gone = sorted(before)[: len(before) - len(used)]
        assert sorted([*used, *gone]) == sorted(before)
        assert max(gone) < 0.98 * 104


def test_full_packs_are_never_sent():
    lengths = np.full(100, 50, np.int64)
    kept, sent = select_tails(place(lengths, 100), lengths, capacity=100, align=1, num_segments=100)
    assert len(sent) == 0
    assert kept.num_packs == 50


@pytest.mark.parametrize("weights", [False, True])
def test_what_is_sent_comes_back_as_it_was(tmp_path, weights):
    store = Store(str(tmp_path))
    first, second = batch([3, 5, 2], weights=weights), batch([4, 1], weights=weights)
    entry = write_tails(first, np.array([2, 0]), group=0, store=store)
    write_tails(second, np.array([1]), group=4, store=store)
    found = read_tails(store, [0, 4])
    assert entry["num_segments"] == 2
    assert np.diff(found.offsets).tolist() == [2, 3, 1]
    expected = np.concatenate([first.input_ids[8:10], first.input_ids[0:3], second.input_ids[4:5]])
    assert found.input_ids.tolist() == expected.tolist()
    mask = np.concatenate([first.loss_mask[8:10], first.loss_mask[0:3], second.loss_mask[4:5]])
    assert found.loss_mask.tolist() == mask.tolist()
    assert found.row.tolist() == [2, 0, 1]
    assert found.split.tolist() == [0, 0, 1]
    assert (found.loss_weight is not None) == weights


def test_a_damaged_tail_file_is_named(tmp_path):
    store = Store(str(tmp_path))
    write_tails(batch([300, 500]), np.array([0, 1]), group=0, store=store)
    data = bytearray(store.read(tails_name(0)))
    data[len(data) // 3] ^= 1
    store.publish(tails_name(0), bytes(data))
    with pytest.raises(DamageError, match="tails/000000"):
        read_tails(store, [0])


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 60))
def test_tail_groups_take_every_sender_once_in_order(sent, size):
    groups = tail_groups(sent, first=7, group_examples=size)
    senders = [s for _, members in groups for s in members]
    assert senders == [i for i, n in enumerate(sent) if n]
    assert [g for g, _ in groups] == list(range(7, 7 + len(groups)))
    for _, members in groups:
        assert sum(sent[s] for s in members) <= size or len(members) == 1
