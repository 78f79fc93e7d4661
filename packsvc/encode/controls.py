"""Control tokens: found in text fast, told apart by what they do, and noticed where a person typed them.

Control tokens are the tokenizer's special tokens and the turn markers that the template writes. Whether any of them
stands in a content is asked of every string of every row, so the question is first put as a few `str.find` for what
tokens begin with, which run at memory speed; only where one of these is found does the regular expression look.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

_STRUCTURE = re.compile(
    r"think|thought|reason|tool.?call|tool.?output|tool.?response|tool.?result|action|function", re.IGNORECASE
)
_EMPTY_REASONING = re.compile(
    r"\n*(?:"
    r"<(?P<tag>[\w:]*(?:think|thinking|thought|reasoning))>\s*</(?P=tag)>"
    r"|\[THINK\]\s*\[/THINK\]"
    r"|<\|START_THINKING\|>\s*<\|END_THINKING\|>"
    r"|<\|channel>thought\s*<channel\|>"
    r")\n*"
)
REASONING_HEADS = "\n<["
"""What an empty think block can begin with."""
_PREFILL = re.compile(
    r"\s*(?:(?:</?[\w:]*(?:think|thinking|thought|reasoning)>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>"
    r"|<\|channel>thought|<channel\|>)\s*)*\Z"
)


class Controls:
    """The control tokens of one tokenizer and template."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = tuple(sorted({token for token in tokens if token.strip()}, key=lambda t: (-len(t), t)))
        self._regex = re.compile("|".join(map(re.escape, self.tokens)) or r"(?!)")
        self._heads = _heads(self.tokens)
        self._head_bytes = tuple(head.encode("utf-8", "surrogatepass") for head in self._heads)
        self._after_space = re.compile(rf"\s*({self._regex.pattern})")
        self._last = frozenset(token[-1] for token in self.tokens)
        self._by_length = _by_length(self.tokens)
        ambiguous = {
            token[-length:]
            for token in self.tokens
            for length, others in self._by_length
            if length < len(token) and token[-length:] in others
        }
        self._unambiguous = frozenset(self.tokens) - ambiguous

    def may_stand_in(self, data: bytes) -> bool:
        """False where no string in `data`, in UTF-8, holds a control token."""
        return any(map(data.__contains__, self._head_bytes))

    def find(self, text: str) -> str | None:
        """The first control token that stands in `text`."""
        for head in self._heads:
            if head in text:
                match = self._regex.search(text)
                return match[0] if match else None
        return None

    def positions(self, text: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """(start, end) of each control token in a part of `text`."""
        for match in self._regex.finditer(text, start, len(text) if stop is None else stop):
            yield match.span()

    def ends_plainly(self, text: str, start: int, end: int) -> bool:
        """Whether neither a control token nor white space ends at `end`; also true of an empty text."""
        if end <= start:
            return True
        character = text[end - 1]
        if character.isspace():
            return False
        return character not in self._last or self.ending_at(text, start, end) is None

    def is_unambiguous(self, token: str) -> bool:
        """No other control token ends like this one."""
        return token in self._unambiguous

    def ending_at(self, text: str, start: int, end: int) -> str | None:
        """The longest control token that ends at `end` and lies in [start, end)."""
        if end <= start or text[end - 1] not in self._last:
            return None
        # By length, since a tokenizer may have thousands of them.
        for length, tokens in self._by_length:
            if end - length >= start and text[end - length : end] in tokens:
                return text[end - length : end]
        return None

    def next_after(self, text: str, position: int) -> tuple[int, int] | None:
        """The control token at `position`, white space apart."""
        match = self._after_space.match(text, position)
        return match.span(1) if match else None

    def find_in(self, value: Any) -> str | None:
        """The first control token in any string, key or value, of a JSON value."""
        if type(value) is str:
            return self.find(value)
        if type(value) is dict:
            return next((f for k, v in value.items() if (f := self.find(k) or self.find_in(v))), None)
        if type(value) is list:
            return next((found for item in value if (found := self.find_in(item))), None)
        return None


def _by_length(tokens: Iterable[str]) -> list[tuple[int, frozenset[str]]]:
    """Those of each length, the longest first."""
    found: dict[int, set[str]] = {}
    for token in tokens:
        found.setdefault(len(token), set()).add(token)
    return [(length, frozenset(found[length])) for length in sorted(found, reverse=True)]


def is_structure(token: str) -> bool:
    """True for what stands inside a turn (a tool call, reasoning), whatever its name ends with."""
    return _STRUCTURE.search(token) is not None


def after_empty_reasoning(text: str, start: int, end: int) -> int:
    """Where the text goes on after an empty think block that stands at `start`, else `start`."""
    match = _EMPTY_REASONING.match(text, start, end)
    return match.end() if match else start


def is_prefill(text: str) -> bool:
    """True for what templates put behind the role header to begin, or to skip, the reasoning."""
    return _PREFILL.match(text) is not None


def _heads(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """A few strings, one of which begins every token: the longest that are few."""
    for most, length in ((2, 4), (2, 3), (4, 2), (8, 3), (16, 2)):
        heads = {token[:length] for token in tokens}
        if len(heads) <= most:
            return tuple(sorted(heads))
    return tuple(sorted({token[:1] for token in tokens}))
