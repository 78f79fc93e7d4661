"""Messages in canonical form."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from packsvc.types import Reason
from tests.sources.inputs import bad, chat, example_of, good, read_as

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None, "big": 10**30}}}


def read(*messages: Any, **more: Any) -> Any:
    return read_as({"messages": list(messages), **more}, "messages", messages="messages")


def user(content: Any = "q", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_null_fields_are_absent_and_null_content_is_empty() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    example = good(read(user(name=None), assistant(None, tool_calls=[call], refusal=None), {"role": "tool"}))
    assert example.messages == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}],
        },
        {"role": "tool", "content": ""},
    ]


def test_the_record_stays_as_it_was() -> None:
    record = chat(tools=[TOOL])
    record["messages"][1] |= {"train": True, "tool_calls": None}
    before = copy.deepcopy(record)
    example = good(read_as(record, "messages"))
    example.messages[0]["content"] = "changed"
    assert record == before


def test_m14_reasoning_and_unknown_fields_reach_the_template() -> None:
    message = assistant("4", reasoning_content="2 + 2", citations=[1], name="bot")
    assert good(read(user(), message)).messages[1] == message


def test_m15_tools_calls_and_replies_reach_the_template() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1.0}'}}]
    reply = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "[1]"}
    example = good(read(user(), assistant("", tool_calls=calls), reply, assistant(), tools=[TOOL]))
    assert example.messages[1]["tool_calls"] == calls
    assert example.messages[2] == reply
    assert example.tools == [TOOL]


def test_t4_schemas_in_json_pass_verbatim() -> None:
    for tools in ([TOOL], json.dumps([TOOL])):
        found = good(read(user(), assistant(), tools=tools)).tools
        assert json.dumps(found) == json.dumps([TOOL])


@pytest.mark.parametrize("tools", [None, "", " ", [], "[]", "null"])
def test_no_tools_are_none(tools: Any) -> None:
    assert good(read(user(), assistant(), tools=tools)).tools is None


def test_m26_weights_and_flags_are_kept_apart() -> None:
    example = good(
        read(
            user(train=True),
            assistant(weight=0),
            user(),
            assistant(weight=0.5),
            assistant(train=False),
            assistant(weight=1, train=True),
            assistant(weight=None, train=None),
        )
    )
    assert example.weights == (1.0, 0.0, None, 0.5, 0.0, 1.0, None)
    assert all(set(message) == {"role", "content"} for message in example.messages)


def test_parts_have_flags_of_their_own() -> None:
    parts = [
        {"type": "text", "text": "a", "train": False},
        {"type": "text", "text": "b", "weight": 0.25},
        {"type": "text", "text": "c", "image_url": None},
    ]
    example = good(read(user(), assistant(parts, weight=1)))
    assert example.part_weights == (None, (0.0, 0.25, None))
    assert example.weights == (None, 1.0)
    assert example.messages[1]["content"] == [{"type": "text", "text": t} for t in "abc"]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("text", "messages[1] must be an object, not a string"),
        (None, "messages[1] is null"),
        ({"content": "x"}, "messages[1].role is missing"),
        ({"role": 1, "content": "x"}, "messages[1].role must be a string, not a number"),
        (assistant(3), "messages[1].content must be a string, null or a list of parts, not a number"),
        (assistant({"text": "x"}), "messages[1].content must be a string, null or a list of parts, not an object"),
        (assistant(["x"]), "messages[1].content[0] must be an object, not a string"),
        (assistant([{"type": "image_url", "image_url": "x"}]), "messages[1].content[0].type is 'image_url'"),
        (assistant([{"type": "text", "text": None}]), "messages[1].content[0].text is missing"),
        (assistant(train=1), "messages[1].train must be true or false, not a number"),
        (assistant(train="yes"), "messages[1].train"),
        (assistant(weight=True), "messages[1].weight must be a number from 0 to 1, not true or false"),
        (assistant(weight=1.5), "messages[1].weight must be a number from 0 to 1, not 1.5"),
        (assistant(weight=-1), "messages[1].weight"),
        (assistant(weight="1"), "messages[1].weight"),
        (assistant(weight=0, train=True), "messages[1]: train true and weight 0 contradict"),
        (assistant([{"type": "text", "text": "x", "weight": 2}]), "messages[1].content[0].weight"),
        (assistant(reasoning_content=["x"]), "messages[1].reasoning_content must be a string, not a list"),
        (assistant(name=1), "messages[1].name"),
        (assistant(tool_calls={"a": 1}), "messages[1].tool_calls must be a list, not an object"),
        (assistant(tool_calls=["x"]), "messages[1].tool_calls[0] must be an object"),
        (assistant(tool_calls=[{"function": {"arguments": {}}}]), "messages[1].tool_calls[0].function.name is missing"),
        (
            assistant(tool_calls=[{"function": {"name": "f"}}]),
            "messages[1].tool_calls[0].function.arguments is missing",
        ),
        (assistant(tool_calls=[{"name": "f", "arguments": 1}]), "messages[1].tool_calls[0].arguments must be"),
        (assistant(tool_calls="nothing"), "messages[1].tool_calls is a string that is not JSON"),
    ],
)
def test_a_wrong_type_is_named_with_its_field(message: Any, named: str) -> None:
    reject = bad(read(user(), message))
    assert reject.reason is Reason.WRONG_TYPE
    assert reject.detail.startswith(named)


@pytest.mark.parametrize("role", ["narrator", "User", "", "human"])
def test_a_role_that_no_template_knows_is_named(role: str) -> None:
    reject = bad(read(user(), {"role": role, "content": "x"}))
    assert reject.reason is Reason.UNKNOWN_ROLE
    assert repr(role) in reject.detail


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_roles_that_templates_know_pass(role: str) -> None:
    assert good(read({"role": role, "content": "x"})).messages[0]["role"] == role


@pytest.mark.parametrize(
    "messages", [[], [user(""), assistant(None)], [user([]), assistant([{"type": "text", "text": ""}])]]
)
def test_no_message_or_no_content_in_any_is_empty(messages: list[Any]) -> None:
    assert bad(read(*messages)).reason is Reason.EMPTY


def test_white_space_a_call_or_a_thought_is_content() -> None:
    good(read(user(" ")))
    good(read(user(""), assistant("", tool_calls=[{"name": "f", "arguments": {}}])))
    good(read(user(""), assistant("", reasoning_content="hm")))


@pytest.mark.parametrize("record", [{}, {"messages": None}, {"messages": "hi"}, {"messages": {"role": "user"}}])
def test_messages_that_are_missing_or_no_list_are_named(record: Any) -> None:
    reject = bad(read_as(record, "messages"))
    assert reject.reason is Reason.WRONG_TYPE
    assert reject.detail.startswith("messages")


@pytest.mark.parametrize("tools", ["{", '"f"', {"a": 1}, ["f"], 3])
def test_tools_that_are_no_list_of_objects_are_named(tools: Any) -> None:
    reject = bad(read(user(), assistant(), tools=tools))
    assert (reject.reason, reject.detail[:5]) == (Reason.WRONG_TYPE, "tools")


def test_a_json_string_of_messages_is_parsed_exactly() -> None:
    record = {"messages": json.dumps(chat(x=1)["messages"])[:-2] + ', "n": 123456789012345678901}]'}
    assert good(example_of(record)).messages[1] == {"role": "assistant", "content": "b", "n": 123456789012345678901}


def test_the_old_spelling_of_a_call_becomes_a_tool_call() -> None:
    old = assistant(None, function_call={"name": "f", "arguments": "{}"})
    message = good(read(user(), old, {"role": "function", "name": "f", "content": "1"})).messages[1]
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


def test_a_system_column_counts_only_where_it_is_mapped() -> None:
    record = chat(system="be brief", sys="s")
    assert len(good(read_as(record, "messages")).messages) == 2
    assert good(read_as(record, "messages", system="sys")).messages[0] == {"role": "system", "content": "s"}
