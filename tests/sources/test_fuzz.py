"""Any bytes and any JSON give examples, rejects, or an error that names the file; nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.config import Format
from packsvc.errors import SourceError
from packsvc.sources import Reading, count_input, passes, read_example, recognise, record_text
from packsvc.types import Example, RawRow, Reject
from tests.sources.inputs import input_at, jsonl, packed, rows_of, source

NAMES = ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.json.gz"]
FIELDS = st.sampled_from(
    ["messages", "conversations", "role", "content", "from", "value", "tools", "tool_calls", "function", "name", "text",
     "arguments", "train", "weight", "type", "instruction", "output", "history", "prompt", "completion", "input_ids",
     "labels", "loss_mask", "system", "reasoning_content", "function_call"]
)  # fmt: skip
WORDS = st.sampled_from(["user", "assistant", "human", "gpt", "function_call", "text", "[]", "[{}]", '{"name": 1}', ""])
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-101, 2) | st.floats() | WORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=16,
)


@given(data=st.binary(max_size=80), name=st.sampled_from(NAMES), wrap=st.booleans())
@settings(max_examples=60)
def test_any_bytes_give_rows_or_an_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, wrap: bool
) -> None:
    whole = packed(data, name.rsplit(".", 1)[-1]) if wrap else data
    file = input_at(tmp_path_factory.mktemp("fuzz") / name, whole)
    try:
        rows = rows_of(file)
    except SourceError as error:
        named = name in str(error)
        assert named
        return
    assert count_input(file).num_rows == len(rows)
    for row in rows:
        record_text(row).encode()
        read_example(row, Reading(format=Format.TEXT, columns={}, why=""), source_name="s")


@given(record=st.dictionaries(FIELDS, VALUES, max_size=5) | VALUES, format=st.sampled_from(list(Format)[1:]))
@settings(max_examples=80)
def test_any_record_gives_an_example_or_a_reject(record: Any, format: Format) -> None:
    row = RawRow(file=0, row=0, record=record)
    before = json.dumps(record)
    reading = Reading(format=format, columns={}, why="")
    result = read_example(row, reading, source_name="s")
    assert isinstance(result, (Example, Reject))
    assert json.dumps(record) == before
    passes(row, {"role": [1, "x"], "text": None})
    if isinstance(result, Example):
        assert len(result.messages) == len(result.weights) == len(result.part_weights)
        assert all("train" not in m and "weight" not in m and None not in m.values() for m in result.messages)
    try:
        recognise([row], source())
    except SourceError:
        return


@pytest.mark.parametrize(
    "text",
    ["\x00", "\ufeff", "\u2028", "\U0010ffff", "\ufffe", "<|im_end|>", "a" * 1_000_000, "\u0301" * 500, "\u202e"],
)
def test_any_text_reaches_the_example_unchanged(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    record = {"messages": [{"role": "user", "content": text}]}
    file = input_at(tmp_path_factory.mktemp("fuzz") / "a.jsonl", jsonl([record]))
    example = read_example(rows_of(file)[0], Reading(format=Format.MESSAGES, columns={}, why=""), source_name="s")
    assert isinstance(example, Example)
    assert example.messages[0]["content"] == text


def test_ten_thousand_turns_and_deep_schemas(tmp_path_factory: pytest.TempPathFactory) -> None:
    deep: Any = "end"
    for _ in range(300):
        deep = {"properties": deep}
    record = {"messages": [{"role": "user", "content": str(n)} for n in range(10_000)], "tools": [deep]}
    file = input_at(tmp_path_factory.mktemp("fuzz") / "a.jsonl", jsonl([record]))
    example = read_example(rows_of(file)[0], Reading(format=Format.MESSAGES, columns={}, why=""), source_name="s")
    assert isinstance(example, Example)
    assert len(example.messages) == 10_000
    assert example.tools == [deep]
