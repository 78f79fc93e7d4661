"""Token texts: exact, also where one character takes several tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from packsvc.view.words import BYTE_OF, Spelling, Words, spelling, spread

QWEN = Path(__file__).parents[2] / "pipelines/quickstart/tokenizers/qwen3/tokenizer.json"


@pytest.fixture(scope="module")
def qwen() -> Words:
    backend = Tokenizer.from_file(str(QWEN))
    return Words(backend, definition=backend.to_str(), control_tokens=["<|im_start|>", "<|im_end|>"])


@pytest.fixture(scope="module")
def fallback() -> Words:
    """A SentencePiece-like BPE whose bytes are tokens."""
    names = [*(f"<0x{n:02X}>" for n in range(256)), "\u2581", *"abcdefgh", "\u2581a", "<s>"]
    backend = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [("\u2581", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>"])
    return Words(backend, definition=backend.to_str(), control_tokens=["<s>"])


def ids_of(words: Words, text: str) -> list[int]:
    return list(words._backend.encode(text, add_special_tokens=False).ids)


@given(text=st.text(max_size=40))
def test_texts_together_are_the_text(qwen: Words, text: str) -> None:
    """Qwen normalises to NFC, so the text is taken in that form."""
    import unicodedata

    text = unicodedata.normalize("NFC", text)
    assert "".join(w.text for w in qwen.of(ids_of(qwen, text))) == text


@given(text=st.text(max_size=20))
def test_byte_fallback_is_exact_too(fallback: Words, text: str) -> None:
    text = text.replace("\u2581", " ")
    assert "".join(w.text for w in fallback.of(ids_of(fallback, text))) == text


def test_a_character_of_several_tokens_stands_with_the_first(qwen: Words) -> None:
    ids = ids_of(qwen, "x🫠y")
    texts = [w.text for w in qwen.of(ids)]
    assert len(ids) > 3
    assert "".join(texts) == "x🫠y"
    assert texts.count("") == len(ids) - 3


def test_a_character_that_is_trained_in_part_shows_its_bytes(qwen: Words) -> None:
    ids = ids_of(qwen, "🫠")
    flags = [False, *[True] * (len(ids) - 1)]
    texts = [w.text for w in qwen.of(ids, apart=flags)]
    assert "".join(texts) == "<0xF0><0x9F><0xAB><0xA0>"
    assert all(texts)


def test_control_tokens_are_told_from_the_same_words_in_content(qwen: Words) -> None:
    found = qwen.of(ids_of(qwen, "<|im_start|>user<|im_end|>"))
    assert [(w.text, w.control) for w in found] == [("<|im_start|>", True), ("user", False), ("<|im_end|>", True)]


def test_an_id_outside_the_vocabulary_is_shown_as_such(qwen: Words) -> None:
    assert qwen.of([10**6])[0].text == "<id 1000000>"


def test_tokenizers_of_other_kinds_are_decoded_beside_their_neighbour() -> None:
    names = ["[UNK]", "hello", "world", "##ly"]
    backend = Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    words = Words(backend, definition=backend.to_str())
    assert [w.text for w in words.of([1, 2, 3])] == ["hello", " world", "ly"]


def test_the_alphabet_of_byte_level_names_is_the_one_of_tokenizers() -> None:
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert BYTE_OF["Ġ"] == 0x20


@given(st.lists(st.binary(max_size=4), max_size=8), st.data())
def test_any_bytes_are_shown_without_loss(pieces: list[bytes], data: st.DataObject) -> None:
    """Taking the texts back to bytes gives the bytes, whatever they are (pieces that look like escapes aside)."""
    flags = [data.draw(st.booleans()) for _ in pieces]
    whole = b"".join(pieces)
    texts = spread(pieces, flags)
    assert len(texts) == len(pieces)
    if b"<0x" not in whole:
        assert unescaped("".join(texts)) == whole


def unescaped(text: str) -> bytes:
    out, at = b"", 0
    while at < len(text):
        if text.startswith("<0x", at):
            out += bytes([int(text[at + 3 : at + 5], 16)])
            at += 6
        else:
            out += text[at].encode()
            at += 1
    return out


def test_spread_as_its_docstring_says() -> None:
    assert spread([b"a\xe2", b"\x82\xac!"], [False, False]) == ["a€", "!"]
    assert spread([b"a\xe2", b"\x82\xac!"], [False, True]) == ["a<0xE2>", "<0x82><0xAC>!"]
    assert spread([b"\xff", b"\xc0\x80"], [False, False]) == ["<0xFF>", "<0xC0><0x80>"]


def test_spellings_are_told_from_definitions() -> None:
    assert spelling({"decoder": {"type": "ByteLevel"}, "model": {}}) is Spelling.BYTE_LEVEL
    nested = {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]}
    assert spelling({"pre_tokenizer": nested, "model": {}}) is Spelling.BYTE_LEVEL
    assert spelling({"decoder": None, "model": {"byte_fallback": True}}) is Spelling.BYTE_FALLBACK
    assert spelling({"model": {"type": "WordPiece"}}) is Spelling.OTHER
