"""How many bytes of text each token id stands for: the table that turns ids into token boundaries.

The cumulative sum of these lengths over a row's ids is the end of every token in the row's UTF-8 text, without
asking the tokenizer for offsets. It holds for byte-level BPE (one character of the token for each byte) and for
SentencePiece-like BPE with byte fallback (U+2581 stands for a space, <0xNN> for a byte). Tokens whose text
varies, such as an unknown token, get a length that no row can add up to, so their rows fail the sum check and
take the offsets path. Tokenizers of other kinds have no table: all of their rows take that path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

POISON = 65535
"""The length of a token that has none. Lengths only add up, so its row's sum is always too large."""

_SPACE = "\u2581"
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
# The characters that stand for bytes in byte-level BPE: printable Latin-1 for itself, the others from U+0100 on.
_ALPHABET = frozenset(map(chr, [*_PRINTABLE, *range(0x100, 0x100 + 256 - len(_PRINTABLE))]))
# Pre-tokenizers that cut a text without changing it.
_CUTTERS = {"Split", "Digits", "Punctuation", "ByteLevel", "UnicodeScripts", "FixedLength"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLengths:
    """Bytes of each id, and how the tokenizer changes a text before it is cut into tokens."""

    table: NDArray[np.uint16]
    """(vocab_size,) bytes of normalised UTF-8 text that each id stands for."""
    nfc: bool
    """The text is brought into Unicode's form C first."""


def byte_lengths(backend: Any, *, definition: str) -> ByteLengths | None:
    """The table of a tokenizer; None when byte lengths cannot be told from its definition, its `to_str()`."""
    spec = orjson.loads(definition)
    model = spec["model"]
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    normalizer = _flat(spec.get("normalizer"), "normalizers")
    pre_tokenizer = _flat(spec.get("pre_tokenizer"), "pretokenizers")
    kinds = [n["type"] for n in normalizer]
    if any(p["type"] not in _CUTTERS or p.get("behavior") == "Removed" for p in pre_tokenizer):
        return None
    if _is_byte_level(normalizer, pre_tokenizer) and set(kinds) <= {"NFC", "ByteLevel"}:
        alphabet, length_of, length_of_added = _ALPHABET, _byte_level_length, _utf8_length
    elif kinds == ["Replace"] and _is_space_rule(normalizer[0]) and model.get("byte_fallback"):
        # an added token of U+2581 only (Gemma) is what a run of spaces becomes, so a row that holds the literal
        # character does not add up
        alphabet, length_of, length_of_added = _BYTE_TOKENS, _fallback_length, _fallback_length
    else:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    table = np.full(1 + max(vocabulary.values(), default=-1), POISON, np.uint16)
    for text, i in vocabulary.items():
        if i not in added:
            table[i] = min(length_of(text), POISON)
    for i, token in added.items():
        # lstrip and rstrip swallow white space of any length: such a token says nothing about bytes
        if not (token.lstrip or token.rstrip):
            table[i] = min(length_of_added(token.content), POISON)
    unknown = vocabulary.get(model.get("unk_token") or "")
    if unknown is not None and not all(byte in vocabulary for byte in alphabet):
        table[unknown] = POISON
    return ByteLengths(table=table, nfc="NFC" in kinds)


def _flat(spec: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [leaf for child in spec[key] for leaf in _flat(child, key)]
    return [spec]


def _is_byte_level(normalizer: list[dict[str, Any]], pre_tokenizer: list[dict[str, Any]]) -> bool:
    steps = [step for step in (*normalizer, *pre_tokenizer) if step["type"] == "ByteLevel"]
    return len(steps) == 1 and not steps[0].get("add_prefix_space")


def _is_space_rule(rule: dict[str, Any]) -> bool:
    return rule.get("pattern") == {"String": " "} and rule.get("content") == _SPACE


def _byte_level_length(text: str) -> int:
    return len(text) if _ALPHABET.issuperset(text) else POISON


def _utf8_length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _fallback_length(text: str) -> int:
    return 1 if text in _BYTE_TOKENS else _utf8_length(text.replace(_SPACE, " "))
