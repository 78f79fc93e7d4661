"""Token ids to the text that each of them adds, exactly, also where a character is made of several tokens.

Byte-level tokenizers and those with byte fallback spell a token's bytes in its name, so the bytes of a text are
those of its tokens back to back. Other tokenizers are asked to decode each token after the one before it, since
what a token adds may depend on its neighbour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE = "\u2581"


class Spelling(Enum):
    """How the names of a tokenizer's tokens spell their text."""

    BYTE_LEVEL = "byte level"
    BYTE_FALLBACK = "byte fallback"
    OTHER = "other"


def _byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in byte-level names: printable Latin-1 for itself, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_characters()


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a token is to a reader."""

    text: str
    control: bool


class Words:
    """Texts of a tokenizer's ids.

    Args:
        backend: A `tokenizers.Tokenizer`.
        definition: Its `to_str()`.
        control_tokens: Texts of the tokens that mean something to the chat format.
    """

    def __init__(self, backend: Any, *, definition: str, control_tokens: Sequence[str] = ()) -> None:
        self._backend = backend
        self._added: dict[int, str] = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
        self._control = {backend.token_to_id(text) for text in control_tokens} - {None}
        self._spelling = spelling(json.loads(definition))

    def of(self, ids: Sequence[int], *, apart: Sequence[bool] | None = None) -> list[Word]:
        """The text that each id adds; together they are the text.

        Args:
            apart: (n,) a flag of each token; a character whose tokens differ in it is shown as their bytes.
        """
        flags = list(apart) if apart is not None else [False] * len(ids)
        if self._spelling is Spelling.OTHER:
            texts = self._decoded(ids)
        else:
            texts = spread([self._bytes(i) for i in ids], flags)
        return [Word(text=text, control=i in self._control) for i, text in zip(ids, texts, strict=True)]

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8", "surrogatepass")
        name = self._backend.id_to_token(token)
        if name is None:
            return f"<id {token}>".encode()
        if self._spelling is Spelling.BYTE_LEVEL:
            if all(c in BYTE_OF for c in name):
                return bytes(BYTE_OF[c] for c in name)
            return str(name).encode()
        if found := _BYTE.match(name):
            return bytes([int(found[1], 16)])
        return str(name).replace(_SPACE, " ").encode()

    def _decoded(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        for at, token in enumerate(ids):
            if token in self._added:
                texts.append(self._added[token])
                continue
            before = [ids[at - 1]] if at else []
            head = self._backend.decode(before, skip_special_tokens=False) if before else ""
            whole = self._backend.decode([*before, token], skip_special_tokens=False)
            text = whole[len(head) :] if whole.startswith(head) else whole
            texts.append(text or str(self._backend.id_to_token(token) or f"<id {token}>"))
        return texts


def spelling(definition: dict[str, Any]) -> Spelling:
    """Told from a tokenizer's definition, its `to_str()` as JSON."""
    steps = [step for key in ("decoder", "pre_tokenizer") for step in _steps(definition.get(key))]
    if any(step.get("type") == "ByteLevel" for step in steps):
        return Spelling.BYTE_LEVEL
    if definition.get("model", {}).get("byte_fallback"):
        return Spelling.BYTE_FALLBACK
    return Spelling.OTHER


def _steps(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not spec:
        return []
    children = [*spec.get("decoders", []), *spec.get("pretokenizers", [])]
    return [leaf for child in children for leaf in _steps(child)] if children else [spec]


def spread(pieces: Sequence[bytes], flags: Sequence[bool]) -> list[str]:
    """Bytes of tokens to their texts: a character goes to the token it begins in.

    Bytes that are no UTF-8, and characters whose tokens have unlike flags, are written out as <0xE2>.
    [b"a\\xe2", b"\\x82\\xac!"] gives ["a€", "!"]; with flags [False, True] ["a<0xE2>", "<0x82><0xAC>!"].
    """
    data = b"".join(pieces)
    owner = [at for at, piece in enumerate(pieces) for _ in piece]
    texts = [""] * len(pieces)
    at = 0
    while at < len(data):
        size = _character(data, at)
        last = at + max(size, 1)
        if size and len({flags[o] for o in owner[at:last]}) == 1:
            texts[owner[at]] += data[at:last].decode("utf-8")
        else:
            for place in range(at, last):
                texts[owner[place]] += f"<0x{data[place]:02X}>"
        at = last
    return texts


def _character(data: bytes, at: int) -> int:
    """Bytes of the character that begins at `at`; 0 where none does."""
    lead = data[at]
    size = (
        1
        if lead < 0x80
        else 2
        if 0xC2 <= lead < 0xE0
        else 3
        if 0xE0 <= lead < 0xF0
        else 4
        if 0xF0 <= lead < 0xF5
        else 0
    )
    try:
        return size if size and len(data[at : at + size].decode("utf-8")) == 1 else 0
    except UnicodeDecodeError:
        return 0
