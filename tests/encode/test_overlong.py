"""Rows that do not fit: every policy by its words, and accounts that close under all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.config import Turns
from packsvc.encode.overlong import Capacity, split, truncate_right
from packsvc.encode.rendered import RowRefused
from packsvc.encode.segments import Segment
from packsvc.encode.units import exchange_starts, turn_ends, units_of, without_oldest
from packsvc.errors import LimitError
from tests.encode.test_encoder import assert_closed, assert_same, ids_of, learned, ready, reasons
from tests.encode.toys import IM_END, chat, raw_text

MASKS = st.lists(st.booleans(), min_size=1, max_size=60)
CAPACITIES = st.tuples(st.integers(2, 30), st.integers(1, 5)).filter(lambda c: c[1] <= c[0])


def segment(mask) -> Segment:
    flags = np.array(mask, np.bool_)
    flags[:1] = False
    return Segment(ids=np.arange(100, 100 + len(flags), dtype=np.int32), mask=flags, weight=flags.astype(np.float32))


def split_by_the_words(ids, mask, limit, seq_len):
    """Fragments as lists of (id, trained), and counts of cut and repeated tokens, a token at a time."""
    prompt = ids[: mask.index(True)] if True in mask else []
    if len(prompt) <= 1 or len(prompt) > seq_len / 2:
        prompt = []
    fragments, cut, repeated = [], 0, 0
    left = list(zip(ids, mask, strict=True))
    first = True
    while left:
        head = [] if first else [(i, False) for i in prompt]
        body, left = left[: limit - len(head)], left[limit - len(head) :]
        fragment = head + body
        fragment[0] = (fragment[0][0], False)
        if any(t for _, t in fragment):
            fragments.append(fragment)
            repeated += len(head)
        else:
            cut += len(body)
        first = False
    return fragments, cut, repeated


@given(MASKS, CAPACITIES)
def test_split_is_what_the_words_say(mask, sizes):
    whole, capacity = segment(mask), Capacity(seq_len=sizes[0], align=sizes[1])
    expected, cut, repeated = split_by_the_words(
        whole.ids.tolist(), whole.mask.tolist(), capacity.limit, capacity.seq_len
    )
    if not expected:
        with pytest.raises(RowRefused, match="no fragment has a trained token"):
            split(whole, capacity)
        return
    result = split(whole, capacity)
    assert [list(zip(s.ids.tolist(), s.mask.tolist(), strict=True)) for s in result.segments] == expected
    assert (result.cut_tokens, result.repeated_tokens) == (cut, repeated)
    assert sum(len(s.ids) for s in result.segments) + cut == len(mask) + repeated
    for s in result.segments:
        assert s.weight.tolist() == s.mask.astype(float).tolist()
        assert -(-len(s.ids) // capacity.align) * capacity.align <= capacity.seq_len


@given(MASKS, CAPACITIES)
def test_truncate_right_keeps_the_first_tokens_or_refuses(mask, sizes):
    whole, capacity = segment(mask), Capacity(seq_len=sizes[0], align=sizes[1])
    kept = whole.mask.tolist()[: capacity.limit]
    if not any(kept):
        with pytest.raises(RowRefused, match="no trained token is left"):
            truncate_right(whole, capacity)
        return
    result = truncate_right(whole, capacity)
    assert result.segments[0].ids.tolist() == whole.ids.tolist()[: capacity.limit]
    assert result.segments[0].mask.tolist() == kept
    assert result.cut_tokens == len(mask) - len(kept)


@pytest.mark.parametrize(("seq_len", "lengths", "cut"), [(60, [60, 60], 1), (61, [61, 60], 0)])
@pytest.mark.parametrize("first", [True, False])
def test_p5_a_row_of_121_tokens_splits_without_a_crash(make_encoder, seq_len, lengths, cut, first):
    encoder = make_encoder(overlong="split", seq_len=seq_len)
    batch = encoder.encode([ready(range(3, 124), [first] + [True] * 120)], source="chat")
    assert np.diff(batch.offsets).tolist() == lengths
    assert batch.part.tolist() == [0, 1]
    assert (batch.counts.cut_tokens, batch.counts.repeated_tokens, batch.counts.split) == (cut, 0, 1)
    assert batch.input_ids.tolist() == list(range(3, 124 - cut))
    assert_closed(batch)


def test_split_repeats_a_short_prompt_before_every_later_fragment(make_encoder):
    encoder = make_encoder(overlong="split", seq_len=10)
    batch = encoder.encode([ready(range(1, 19), [0] * 4 + [1] * 14)], source="chat")
    assert [ids_of(batch, i) for i in range(3)] == [
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [1, 2, 3, 4, 11, 12, 13, 14, 15, 16],
        [1, 2, 3, 4, 17, 18],
    ]
    assert batch.counts.repeated_tokens == 8
    long_prompt = encoder.encode([ready(range(1, 19), [0] * 6 + [1] * 12)], source="chat")
    assert [ids_of(long_prompt, i) for i in range(2)] == [list(range(1, 11)), list(range(11, 19))]
    assert long_prompt.counts.repeated_tokens == 0


def test_p3_p4_nothing_is_cut_unless_asked_for(make_encoder):
    encoder = make_encoder(seq_len=32)
    rows = [chat("x" * 100, "y", row=0), chat("a", "b", row=1), raw_text("z" * 500, row=2)]
    batch = encoder.encode(rows, source="chat")
    assert batch.row.tolist() == [1]
    assert reasons(batch) == [(0, None, "overlong"), (2, None, "overlong")]
    assert "over seq_len 32" in batch.rejects[0].detail
    assert batch.counts.rejected_tokens == len(ids_of(make_encoder().encode(rows[:1], source="chat"))) + 501
    assert_closed(batch)


def test_m3_a_reply_cut_by_truncation_is_trained_up_to_the_cut(make_encoder):
    encoder = make_encoder(overlong="truncate_right", seq_len=30)
    batch = encoder.encode([chat("u", "y" * 50)], source="chat")
    assert learned(encoder, batch) == "y" * batch.loss_mask.sum()
    assert len(batch.input_ids) == 30
    assert batch.counts.truncated == 1
    assert_closed(batch)


@pytest.mark.parametrize("policy", ["reject", "truncate_right", "drop_turns"])
def test_m5_m6_a_prompt_that_fills_the_length_gives_no_segment_without_targets(make_encoder, policy):
    encoder = make_encoder(overlong=policy, seq_len=64)
    batch = encoder.encode([chat("x" * 200, "yes", row=0), chat("x", "yes", row=1)], source="chat")
    assert batch.row.tolist() == [1]
    assert reasons(batch) == [(0, None, "overlong")]
    assert_closed(batch)


def test_overlong_error_names_the_row(make_encoder):
    encoder = make_encoder(overlong="error", seq_len=32)
    with pytest.raises(LimitError, match=r"source 'chat', input 0, row 1: \d+ tokens, over seq_len 32"):
        encoder.encode([chat("a", "b", row=0), chat("x" * 100, "b", row=1)], source="chat")
    silent = chat("x" * 100, row=0)
    assert reasons(encoder.encode([silent], source="chat")) == [(0, None, "no_trained_tokens")]


def test_align_reserves_room(make_encoder):
    rows = [ready(range(1, n + 1), [1] * n, n) for n in (47, 48, 49, 50)]
    batch = make_encoder(seq_len=50, packing={"align": 16}).encode(rows, source="chat")
    assert batch.row.tolist() == [47, 48]
    assert "50, 48 with align 16" in batch.rejects[0].detail
    cut = make_encoder(seq_len=50, packing={"align": 16}, overlong="truncate_right").encode(rows, source="chat")
    assert np.diff(cut.offsets).tolist() == [47, 48, 48, 48]


# ---------------------------------------------------------------- drop_turns


def test_drop_turns_drops_the_oldest_exchanges_and_keeps_the_system_message(make_encoder):
    turns = [("system", "sys"), *((role, f"{role[0]}{i}") for i in range(6) for role in ("user", "assistant"))]
    whole = make_encoder().encode([chat(*turns)], source="chat")
    for keep in range(1, 7):
        fits = len(ids_of(make_encoder().encode([chat(turns[0], *turns[len(turns) - 2 * keep :])], source="chat")))
        encoder = make_encoder(overlong="drop_turns", seq_len=fits)
        batch = encoder.encode([chat(*turns)], source="chat")
        assert learned(encoder, batch) == "|".join(f"a{i}{IM_END}" for i in range(6 - keep, 6))
        assert len(ids_of(batch)) == fits
        assert batch.counts.truncated == (keep < 6)
        assert batch.counts.cut_tokens == len(ids_of(whole)) - fits
        assert_closed(batch)


def test_drop_turns_agrees_with_dropping_one_exchange_after_the_other(make_encoder):
    sizes = [3, 30, 1, 1, 14, 2, 9, 1, 40, 5, 2]
    row = chat(*(text for i, n in enumerate(sizes) for text in ("u" * n, f"a{i}")))
    for seq_len in range(20, 400, 40):
        encoder = make_encoder({"kind": "merging"}, overlong="drop_turns", seq_len=seq_len)
        batch = encoder.encode([row], source="chat")
        unit = next(units_of(row, row=0, turns=Turns.WHOLE))
        encoded = [encoder._slow.one(without_oldest(unit, k)) for k in range(len(sizes))]
        expected = next((s.ids.tolist() for s in encoded if len(s.ids) <= seq_len), None)
        assert (ids_of(batch) if batch.num_segments else None) == expected


def test_an_exchange_is_a_user_message_and_all_up_to_the_next():
    roles = ["system", "developer", "assistant", "user", "user", "assistant", "tool", "assistant", "user"]
    messages = [{"role": r} for r in roles]
    assert exchange_starts(messages) == [2, 4, 8]
    assert exchange_starts([{"role": "system"}]) == [1]
    assert exchange_starts([]) == [0]


def test_a_turn_is_all_from_users_to_the_last_message_before_the_next_users():
    roles = ["system", "assistant", "user", "user", "assistant", "tool", "user", "assistant", "user", "user"]
    assert turn_ends([{"role": r} for r in roles]) == [6, 8, 10]
    assert turn_ends([{"role": "assistant"}]) == [1]
    assert turn_ends([]) == [0]


def test_drop_turns_cannot_help_texts_and_single_exchanges(make_encoder):
    encoder = make_encoder(overlong="drop_turns", seq_len=32)
    batch = encoder.encode([raw_text("z" * 99, row=0), chat("x" * 99, "y", row=1)], source="chat")
    assert [r.detail.split("; ")[1] for r in batch.rejects] == [
        "it has no turns to drop",
        "a single exchange does not fit, so drop_turns cannot help",
    ]


def test_weights_stay_with_their_messages_when_turns_are_dropped(make_encoder):
    encoder = make_encoder(overlong="drop_turns", seq_len=90)
    row = chat("x" * 60, "a0", "u1", "a1", "u2", "a2", weights=[None, None, None, 0.0, None, None])
    batch = encoder.encode([row], source="chat")
    assert learned(encoder, batch) == "a2" + IM_END
    assert "a1" in encoder._engine.loaded.backend.decode(ids_of(batch))


# ---------------------------------------------------------------- accounts

WORDS = st.integers(0, 40).map(lambda n: "w" * n)


@st.composite
def rows_of_all_kinds(draw):
    rows = []
    for row in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["chat", "chat", "chat", "text", "ready"]))
        if kind == "text":
            rows.append(raw_text(draw(WORDS), row=row))
        elif kind == "ready":
            mask = draw(st.lists(st.booleans(), max_size=90))
            rows.append(ready(range(len(mask)), mask, row))
        else:
            turns = draw(
                st.lists(st.tuples(st.sampled_from(["user", "user", "assistant", "system"]), WORDS), max_size=8)
            )
            weights = draw(st.lists(st.sampled_from([None, None, 0.0, 1.0, 0.5]), min_size=8, max_size=8))
            rows.append(chat(*turns, row=row, weights=weights[: len(turns)]))
    return rows


@pytest.mark.parametrize("policy", ["reject", "truncate_right", "drop_turns", "split"])
@pytest.mark.parametrize("turns", ["whole", "each"])
@given(rows=rows_of_all_kinds(), align=st.sampled_from([1, 16]), weights=st.booleans())
def test_accounts_close_under_every_policy(make_encoder, policy, turns, rows, align, weights):
    encoder = make_encoder(overlong=policy, turns=turns, seq_len=50, packing={"align": align}, loss_weights=weights)
    batch = encoder.encode(rows, source="chat")
    assert_closed(batch)
    lengths = np.diff(batch.offsets)
    assert (-(-lengths // align) * align <= 50).all()
    assert_same(batch, encoder.encode_slow(rows, source="chat"))
    for row in {(f, r) for f, r in zip(batch.file.tolist(), batch.row.tolist(), strict=True)}:
        parts = [p for r, p in zip(batch.row.tolist(), batch.part.tolist(), strict=True) if r == row[1]]
        refused = [r.part for r in batch.rejects if r.row == row[1]]
        assert sorted([*parts, *refused]) == list(range(len(parts) + len(refused)))
        assert parts == sorted(parts)
