import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from packsvc.encode.backends import TruthBackend
from packsvc.encode.byte_lengths import POISON, byte_lengths
from packsvc.encode.masks import _may_join, mask_from_offsets, masks_from_bytes
from packsvc.encode.rendered import Span
from tests.encode import toys

KINDS = {
    "english": toys.english(),
    "nfc": toys.english(normalizer=normalizers.NFC()),
    "merging": toys.merging(),
    "digits": toys.digits_apart(),
    "gemma": toys.gemma_like(),
}
LENGTHS = {name: byte_lengths(t, definition=t.to_str()) for name, t in KINDS.items()}

TEXTS = st.lists(
    st.text(max_size=12)
    | st.text(alphabet="abehlo .m\n é日\u0301\u1161\u1100\u2581", max_size=20)
    | st.sampled_from(
        ["hello the world", "<|im_start|>user\n", "<|im_end|>\n", "e\u0301", "\n\n\n", "日本語", "👩\u200d👧", "\x00"]
    ),
    min_size=1,
    max_size=8,
).map("".join)


@st.composite
def texts_with_spans(draw):
    text = draw(TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    spans = [
        Span(a, b, draw(st.sampled_from([1.0, 0.5, 0.25])), i)
        for i, (a, b) in enumerate(pairwise(cuts))
        if draw(st.booleans())
    ]
    return text, tuple(spans)


def by_definition(offsets, spans):
    """Weights and edge tokens from the words of the contract, character by character."""
    trained = {c: span.weight for span in spans for c in range(span.start, span.end)}
    weights, edges = [], 0
    for start, stop in offsets:
        inside = [c in trained for c in range(start, stop)]
        weights.append(trained[start] if inside and all(inside) else 0.0)
        edges += sum(start < s.start < stop and s.start - 1 not in trained for s in spans)
    return weights, edges


@pytest.mark.parametrize("name", KINDS)
@given(rows=st.lists(texts_with_spans(), min_size=1, max_size=5))
def test_masks_from_byte_lengths_are_those_from_offsets(name, rows):
    tokenizer, texts, spans = KINDS[name], [t for t, _ in rows], [s for _, s in rows]
    flat = TruthBackend(tokenizer).encode(texts)
    masks = masks_from_bytes(flat.ids, flat.offsets, texts=texts, spans=spans, lengths=LENGTHS[name], weights=True)
    for i, text in enumerate(texts):
        here = slice(flat.offsets[i], flat.offsets[i + 1])
        if i in masks.failed:
            assert not text.isascii(), "an ASCII text always adds up"
            assert not masks.mask[here].any()
            continue
        slow = mask_from_offsets(tokenizer.encode(text, add_special_tokens=False).offsets, spans[i])
        assert masks.mask[here].tolist() == slow.mask
        assert masks.weight[here].tolist() == slow.weight
        assert masks.edge_tokens[i] == slow.edge_tokens


@given(row=texts_with_spans())
def test_masks_from_offsets_are_what_the_words_say(row):
    text, spans = row
    offsets = KINDS["merging"].encode(text, add_special_tokens=False).offsets
    result = mask_from_offsets(offsets, spans)
    weights, edges = by_definition(offsets, spans)
    assert result.weight == weights
    assert result.edge_tokens == edges
    assert result.mask == [w > 0 for w in weights]


def encode(tokenizer, text, *spans):
    flat = TruthBackend(tokenizer).encode([text])
    lengths = byte_lengths(tokenizer, definition=tokenizer.to_str())
    return masks_from_bytes(flat.ids, flat.offsets, texts=[text], spans=[spans], lengths=lengths, weights=True)


def test_a_mask_written_out():
    # tokens: hello|Ġwo|rl|d
    masks = encode(toys.english(), "hello world", Span(6, 11, 0.5, 0))
    assert masks.mask.tolist() == [False, False, True, True]
    assert masks.weight.tolist() == [0, 0, 0.5, 0.5]
    assert masks.edge_tokens.tolist() == [1]


def test_m19_a_token_across_the_start_of_a_span_is_prompt_and_counted():
    # a|.m|e: the prompt ends with ".", the reply begins with "m"
    masks = encode(toys.merging(), "a.me", Span(2, 4, 1.0, 0))
    assert masks.mask.tolist() == [False, False, True]
    assert masks.edge_tokens.tolist() == [1]


def test_a_token_across_the_end_of_a_span_is_not_trained():
    masks = encode(toys.merging(), "a.me", Span(0, 2, 1.0, 0))
    assert masks.mask.tolist() == [True, False, False]
    assert masks.edge_tokens.tolist() == [0]


def test_a_token_across_two_spans_that_touch_takes_the_first_weight():
    masks = encode(toys.merging(), "a.me", Span(0, 2, 0.5, 0), Span(2, 4, 1.0, 1))
    assert masks.weight.tolist() == [0.5, 0.5, 1.0]
    assert masks.edge_tokens.tolist() == [0]


def test_spans_of_neighbouring_rows_never_join():
    tokenizer, texts = toys.merging(), ["a.", "me"]
    flat = TruthBackend(tokenizer).encode(texts)
    spans = [(Span(1, 2, 1.0, 0),), (Span(0, 2, 0.5, 0),)]
    masks = masks_from_bytes(flat.ids, flat.offsets, texts=texts, spans=spans, lengths=LENGTHS["merging"], weights=True)
    assert masks.weight.tolist() == [0, 1, 0.5, 0.5]


def test_rows_without_tokens_or_spans_stay_out_of_the_way():
    texts = ["", "hello", ""]
    flat = TruthBackend(KINDS["english"]).encode(texts)
    masks = masks_from_bytes(
        flat.ids, flat.offsets, texts=texts, spans=[(), (), ()], lengths=LENGTHS["english"], weights=False
    )
    assert masks.mask.tolist() == [False]
    assert masks.weight is None
    assert masks.failed == []


def test_ids_that_are_not_of_the_text_do_not_add_up():
    tokenizer, texts = KINDS["english"], ["hello", "the"]
    flat = TruthBackend(tokenizer).encode(["hell", "the"])
    masks = masks_from_bytes(
        flat.ids,
        flat.offsets,
        texts=texts,
        spans=[(Span(0, 5, 1.0, 0),)] * 2,
        lengths=LENGTHS["english"],
        weights=False,
    )
    assert masks.failed == [0]
    assert masks.mask.tolist()[0] is False


def test_text_that_is_not_nfc_is_measured_after_normalisation():
    text = "ae\u0301 hello e\u0301"
    masks = encode(KINDS["nfc"], text, Span(4, 9, 1.0, 0))
    assert masks.failed == []
    assert unicodedata.normalize("NFC", text) != text
    tokens = KINDS["nfc"].encode(text, add_special_tokens=False).tokens
    assert [t for t, m in zip(tokens, masks.mask, strict=True) if m] == ["hello"]


@pytest.mark.parametrize(
    ("before", "after"),
    [("e", "\u0301x"), ("\u1100", "\u1161\u11a8"), ("\u09c7", "\u09be"), ("q\u0315", "\u0300 e\u0301")],
    ids=["composed", "hangul", "bengali", "only moved"],
)
def test_an_edge_that_normalisation_moves_has_no_byte_and_fails(before, after):
    text = before + after
    assert encode(KINDS["nfc"], text, Span(len(before), len(text), 1.0, 0)).failed == [0]


def test_every_character_that_composes_with_the_one_before_is_known_as_such():
    for code in range(0x80, 0x10000):
        pair = unicodedata.decomposition(chr(code)).split()
        if len(pair) == 2 and not pair[0].startswith("<"):
            assert _may_join(chr(int(pair[1], 16)))
    assert not any(map(_may_join, "aé日\u0915\u3042 \n."))


def test_the_literal_space_mark_does_not_add_up_where_it_stands_for_spaces():
    assert encode(KINDS["gemma"], "a \u2581 b").failed == [0]
    assert encode(KINDS["gemma"], "a   b\u00ff日").failed == []


@pytest.mark.parametrize("tokenizer", [toys.words(), toys.llama2_like(), toys.lower_casing()])
def test_tokenizers_of_other_kinds_have_no_table(tokenizer):
    assert byte_lengths(tokenizer, definition=tokenizer.to_str()) is None


def test_tokens_whose_text_varies_never_add_up():
    greedy = toys.english(added=[AddedToken("<x>", lstrip=True)])
    lengths = byte_lengths(greedy, definition=greedy.to_str())
    assert lengths.table[greedy.token_to_id("<x>")] == POISON
    assert encode(greedy, "hello   <x>").failed == [0]
    assert encode(greedy, "hello").failed == []


def test_every_byte_level_id_has_the_length_of_what_it_decodes_to():
    tokenizer = KINDS["english"]
    table = LENGTHS["english"].table
    assert len(table) == tokenizer.get_vocab_size()
    for name, i in tokenizer.get_vocab().items():
        assert table[i] == len(name), "the alphabet has one character a byte, and markers are ASCII"
    assert np.all(table > 0)
