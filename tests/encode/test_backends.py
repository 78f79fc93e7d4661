from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.encode import backends
from packsvc.encode.backends import PROBES, FlatIds, TruthBackend, choose_backend, first_difference
from tests.encode import toys

fastokens = pytest.importorskip("fastokens")
pytest.importorskip("gigatoken")
ENGLISH = toys.english()
FAST = choose_backend(ENGLISH, definition=ENGLISH.to_str(), probes=PROBES).backend
TRUTH = TruthBackend(ENGLISH)
GIGA = backends.GigatokenBackend(ENGLISH.to_str(), truth=TRUTH)


def rows(flat: FlatIds) -> list[list[int]]:
    return [flat.ids[a:b].tolist() for a, b in pairwise(flat.offsets)]


def test_the_fast_backend_is_used_where_it_agrees_and_named_with_its_version():
    choice = choose_backend(ENGLISH, definition=ENGLISH.to_str(), probes=PROBES)
    assert choice.backend.name.startswith("fastokens ")
    assert f"equal to {TRUTH.name}" in choice.why


def test_a_backend_that_differs_on_one_probe_is_not_used(monkeypatch):
    def off(kind):
        class Off(kind):
            def encode(self, texts, *, special=False):
                flat = super().encode(texts, special=special)
                ids = np.where(flat.ids == flat.ids.max(), 0, flat.ids).astype(np.int32)
                return FlatIds(ids=ids, offsets=flat.offsets)

        return Off

    monkeypatch.setattr(backends, "FAST", (off(backends.FastokensBackend), backends.GigatokenBackend))
    choice = choose_backend(ENGLISH, definition=ENGLISH.to_str(), probes=PROBES)
    assert choice.backend.name.startswith("gigatoken ")
    assert "fastokens" in choice.why

    monkeypatch.setattr(backends, "FAST", tuple(off(kind) for kind in backends.FAST[1:]))
    choice = choose_backend(ENGLISH, definition=ENGLISH.to_str(), probes=PROBES)
    assert choice.backend.name == TRUTH.name
    assert "gives other ids for" in choice.why


@pytest.mark.parametrize("tokenizer", [toys.words(vocabulary=["a"]), toys.words()])
def test_a_tokenizer_that_the_fast_backend_cannot_read_goes_to_the_truth(tokenizer):
    choice = choose_backend(tokenizer, definition=tokenizer.to_str(), probes=PROBES)
    assert choice.backend.name == f"tokenizers {backends.version('tokenizers')}"
    assert "cannot read this tokenizer" in choice.why


def test_without_the_extra_the_truth_is_used_and_the_extra_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(backends, "import_module", missing)
    choice = choose_backend(ENGLISH, definition=ENGLISH.to_str(), probes=PROBES)
    assert choice.backend.name == TRUTH.name
    assert "packsvc[fast]" in choice.why


def test_a_call_that_the_fast_backend_refuses_is_answered_by_the_truth():
    class Refusing:
        def encode_batch_flat(self, texts, add_special_tokens):
            raise ValueError("match limit")

        encode_batch = encode_batch_flat

    for kind in (backends.FastokensBackend, backends.GigatokenBackend):
        broken = kind(ENGLISH.to_str(), truth=TRUTH)
        broken._tokenizer = Refusing()
        assert rows(broken.encode(["hello"])) == rows(TRUTH.encode(["hello"]))


@pytest.mark.parametrize("backend", [TRUTH, FAST, GIGA], ids=["truth", "fastokens", "gigatoken"])
def test_flat_buffers_hold_each_text_in_its_place(backend):
    flat = backend.encode(["", "hello", "", "日 é<|im_end|>", ""])
    assert (flat.ids.dtype, flat.offsets.dtype) == (np.int32, np.int64)
    assert rows(flat) == [
        ENGLISH.encode(t, add_special_tokens=False).ids for t in ["", "hello", "", "日 é<|im_end|>", ""]
    ]
    assert backend.encode([]).offsets.tolist() == [0]


@pytest.mark.parametrize("backend", [None, *backends.FAST])
def test_special_tokens_are_added_only_when_asked_for(backend):
    tokenizer = toys.english(bos=True)
    truth = TruthBackend(tokenizer)
    used = backend(tokenizer.to_str(), truth=truth) if backend else truth
    bos = tokenizer.token_to_id("<s>")
    assert rows(used.encode(["hello"], special=True)) == [[bos, *rows(used.encode(["hello"]))[0]]]


@pytest.mark.parametrize("backend", [FAST, GIGA], ids=["fastokens", "gigatoken"])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(PROBES), max_size=5)
)
def test_fast_and_truth_give_equal_ids(backend, texts):
    assert first_difference(TRUTH, backend, texts) is None
