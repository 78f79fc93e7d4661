"""Characters that one cannot see, or that would act on a terminal, made visible."""

from __future__ import annotations

import unicodedata

NEWLINE = "\u21b5"
_NAMED = {"\t": "\u21e5\t", "\r": "\\r", "\x00": "\\0", "\x1b": "\\e"}


def visible(text: str) -> str:
    r"""Newlines as an arrow and a newline, tabs likewise; other invisible characters by their escapes.

    Data may hold terminal sequences, and marks that turn the direction of text around; neither acts here.

    >>> visible("a\nb\x1b[31m\u202e")
    'a↵\nb\\e[31m\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(_shown(c) for c in text)


def _shown(character: str) -> str:
    if character == "\n":
        return NEWLINE + "\n"
    if character in _NAMED:
        return _NAMED[character]
    # Format characters join letters and emoji (ZWNJ, ZWJ): these two stay as they are.
    category = unicodedata.category(character)
    if character.isprintable() or character in "\u200c\u200d" or category == "Zs":
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
