"""What is wrong with one row: raised while a row is read, and turned into its reject."""

from __future__ import annotations

from typing import Any

from packsvc.types import Reason

_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


class RowFault(Exception):
    """This row cannot become an example."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def wrong_type(where: str, wanted: str, value: Any) -> RowFault:
    """`where` must be `wanted`, and is missing (None) or of another type."""
    return RowFault(
        Reason.WRONG_TYPE, f"{where} is missing" if value is None else f"{where} must be {wanted}, not {kind(value)}"
    )


def kind(value: Any) -> str:
    """The JSON type of a value, in words."""
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
