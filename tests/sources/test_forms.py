"""ShareGPT, Alpaca, prompt/completion, text, pre-tokenized."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from packsvc.types import ExampleKind, RawRow, Reason
from tests.sources.inputs import bad, example_of, good, read_as

USER_AND_ASSISTANT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def sharegpt(*turns: Any, **more: Any) -> Any:
    return read_as({"conversations": list(turns), **more}, "sharegpt", messages="conversations")


def turn(who: str, text: Any) -> dict[str, Any]:
    return {"from": who, "value": text}


@pytest.mark.parametrize("human", ["human", "user", "Human"])
@pytest.mark.parametrize("model", ["gpt", "assistant", "chatgpt", "bing", "bard", "model", "GPT"])
def test_sharegpt_names_become_roles(human: str, model: str) -> None:
    assert good(sharegpt(turn(human, "q"), turn(model, "a"))).messages == USER_AND_ASSISTANT


@pytest.mark.parametrize("column", ["conversations", "conversation", "messages"])
@pytest.mark.parametrize(
    ("who", "text"), [("from", "value"), ("from", "content"), ("role", "value"), ("speaker", "text")]
)
def test_sharegpt_dialects_are_recognised(column: str, who: str, text: str) -> None:
    record = {column: [{who: "human", text: "q"}, {who: "gpt", text: "a"}]}
    assert good(example_of(record)).messages == USER_AND_ASSISTANT


def test_sharegpt_calls_and_replies_become_tool_messages() -> None:
    call = {"name": "f", "arguments": {"x": 1, "y": None}}
    example = good(
        sharegpt(
            turn("system", "s"),
            turn("human", "q"),
            turn("function_call", json.dumps(call)),
            turn("observation", "[1]"),
            turn("function_call", json.dumps([call, call])),
            turn("function_response", "2"),
            turn("gpt", "a"),
            tools='[{"name": "f"}]',
        )
    )
    assert [message["role"] for message in example.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert example.messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }
    assert len(example.messages[4]["tool_calls"]) == 2
    assert example.tools == [{"name": "f"}]


def test_sharegpt_flags_are_read() -> None:
    example = good(sharegpt(turn("human", "q"), {**turn("gpt", "a"), "weight": 0}, {**turn("gpt", "b"), "train": True}))
    assert example.weights == (None, 0.0, 1.0)


def test_the_system_column_comes_first_and_once() -> None:
    turns = [turn("human", "q"), turn("gpt", "a")]
    for record in (sharegpt(*turns, system="s"), sharegpt(turn("system", "s"), *turns, system="s")):
        assert good(record).messages == [{"role": "system", "content": "s"}, *USER_AND_ASSISTANT]
    for empty in (None, ""):
        assert good(sharegpt(*turns, system=empty)).messages == USER_AND_ASSISTANT
    assert bad(sharegpt(turn("system", "other"), *turns, system="s")).reason is Reason.WRONG_TYPE


@pytest.mark.parametrize(
    ("broken", "reason", "named"),
    [
        ("x", Reason.WRONG_TYPE, "conversations[1] must be an object"),
        ({"value": "x"}, Reason.WRONG_TYPE, "conversations[1].from is missing"),
        (turn("narrator", "x"), Reason.UNKNOWN_ROLE, "conversations[1].from is 'narrator'"),
        (turn("gpt", 3), Reason.WRONG_TYPE, "conversations[1].value must be a string"),
        (turn("function_call", "f(x)"), Reason.WRONG_TYPE, "conversations[1].value is a string that is not JSON"),
        (turn("function_call", "[1]"), Reason.WRONG_TYPE, "conversations[1].value"),
        (turn("function_call", None), Reason.WRONG_TYPE, "conversations[1].value"),
        (
            turn("function_call", '{"name": "f"}'),
            Reason.WRONG_TYPE,
            "conversations[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_in_sharegpt_is_named(broken: Any, reason: Reason, named: str) -> None:
    reject = bad(sharegpt(turn("human", "q"), broken))
    assert (reject.reason, reject.detail[: len(named)]) == (reason, named)


def test_a_sharegpt_turn_without_text_is_empty_text() -> None:
    assert good(sharegpt(turn("human", "q"), turn("gpt", None))).messages[1]["content"] == ""


def test_alpaca_has_a_blank_line_before_the_input_if_there_is_one() -> None:
    for extra in (None, "", "missing"):
        record = {"instruction": "q", "output": "a"} | ({} if extra == "missing" else {"input": extra})
        assert good(example_of(record)).messages == USER_AND_ASSISTANT
    record = {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["q0", "a0"]]}
    assert [message["content"] for message in good(example_of(record)).messages] == ["s", "q0", "a0", "q\n\ni", "a"]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"instruction": "q"}, "output is missing"),
        ({"instruction": "q", "output": 3}, "output must be a string"),
        ({"instruction": ["q"], "output": "a"}, "instruction must be a string"),
        ({"instruction": "q", "output": "a", "input": 3}, "input must be a string"),
        ({"instruction": "q", "output": "a", "history": [["x"]]}, "history[0]"),
        ({"instruction": "q", "output": "a", "history": 3}, "history[0]"),
    ],
)
def test_what_is_wrong_in_alpaca_is_named(record: Any, named: str) -> None:
    reject = bad(read_as(record, "alpaca"))
    assert (reject.reason, reject.detail[: len(named)]) == (Reason.WRONG_TYPE, named)


def test_alpaca_without_any_text_is_empty() -> None:
    assert bad(read_as({"instruction": "", "output": ""}, "alpaca")).reason is Reason.EMPTY


def test_prompt_and_completion_may_be_strings_or_messages() -> None:
    user, assistant = USER_AND_ASSISTANT
    for prompt in ("q", [user]):
        for completion in ("a", [assistant]):
            assert good(example_of({"prompt": prompt, "completion": completion})).messages == USER_AND_ASSISTANT


def test_replies_inside_a_prompt_are_context() -> None:
    user, assistant = USER_AND_ASSISTANT
    record = {"prompt": [user, assistant, user, {**assistant, "train": True}, user], "completion": "b"}
    assert good(example_of(record)).weights == (None, 0.0, None, 1.0, None, None)


def test_other_column_names_are_mapped() -> None:
    record = {"question": "q", "answer": "a", "hint": "h"}
    columns = {"prompt": "question", "completion": "answer", "system": "hint"}
    assert good(example_of(record, **columns)).messages == [{"role": "system", "content": "h"}, *USER_AND_ASSISTANT]
    assert bad(read_as({"question": "q"}, "prompt_completion", **columns)).detail == "answer is missing"


def test_text_is_kept_as_it_is() -> None:
    example = good(example_of({"text": " a\n"}))
    assert (example.kind, example.text) == (ExampleKind.TEXT, " a\n")
    assert bad(read_as({"text": ""}, "text")).reason is Reason.EMPTY
    for record in ({}, {"text": None}, {"text": 3}):
        assert bad(read_as(record, "text")).reason is Reason.WRONG_TYPE


@pytest.mark.parametrize(
    "mask", [{"loss_mask": [0, 1, 1]}, {"loss_mask": [False, True, True]}, {"labels": [-100, 6, 7]}]
)
def test_pretokenized_rows_carry_their_mask(mask: dict[str, Any]) -> None:
    example = good(example_of({"input_ids": [5, 6, 7], **mask}))
    assert example.kind is ExampleKind.PRETOKENIZED
    assert example.input_ids is not None
    assert example.loss_mask is not None
    assert (example.input_ids.dtype, example.loss_mask.dtype) == (np.int32, np.bool_)
    assert (example.input_ids.tolist(), example.loss_mask.tolist()) == ([5, 6, 7], [False, True, True])


def test_t12_ids_beyond_16_bits_are_kept() -> None:
    example = good(example_of({"input_ids": [70_000, 2**31 - 1], "loss_mask": [0, 1]}))
    assert example.input_ids is not None
    assert example.input_ids.tolist() == [70_000, 2**31 - 1]


@pytest.mark.parametrize(
    ("record", "reason", "named"),
    [
        ({"input_ids": [1, 2]}, Reason.WRONG_TYPE, "neither loss_mask nor labels"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, Reason.WRONG_TYPE, "loss_mask has 1 entries, input_ids has 2"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, Reason.WRONG_TYPE, "loss_mask holds 2"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, Reason.WRONG_TYPE, "loss_mask must be a list of integers"),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, Reason.WRONG_TYPE, "input_ids must be a list of integers"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, Reason.WRONG_TYPE, "input_ids holds -2"),
        ({"input_ids": [1, 2**31], "loss_mask": [0, 1]}, Reason.WRONG_TYPE, "input_ids holds 2147483648"),
        ({"input_ids": [1, 10**30], "loss_mask": [0, 1]}, Reason.WRONG_TYPE, "input_ids holds 1"),
        ({"input_ids": "12", "loss_mask": [0, 1]}, Reason.WRONG_TYPE, "input_ids must be a list"),
        ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, Reason.WRONG_TYPE, "labels differ from input_ids"),
        ({"input_ids": [5, 6], "labels": [-100]}, Reason.WRONG_TYPE, "labels has 1 entries"),
        ({"input_ids": [5, 6], "labels": [-100, 6], "loss_mask": [1, 1]}, Reason.WRONG_TYPE, "loss_mask and labels"),
        ({"input_ids": [], "loss_mask": []}, Reason.EMPTY, "input_ids is empty"),
    ],
)
def test_what_is_wrong_in_pretokenized_rows_is_named(record: Any, reason: Reason, named: str) -> None:
    reject = bad(read_as(record, "pretokenized"))
    assert (reject.reason, reject.detail[: len(named)]) == (reason, named)


@pytest.mark.parametrize("record", [None, 3, "x", ["x"], True])
@pytest.mark.parametrize("format", ["messages", "text", "alpaca"])
def test_a_row_that_is_no_object_is_named(record: Any, format: str) -> None:
    assert bad(read_as(record, format)).detail.startswith("a row must be an object, not ")


def test_a_reject_knows_where_it_came_from_and_what_it_was() -> None:
    from packsvc.config import Format
    from packsvc.sources import Reading, read_example

    reading = Reading(format=Format.TEXT, columns={}, why="")
    raw = RawRow(file=3, row=17, record={"text": 1}, raw='{"text":  1}')
    reject = bad(read_example(raw, reading, source_name="chat"))
    assert (reject.file, reject.row, reject.part, reject.source) == (3, 17, None, "chat")
    assert reject.record == '{"text":  1}'
    broken = bad(read_example(RawRow(file=3, row=18, raw="{", error="cut"), reading, source_name="chat"))
    assert (broken.reason, broken.detail, broken.record) == (Reason.INVALID_JSON, "cut", "{")
    table = bad(read_example(RawRow(file=3, row=19, record={"text": None, "b": b"\xff"}), reading, source_name="chat"))
    assert json.loads(table.record)["text"] is None
