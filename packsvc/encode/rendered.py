"""What rendering hands on: the text of a conversation, and which characters of it are learned."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from packsvc.types import Reason


class RowRefused(Exception):
    """A conversation that cannot be rendered, or masked, exactly; it becomes a reject."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def kept(self) -> RowRefused:
        """Itself, without the frames that it came through: those hold a whole batch of rows, and would with it."""
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


class Span(NamedTuple):
    """Characters [start, end) of the text that the loss covers."""

    start: int
    end: int
    weight: float
    """Above 0, at most 1."""
    message: int
    """Which message they belong to; -1 for text that none of them wrote (`train_on: all`)."""


class Rendered(NamedTuple):
    """One conversation as the template writes it."""

    text: str
    spans: tuple[Span, ...]
    """In order and disjoint; neighbours of one weight and message are one span."""
    typed_controls: tuple[tuple[int, int], ...] = ()
    """Characters of control tokens that a person typed, to be encoded as text (`control_tokens: encode_as_text`)."""
    reasoning_dropped: int = 0
    """Trained turns without loss, since the template leaves their reasoning out."""
    turns_without_stop: int = 0
    """Trained turns that nothing ends."""
    regions: tuple[tuple[int, int, int], ...] = ()
    """(message, start, end) of each run of characters that one message wrote, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What the audit of a template found; the same for every row of a job and written into the plan."""

    arguments: str = "verbatim"
    """How tool call arguments reach the template: verbatim, parsed (into objects) or string."""
    parts: str = "verbatim"
    """How content that is a list of text parts does: verbatim, or joined into one string."""
    stops: tuple[str, ...] = ()
    """Texts of the tokens on which trained turns end."""
    next_marker_stops: bool = False
    """Turns have no end of their own; the next role marker is the stop and is trained."""
    reasoning: str = "unknown"
    """known: the template renders reasoning of the last turn; unknown: it knows none."""
    drops_earlier_reasoning: bool = False
    content_findings: tuple[str, ...] = ()
    """What the template leaves out of its render; rows with such content are rejected as text_missing."""

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Decisions:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
        return cls(**fields)
