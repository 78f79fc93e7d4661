"""Why each token of an example is learned or not, in words, for `show --why` and `--dry-run`.

For people, one example at a time: it takes the slow way and looks at who wrote each character.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from packsvc.config import PackJob, TrainOn
from packsvc.encode.as_text import OffsetIds
from packsvc.encode.rendered import Rendered, Span
from packsvc.encode.segments import Segment
from packsvc.encode.units import Unit


class TokenNote(NamedTuple):
    """One token of an example."""

    id: int
    text: str
    weight: float
    """How much it counts in the loss; 0 is not trained."""
    why: str
    """trained, prompt, generation prompt, across the start, after stop, weight 0, reasoning dropped,
    not the last answer, or first token."""


def note_ready(segment: Segment, backend: Any) -> list[TokenNote]:
    """Notes on raw text or ready-made ids, where a mask is all there is to tell."""
    notes: list[TokenNote] = []
    for index, (token, learned) in enumerate(zip(segment.ids.tolist(), segment.mask.tolist(), strict=True)):
        why = "trained" if learned else "first token" if index == 0 else "prompt"
        notes.append(TokenNote(token, _alone(token, backend), float(learned), why))
    return notes


def note_chat(
    tokens: OffsetIds, rendered: Rendered, *, weights: Sequence[float], unit: Unit, job: PackJob, backend: Any
) -> list[TokenNote]:
    """Notes on a rendered conversation.

    Args:
        weights: Of each token, by the spans.
    """
    reader = _Reader(rendered, unit, job)
    notes: list[TokenNote] = []
    for index, (token, (start, stop)) in enumerate(zip(tokens.ids, tokens.offsets, strict=True)):
        shared = (index > 0 and tokens.offsets[index - 1][1] > start) or (
            index + 1 < len(tokens.offsets) and tokens.offsets[index + 1][0] < stop
        )
        text = _alone(token, backend) if shared or start == stop else rendered.text[start:stop]
        if index == 0 and weights[index] > 0:
            notes.append(TokenNote(token, text, 0.0, "first token"))
        elif weights[index] > 0:
            notes.append(TokenNote(token, text, weights[index], "trained"))
        else:
            notes.append(TokenNote(token, text, 0.0, reader.why(start, stop)))
    return notes


class _Reader:
    """Tells why characters that are not trained are not."""

    def __init__(self, rendered: Rendered, unit: Unit, job: PackJob) -> None:
        self._regions = rendered.regions
        self._starts = [region[1] for region in rendered.regions]
        self._unit = unit
        self._last_only = job.train_on is TrainOn.LAST_ASSISTANT
        roles = [message.get("role") for message in unit.messages]
        self._last = max((i for i, role in enumerate(roles) if role == "assistant"), default=-1)
        self._spans: dict[int, list[Span]] = {}
        for span in rendered.spans:
            self._spans.setdefault(span.message, []).append(span)

    def why(self, start: int, stop: int) -> str:
        place = bisect_right(self._starts, start) - 1
        if place < 0 or start >= self._regions[place][2]:
            return "prompt"
        message = self._regions[place][0]
        if self._unit.messages[message].get("role") != "assistant":
            return "prompt"
        spans = self._spans.get(message)
        if spans is None:
            return self._why_not_at_all(message)
        if start < spans[0].start:
            return "across the start" if stop > spans[0].start else "generation prompt"
        return "after stop" if start >= spans[-1].end else "weight 0"

    def _why_not_at_all(self, message: int) -> str:
        weights = self._unit.weights
        said = weights[message] if message < len(weights) else None
        if said == 0:
            return "weight 0"
        if said is None and self._last_only and message != self._last:
            return "not the last answer"
        return "reasoning dropped"


def _alone(token: int, backend: Any) -> str:
    """A token's own text; bytes that are no text by themselves are written out."""
    text = str(backend.decode([token], skip_special_tokens=False))
    if "\ufffd" not in text:
        return text
    return str(backend.id_to_token(token) or text)
