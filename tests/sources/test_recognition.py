"""Formats recognised, with the reason, or refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from packsvc.config import Format
from packsvc.errors import SourceError
from packsvc.sources import Reading, recognise
from packsvc.types import RawRow
from tests.sources.inputs import chat, row, source

SHAREGPT = {"conversations": [{"from": "human", "value": "q"}]}


def found(*records: Any, **values: Any) -> Reading:
    return recognise([row(record, n) for n, record in enumerate(records)], source(**values))


@pytest.mark.parametrize(
    ("record", "format", "why"),
    [
        (chat(), "messages", "rows have `messages` with role/content"),
        (chat(text="x", prompt="y", completion="z"), "messages", "rows have `messages` with role/content"),
        ({"conversations": chat()["messages"]}, "messages", "rows have `conversations` with role/content"),
        (SHAREGPT, "sharegpt", "rows have `conversations` with from/value"),
        (
            {"instruction": "q", "input": "", "output": "a", "text": "all"},
            "alpaca",
            "rows have `instruction` and `output`",
        ),
        ({"prompt": "q", "completion": "a"}, "prompt_completion", "rows have `prompt` and `completion`"),
        ({"text": "x"}, "text", "rows have `text` and no conversation"),
        ({"input_ids": [1], "labels": [1], "text": "x"}, "pretokenized", "rows have `input_ids` and `labels`"),
        ({"messages": '[{"role": "user", "content": "q"}]'}, "messages", "rows have `messages` with role/content"),
    ],
)
def test_each_format_is_recognised_with_its_reason(record: Any, format: str, why: str) -> None:
    reading = found(record)
    assert (reading.format.value, reading.why) == (format, why)


def test_columns_of_the_job_are_looked_at() -> None:
    reading = found({"q": "x", "a": "y"}, columns={"prompt": "q", "completion": "a"})
    assert (reading.format, reading.columns) == (Format.PROMPT_COMPLETION, {"prompt": "q", "completion": "a"})
    reading = found({"dialog": SHAREGPT["conversations"]}, columns={"messages": "dialog"})
    assert (reading.format, reading.columns) == (Format.SHAREGPT, {"messages": "dialog"})
    assert found({"dialog": SHAREGPT["conversations"]}, columns={"conversations": "dialog"}) == reading


def test_rows_that_say_nothing_do_not_hinder() -> None:
    bad = RawRow(file=0, row=0, raw="{", error="cut")
    assert recognise([bad, row({}), row([]), row({"messages": []}), row(chat())], source()).format is Format.MESSAGES


def test_mixed_rows_are_refused_with_what_was_seen() -> None:
    with pytest.raises(
        SourceError, match=r"several kinds: .*sharegpt \(1 rows\).*messages \(1 rows\).* source of its own"
    ):
        found(SHAREGPT, chat())


def test_what_is_not_recognised_lists_the_columns_and_what_to_write() -> None:
    with pytest.raises(SourceError, match=r"columns seen: question, answer, id; write `format:`.*`columns:`"):
        found({"question": "q", "answer": "a"}, {"question": "q", "id": 1})
    with pytest.raises(SourceError, match="preference pairs"):
        found({"chosen": [], "rejected": []})
    with pytest.raises(SourceError, match="rows are not objects"):
        found([1], 2)
    broken = [RawRow(file=0, row=4, raw="{", error="cut")]
    with pytest.raises(SourceError, match=r"none of the first 1 rows can be read \(row 4: cut\)"):
        recognise(broken, source())


def test_rows_whose_messages_hold_nothing_are_read_and_rejected_one_by_one() -> None:
    reading = found({"messages": []}, {"messages": None}, {"messages": "x", "id": 1})
    assert (reading.format, reading.columns) == (Format.MESSAGES, {"messages": "messages"})


def test_a_field_that_is_not_ours_is_refused() -> None:
    with pytest.raises(SourceError, match="'message' is no field of ours; known: messages"):
        found(chat(), columns={"message": "x"})


def test_a_named_format_is_taken_and_its_column_looked_for() -> None:
    reading = found({"conversation": SHAREGPT["conversations"]}, format=Format.SHAREGPT)
    assert (reading.format, reading.columns, reading.why) == (
        Format.SHAREGPT,
        {"messages": "conversation"},
        "the job says so",
    )
    assert found({"x": 1}, format=Format.MESSAGES).columns == {"messages": "messages"}
    assert found(format=Format.TEXT).format is Format.TEXT


def test_no_rows_are_no_error() -> None:
    assert found().why == "there is no row to look at"
