"""From a raw row to an example in canonical form, or to a reject with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.config import Format
from packsvc.sources.faults import RowFault, kind
from packsvc.sources.fields import Fields
from packsvc.sources.forms import from_alpaca, from_messages, from_prompt_completion, from_sharegpt
from packsvc.sources.messages import canonical, tool_schemas
from packsvc.sources.recognition import Reading
from packsvc.types import Example, ExampleKind, RawRow, Reason, Reject

_TO_MESSAGES = {
    Format.MESSAGES: from_messages,
    Format.SHAREGPT: from_sharegpt,
    Format.ALPACA: from_alpaca,
    Format.PROMPT_COMPLETION: from_prompt_completion,
}


def read_example(row: RawRow, reading: Reading, *, source_name: str) -> Example | Reject:
    """One row as an example; whatever is wrong with it becomes a reject that names the field."""
    try:
        if row.error is not None:
            raise RowFault(row.error_reason, row.error)
        if not isinstance(row.record, dict):
            raise RowFault(Reason.WRONG_TYPE, f"a row must be an object, not {kind(row.record)}")
        return _READERS[reading.format](row, Fields(row.record, reading.columns))
    except RowFault as fault:
        reason, detail = fault.reason, fault.detail
    except RecursionError:
        reason, detail = Reason.INVALID_JSON, "nested too deeply"
    return Reject(
        file=row.file,
        row=row.row,
        part=None,
        source=source_name,
        reason=reason,
        detail=detail,
        record=record_text(row),
    )


def record_text(row: RawRow) -> str:
    """What a reject keeps of a row: the text as read, else the record as JSON. Always text that can be written."""
    text = row.raw
    if text is None:
        try:
            text = json.dumps(row.record, ensure_ascii=False, default=repr)
        except (RecursionError, TypeError, ValueError):
            text = "(a record that cannot be written as JSON)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _chat(to_messages: Callable[[Fields], list[Any]], row: RawRow, fields: Fields) -> Example:
    name = fields.name("messages") if "messages" in fields.columns else "messages"
    talk = canonical(to_messages(fields), where=name)
    return Example(
        file=row.file,
        row=row.row,
        kind=ExampleKind.CHAT,
        messages=talk.messages,
        tools=tool_schemas(fields.get("tools"), where=fields.name("tools")),
        weights=talk.weights,
        part_weights=talk.part_weights,
        raw=row,
    )


def _text(row: RawRow, fields: Fields) -> Example:
    text = fields.text("text")
    if not text:
        raise RowFault(Reason.EMPTY, f"{fields.name('text')} is empty")
    return Example(file=row.file, row=row.row, kind=ExampleKind.TEXT, text=text, raw=row)


def _pretokenized(row: RawRow, fields: Fields) -> Example:
    ids = _integers(fields, "input_ids", low=0)
    if len(ids) == 0:
        raise RowFault(Reason.EMPTY, f"{fields.name('input_ids')} is empty")
    mask = _loss_mask(fields, ids)
    return Example(
        file=row.file,
        row=row.row,
        kind=ExampleKind.PRETOKENIZED,
        input_ids=ids.astype(np.int32),
        loss_mask=mask,
        raw=row,
    )


def _loss_mask(fields: Fields, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    masks: list[tuple[str, NDArray[np.bool_]]] = []
    if fields.get("loss_mask") is not None:
        flags = _integers(fields, "loss_mask", low=0, high=1, booleans=True)
        masks.append((fields.name("loss_mask"), flags.astype(np.bool_)))
    if fields.get("labels") is not None:
        labels = _integers(fields, "labels", low=-100)
        if len(labels) == len(ids) and not np.array_equal(labels[labels != -100], ids[labels != -100]):
            detail = (
                f"{fields.name('labels')} differ from {fields.name('input_ids')} where they are not -100 (shifted?)"
            )
            raise RowFault(Reason.WRONG_TYPE, detail)
        masks.append((fields.name("labels"), labels != -100))
    if not masks:
        raise RowFault(Reason.WRONG_TYPE, f"neither {fields.name('loss_mask')} nor {fields.name('labels')} is there")
    for name, mask in masks:
        if len(mask) != len(ids):
            detail = f"{name} has {len(mask)} entries, {fields.name('input_ids')} has {len(ids)}"
            raise RowFault(Reason.WRONG_TYPE, detail)
    if not np.array_equal(masks[0][1], masks[-1][1]):
        raise RowFault(Reason.WRONG_TYPE, f"{masks[0][0]} and {masks[-1][0]} contradict each other")
    return masks[0][1]


def _integers(
    fields: Fields, field: str, *, low: int, high: int = 2**31 - 1, booleans: bool = False
) -> NDArray[np.int64]:
    values, name = fields.listed(field), fields.name(field)
    kinds = set(map(type, values))
    if not kinds <= ({int, bool} if booleans else {int}):
        raise RowFault(Reason.WRONG_TYPE, f"{name} must be a list of integers")
    if values and not low <= min(values) <= max(values) <= high:
        outside = min(values) if min(values) < low else max(values)
        raise RowFault(Reason.WRONG_TYPE, f"{name} holds {outside}, which is outside {low} to {high}")
    return np.asarray(values, dtype=np.int64)


_READERS: dict[Format, Callable[[RawRow, Fields], Example]] = {
    Format.TEXT: _text,
    Format.PRETOKENIZED: _pretokenized,
    **{name: partial(_chat, form) for name, form in _TO_MESSAGES.items()},
}
