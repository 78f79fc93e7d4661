"""One record seen through the columns of a job: our field names, their column names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packsvc.sources.faults import wrong_type
from packsvc.sources.messages import parsed

KNOWN_FIELDS = (
    "messages",
    "conversations",
    "tools",
    "system",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "text",
    "input_ids",
    "loss_mask",
    "labels",
)


class Fields:
    """A record by our names."""

    def __init__(self, record: Mapping[str, Any], columns: Mapping[str, str]) -> None:
        self._record = record
        self.columns = columns

    def name(self, field: str) -> str:
        """The column that holds a field."""
        return self.columns.get(field, field)

    def get(self, field: str) -> Any:
        """Its value; None where it is missing or null."""
        return self._record.get(self.name(field))

    def text(self, field: str) -> str:
        """A string that must be there."""
        value = self.get(field)
        if not isinstance(value, str):
            raise wrong_type(self.name(field), "a string", value)
        return value

    def optional_text(self, field: str) -> str | None:
        """A string, or None where there is none."""
        return None if self.get(field) is None else self.text(field)

    def listed(self, field: str) -> list[Any]:
        """A list that must be there, or a JSON string of one."""
        value = self.get(field)
        if isinstance(value, str):
            value = parsed(value, self.name(field))
        if not isinstance(value, list):
            raise wrong_type(self.name(field), "a list", value)
        return value
