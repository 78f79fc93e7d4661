"""One conversation on its way through rendering."""

from __future__ import annotations

from typing import Any

from packsvc.encode.template import Marked
from packsvc.types import JsonDict

Range = tuple[int, int]


class Row:
    """A conversation as the template saw it, and its render."""

    __slots__ = ("_runs", "hulls", "messages", "regions", "text", "tools")

    def __init__(self, messages: list[JsonDict], tools: Any, marked: Marked) -> None:
        self.messages = messages
        self.tools = tools
        self.text = marked.text
        self.regions = marked.regions
        self.hulls: list[Range | None] = [None] * len(messages)
        """For each message the characters from its first to its last, None where it wrote none."""
        self._runs: dict[int, list[Range]] = {}
        hulls = self.hulls
        for message, start, end in marked.regions:
            before = hulls[message]
            if before is None:
                hulls[message] = (start, end)
            else:
                hulls[message] = (before[0], end)
                self._runs.setdefault(message, [before]).append((start, end))

    def is_split(self, index: int) -> bool:
        """Whether other text stands among what a message wrote."""
        return index in self._runs

    def runs(self, index: int) -> list[Range]:
        """The runs of characters that a message wrote; usually one."""
        runs = self._runs.get(index)
        if runs is not None:
            return runs
        hull = self.hulls[index]
        return [] if hull is None else [hull]
