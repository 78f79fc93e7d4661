"""Control tokens that a person typed, encoded as the ordinary text they are (`control_tokens: encode_as_text`).

The tokenizer is rebuilt with every control token under a name nobody types, same ids, same flags. In the text the
control tokens that the template wrote are replaced by those names; the typed ones are left, and mean nothing to
the rebuilt tokenizer. All the rest of the text is seen whole, so nothing else about its tokens can change, unlike
with pieces that are cut and encoded one by one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from packsvc.encode.rendered import Rendered, RowRefused
from packsvc.types import Reason

_OPEN, _CLOSE = "\ufde0", "\ufde1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetIds:
    """Tokens of one text and the characters each stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class AsText:
    """Encodes texts in which some control tokens are only text."""

    def __init__(self, backend: Any, *, definition: str, control_tokens: Sequence[str]) -> None:
        added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        self._ids = {text: added[text] for text in control_tokens if text in added}
        self._controls = frozenset(self._ids.values())
        self._pattern = re.compile("|".join(re.escape(t) for t in sorted(added, key=lambda t: (-len(t), t))))
        self._tokenizer = Tokenizer.from_str(_renamed(definition, self._ids))
        self._tokenizer.encode_special_tokens = backend.encode_special_tokens

    def encode(self, rendered: Rendered) -> OffsetIds:
        """Ids and character offsets of a render whose `typed_controls` are text.

        Raises:
            RowRefused: The tokenizer makes a control token from the plain text of one, or the text holds the
                noncharacters that this needs for itself.
        """
        text = rendered.text
        if _OPEN in text or _CLOSE in text:
            raise RowRefused(Reason.CONTROL_TOKENS, "the text holds U+FDE0 or U+FDE1 beside typed control tokens")
        hidden, places, written = self._hide(text, rendered.typed_controls)
        encoding = self._tokenizer.encode(hidden, add_special_tokens=False)
        made = Counter(i for i in encoding.ids if i in self._controls)
        if made != written:
            names = sorted(t for t, i in self._ids.items() if made[i] != written[i])
            raise RowRefused(Reason.CONTROL_TOKENS, f"the tokenizer makes {names} from plain text too")
        return OffsetIds(ids=encoding.ids, offsets=[places.back(a, b) for a, b in encoding.offsets])

    def _hide(self, text: str, typed: Sequence[tuple[int, int]]) -> tuple[str, _Places, Counter[int]]:
        pieces: list[str] = []
        places = _Places()
        written: Counter[int] = Counter()
        done = 0
        for match in self._pattern.finditer(text):
            i = self._ids.get(match[0])
            if i is None or any(start < match.end() and match.start() < end for start, end in typed):
                continue
            name = f"{_OPEN}{i}{_CLOSE}"
            pieces += (text[done : match.start()], name)
            done = match.end()
            places.add(match.start(), match.end(), len(name))
            written[i] += 1
        pieces.append(text[done:])
        return "".join(pieces), places, written


class _Places:
    """Maps characters of the text with hidden control tokens back to those of the text."""

    def __init__(self) -> None:
        self._starts = [0]
        self._shifts = [0]

    def add(self, start: int, end: int, length: int) -> None:
        """Characters [start, end) of the text became `length` characters."""
        shift = self._shifts[-1]
        # inside a hidden token only its two ends are ever asked for
        self._starts.append(start + shift + length)
        self._shifts.append(shift + length - (end - start))

    def back(self, start: int, end: int) -> tuple[int, int]:
        return self._back(start), self._back(end)

    def _back(self, place: int) -> int:
        return place - self._shifts[bisect_right(self._starts, place) - 1]


def _renamed(definition: str, ids: dict[str, int]) -> str:
    spec = orjson.loads(definition)
    names = {text: f"{_OPEN}{i}{_CLOSE}" for text, i in ids.items()}
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["post_processor"] = None
    return orjson.dumps(spec).decode()
