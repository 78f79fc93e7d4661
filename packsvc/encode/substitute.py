"""Exact places of content in a render: render again with stand-ins, and lay the two texts over each other.

A stand-in is a noncharacter with a number; everything between stand-ins must be equal in both renders, and what
stands in the place of each must be the text it stood for, as it is, trimmed, or with JSON's escapes. If the texts
cannot be laid over each other, the place is not known, and nothing is guessed.

Price: one more render of the conversation; used only for rows with part weights, trained messages of other roles or
control tokens typed as text.
"""

from __future__ import annotations

import json
import re

_FRAME = "\ufdd4"
_STAND_IN = re.compile(f"{_FRAME}([0-9]+){_FRAME}")


def stand_in(number: int) -> str:
    """The text that takes the place of text `number`."""
    return f"{_FRAME}{number}{_FRAME}"


def holds_frame(text: str) -> bool:
    """Whether stand-ins cannot be used, since the text holds what they are made of."""
    return _FRAME in text


def lay_over(skeleton: str, text: str, originals: list[str], *, exact: bool = False) -> list[tuple[int, int]] | None:
    """Places in `text` of the originals, in the order in which they are written; [(start, end)] for each stand-in.

    Args:
        skeleton: The render with stand-ins.
        originals: What stand-in number k stood for.
        exact: Accept the originals only as they are.

    Returns:
        One range for each stand-in of the skeleton, by position in the text; None where the texts do not agree.
    """
    pieces = _STAND_IN.split(skeleton)
    fixed, numbers = pieces[0::2], [int(n) for n in pieces[1::2]]
    if any(n >= len(originals) for n in numbers) or not text.startswith(fixed[0]) or len(text) < len(fixed[0]):
        return None
    if not numbers:
        return [] if text == skeleton else None
    forms = [[original] if exact else _forms(original) for original in originals]
    starts = [len(fixed[0])]
    tried = [0]
    while starts:  # one level a stand-in; a form that leads nowhere is taken back
        level = len(starts) - 1
        if level == len(numbers):
            ends = [starts[k + 1] - len(fixed[k + 1]) for k in range(level)]
            return list(zip(starts[:-1], ends, strict=True))
        choices = forms[numbers[level]]
        if tried[level] == len(choices):
            starts.pop()
            tried.pop()
            continue
        form = choices[tried[level]]
        tried[level] += 1
        stop, after = starts[level] + len(form), fixed[level + 1]
        goes_on = text.startswith(form, starts[level]) and text.startswith(after, stop)
        if goes_on and (level + 1 < len(numbers) or stop + len(after) == len(text)):
            starts.append(stop + len(after))
            tried.append(0)
    return None


def _forms(text: str) -> list[str]:
    shapes = [text, text.strip(), text.lstrip(), text.rstrip()]
    escaped = [json.dumps(s, ensure_ascii=e)[1:-1] for s in shapes for e in (False, True)]
    return list(dict.fromkeys([*shapes, *escaped]))
