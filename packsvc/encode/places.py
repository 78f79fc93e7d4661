"""Exact places of content in a render, for rows that ask for more than whole turns.

Found by rendering once more with stand-ins (`substitute.py`): control tokens that people typed, the first character
of a content, the parts of a content, and whether a content is shown at all.
"""

from __future__ import annotations

from typing import Any

from packsvc.encode.controls import Controls
from packsvc.encode.messages import prepare_messages
from packsvc.encode.rendered import Decisions, RowRefused
from packsvc.encode.row import Range, Row
from packsvc.encode.substitute import holds_frame, lay_over, stand_in
from packsvc.encode.template import ClockAskedError, TurnTemplate
from packsvc.types import JsonDict, Reason


class Places:
    """Finds content in the renders of one template."""

    def __init__(self, template: TurnTemplate, controls: Controls, decisions: Decisions) -> None:
        self._template = template
        self._controls = controls
        self._decisions = decisions

    def typed_controls(self, row: Row) -> tuple[Range, ...]:
        """Characters of the control tokens that stand in the row's own strings.

        Raises:
            RowRefused: The template does not render one of them as it stands.
        """
        originals: list[str] = []

        def swap(value: Any) -> Any:
            if type(value) is str and self._controls.find(value) is not None:
                pieces, last = [], 0
                for start, stop in self._controls.positions(value):
                    pieces += [value[last:start], stand_in(len(originals))]
                    originals.append(value[start:stop])
                    last = stop
                return "".join([*pieces, value[last:]])
            if type(value) is dict:
                return {swap(k): swap(v) for k, v in value.items()}
            if type(value) is list:
                return [swap(item) for item in value]
            return value

        swapped = [{k: swap(v) for k, v in message.items()} for message in row.messages]
        found = self._lay_over(row, swapped, swap(row.tools), originals, exact=True)
        if found is None:
            raise RowRefused(
                Reason.CONTROL_TOKENS, "control tokens are typed where the template does not render them as they stand"
            )
        return tuple(found)

    def is_shown(self, messages: list[JsonDict], tools: Any, index: int) -> bool:
        """Whether the content of a message appears in the render at all."""
        swapped = [{**m, "content": stand_in(0)} if i == index else m for i, m in enumerate(messages)]
        skeleton = self._render(swapped, tools)
        return skeleton is not None and stand_in(0) in skeleton

    def content(self, row: Row, index: int) -> Range | None:
        """The content of a message, from its first character to its last; None where that cannot be told."""
        content = row.messages[index].get("content")
        if type(content) is list:
            content = "".join(part.get("text") or "" for part in content if type(part) is dict)
        if type(content) is not str or not content.strip():
            return None
        swapped = [{**m, "content": stand_in(0)} if i == index else m for i, m in enumerate(row.messages)]
        found = self._lay_over(row, swapped, row.tools, [content])
        return found[0] if found is not None and len(found) == 1 else None

    def parts(self, row: Row, index: int, message: JsonDict) -> dict[int, Range] | None:
        """Characters of each text part that is not empty, by number; None where that cannot be told.

        Args:
            message: The message with its list of parts, as it came.
        """
        content = message.get("content")
        if type(content) is not list:
            return None
        filled: list[Any] = []
        numbers: list[int] = []
        originals: list[str] = []
        for number, part in enumerate(content):
            text = part.get("text") if type(part) is dict else part
            if type(text) is str and text:
                place = stand_in(len(originals))
                part = {**part, "text": place} if type(part) is dict else place
                numbers.append(number)
                originals.append(text)
            filled.append(part)
        swapped = list(row.messages)
        swapped[index] = prepare_messages([{**message, "content": filled}], self._decisions)[0]
        found = self._lay_over(row, swapped, row.tools, originals)
        if found is None or len(found) != len(originals):
            return None
        return dict(zip(numbers, found, strict=True))

    def _lay_over(
        self, row: Row, messages: list[JsonDict], tools: Any, originals: list[str], *, exact: bool = False
    ) -> list[Range] | None:
        if holds_frame(row.text):
            return None
        skeleton = self._render(messages, tools)
        return None if skeleton is None else lay_over(skeleton, row.text, originals, exact=exact)

    def _render(self, messages: list[JsonDict], tools: Any) -> str | None:
        try:
            return self._template.plain(messages, tools)
        except ClockAskedError:
            raise
        except Exception:  # foreign code: it does not take the stand-ins
            return None
