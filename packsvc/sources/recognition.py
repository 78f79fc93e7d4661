"""What the rows of a source are: recognised by looking at some of them, with the reason in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packsvc.config import Format, Source
from packsvc.errors import SourceError
from packsvc.sources.fields import KNOWN_FIELDS
from packsvc.sources.parsing import NotJson, parse_json
from packsvc.types import RawRow

LOOKED_AT = 100
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "dialogue", "chat")
_WHAT_TO_WRITE = (
    "write `format:` (messages, sharegpt, alpaca, prompt_completion, text or pretokenized) and, where columns have "
    "other names, `columns:` (our field: their column, e.g. prompt: question) into this source of the job"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the rows of a source become examples."""

    format: Format
    """Never `auto`."""
    columns: dict[str, str]
    """Our field: their column, for those that differ and for the column of a conversation."""
    why: str
    """For people: how this was found."""


@dataclass(frozen=True, slots=True)
class _Vote:
    format: Format
    column: str | None
    why: str


def recognise(rows: Sequence[RawRow], source: Source) -> Reading:
    """Settle the format of a source; `auto` is decided by up to a hundred rows.

    Raises:
        SourceError: The rows are of no known format, or of several; it lists the columns seen.
    """
    unknown = sorted(set(source.columns) - set(KNOWN_FIELDS))
    if unknown:
        known = ", ".join(KNOWN_FIELDS)
        raise SourceError(f"source {source.name!r}: columns: {unknown[0]!r} is no field of ours; known: {known}")
    columns = dict(source.columns)
    if "conversations" in columns:
        columns.setdefault("messages", columns.pop("conversations"))
    records = [row.record for row in rows[:LOOKED_AT] if isinstance(row.record, dict)]
    if source.format is not Format.AUTO:
        return _named(source.format, records, columns)
    votes = Counter(filter(None, (_vote(record, columns) for record in records)))
    if not rows:
        return Reading(format=Format.MESSAGES, columns=columns, why="there is no row to look at")
    column = columns.get("messages", "messages")
    if not votes and any(column in record for record in records):
        why = f"rows have `{column}`, though none of those looked at holds a conversation"
        return Reading(format=Format.MESSAGES, columns={**columns, "messages": column}, why=why)
    if not votes:
        raise SourceError(f"source {source.name!r}: {_nothing(rows, records)}; {_WHAT_TO_WRITE}")
    if len({(vote.format, vote.column) for vote in votes}) > 1:
        seen = "; ".join(f"{vote.why}: {vote.format} ({n} rows)" for vote, n in votes.most_common())
        raise SourceError(f"source {source.name!r}: rows of several kinds: {seen}. Give each kind a source of its own")
    vote = next(iter(votes))
    if vote.column is not None:
        columns["messages"] = vote.column
    return Reading(format=vote.format, columns=columns, why=vote.why)


def _named(format: Format, records: Sequence[Mapping[str, Any]], columns: dict[str, str]) -> Reading:
    """The format that the job names; the column of a conversation is looked for where it is not named."""
    if format in (Format.MESSAGES, Format.SHAREGPT) and "messages" not in columns:
        usual = "messages" if format is Format.MESSAGES else "conversations"
        order = (usual, *CONVERSATION_COLUMNS)
        columns["messages"] = next((c for c in order if any(r.get(c) is not None for r in records)), usual)
    return Reading(format=format, columns=columns, why="the job says so")


def _vote(record: Mapping[str, Any], columns: Mapping[str, str]) -> _Vote | None:
    def has(field: str) -> bool:
        return record.get(columns.get(field, field)) is not None

    def name(*fields: str) -> str:
        return " and ".join(f"`{columns.get(field, field)}`" for field in fields)

    if has("input_ids") and (has("loss_mask") or has("labels")):
        mask = "loss_mask" if has("loss_mask") else "labels"
        return _Vote(Format.PRETOKENIZED, None, f"rows have {name('input_ids', mask)}")
    candidates = (columns["messages"],) if "messages" in columns else CONVERSATION_COLUMNS
    for column in candidates:
        vote = _conversation(record.get(column), column)
        if vote is not None:
            return vote
    if has("instruction") and has("output"):
        return _Vote(Format.ALPACA, None, f"rows have {name('instruction', 'output')}")
    if has("prompt") and has("completion"):
        return _Vote(Format.PROMPT_COMPLETION, None, f"rows have {name('prompt', 'completion')}")
    if isinstance(record.get(columns.get("text", "text")), str):
        return _Vote(Format.TEXT, None, f"rows have {name('text')} and no conversation")
    return None


def _conversation(value: Any, column: str) -> _Vote | None:
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = parse_json(value.encode("utf-8", "replace"))
        except NotJson:
            return None
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return None
    turn = {key for key, item in value[0].items() if item is not None}
    if "role" in turn and not turn & {"from", "value"}:
        return _Vote(Format.MESSAGES, column, f"rows have `{column}` with role/content")
    if turn & {"from", "role", "speaker"}:
        keys = [next((k for k in ("from", "role", "speaker") if k in turn), "from")]
        keys.append(next((k for k in ("value", "content", "text") if k in turn), "value"))
        return _Vote(Format.SHAREGPT, column, f"rows have `{column}` with {'/'.join(keys)}")
    return None


def _nothing(rows: Sequence[RawRow], records: Sequence[Mapping[str, Any]]) -> str:
    if records:
        seen = list(dict.fromkeys(column for record in records for column in record))
        if {"chosen", "rejected"} <= set(seen):
            return "preference pairs (chosen/rejected) are not instruction data; make a column of messages of them"
        return f"the format is not recognised; columns seen: {', '.join(seen) or 'none'}"
    bad = next((row for row in rows if row.error is not None), None)
    if bad is not None:
        return f"none of the first {len(rows)} rows can be read (row {bad.row}: {bad.error})"
    return "rows are not objects"
