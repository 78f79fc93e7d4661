"""Messages as the template sees them: what `apply_chat_template` makes of them, without its copies.

transformers drops null fields and gives reasoning under the names that templates read. Both are done here once, on
a shallow copy where something changes. Two rules of the job are applied as well, decided once by the audit: how tool
call arguments that are JSON strings or objects are handed over, and whether lists of text parts are joined.

Values are JSON values (anything else is refused), so the sandbox lets no template change them and no deep copy is
needed.
"""

from __future__ import annotations

import functools
import json
import marshal
from typing import Any

import orjson

from packsvc.encode.rendered import Decisions, RowRefused
from packsvc.errors import EncodeError
from packsvc.types import JsonDict, Reason

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which data carry reasoning; the first that is there counts."""


def prepare_messages(messages: list[JsonDict], decisions: Decisions) -> list[JsonDict]:
    """The messages a template is given; as many as came, all distinct objects.

    Raises:
        RowRefused: wrong_type, for a role that is no string, or arguments that cannot be read.
    """
    prepared = [
        message
        if type(message) is dict
        and len(message) == 2
        and type(message.get("role")) is str
        and type(message.get("content")) is str
        else _prepare(message, decisions)
        for message in messages
    ]
    if len(set(map(id, prepared))) != len(prepared):
        return [dict(message) for message in prepared]
    return prepared


def canonical_json(messages: list[JsonDict], tools: Any) -> bytes:
    """Sorted, compact JSON of what the template sees: equal conversations give equal bytes."""
    value = {"messages": messages, "tools": tools}
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # lone surrogates, integers over 64 bits
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return text.encode("utf-8", "surrogatepass")


_AS_IT_IS = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def serialised(value: Any, what: str = "messages") -> bytes:
    """Bytes in which every string of a JSON value stands in UTF-8, keys just as `serialised` writes them alone.

    Two serialisers that differ in what else they take tell quickly that a value is JSON: only one of them takes
    UUIDs and enums, only the other one bytes and sets.

    Raises:
        RowRefused: wrong_type, for a value that is not JSON or nests too deep.
    """
    try:
        data = marshal.dumps(value, 2)
        orjson.dumps(value, option=_AS_IT_IS)
        return data
    except (ValueError, TypeError, RecursionError):  # lone surrogates, large integers, or no JSON
        if not is_json(value):
            raise RowRefused(Reason.WRONG_TYPE, f"{what} hold a value that is not JSON, or nest too deep") from None
        return marshal.dumps(value, 2)


def tools_key(tools: Any) -> bytes | None:
    """Bytes that are equal only for equal tool lists (values, types and order of keys); None without tools."""
    if not tools:
        return None
    try:
        return marshal.dumps(tools, 2)
    except ValueError:
        raise RowRefused(Reason.WRONG_TYPE, "tools hold a value that is not JSON, or nest too deep") from None


def is_json(value: Any, depth: int = 200) -> bool:
    """Made of nothing but exact JSON types, and no deeper than templates and encoders can follow."""
    kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return True
    if depth == 0:
        return False
    if kind is dict:
        return all(type(k) is str and is_json(v, depth - 1) for k, v in value.items())
    return kind is list and all(is_json(item, depth - 1) for item in value)


def reasoning_of(message: JsonDict) -> Any:
    """The reasoning that a message carries in a field of its own, or None."""
    for name in REASONING_FIELDS:
        value = message.get(name)
        if value is not None:
            return value
    return None


def _prepare(message: JsonDict, decisions: Decisions) -> JsonDict:
    if type(message) is not dict:
        raise RowRefused(Reason.WRONG_TYPE, f"a message is {type(message).__name__}, not an object")
    if type(message.get("role")) is not str:
        raise RowRefused(Reason.WRONG_TYPE, f"role is {message.get('role')!r}, not a string")
    if None in message.values():
        message = {key: value for key, value in message.items() if value is not None}
    reasoning = reasoning_of(message)
    if reasoning is not None and transformers_alias_reasoning():
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if type(message.get("content")) is list and decisions.parts == "joined":
        message = {**message, "content": join_parts(message["content"])}
    if decisions.arguments != "verbatim" and message.get("tool_calls"):
        message = {**message, "tool_calls": [_call(call, decisions.arguments) for call in message["tool_calls"]]}
    return message


def join_parts(parts: list[Any]) -> str:
    """The text of a content that is a list of text parts."""
    texts = [part if type(part) is str else part.get("text") if type(part) is dict else None for part in parts]
    if not all(type(text) is str for text in texts):
        raise RowRefused(
            Reason.WRONG_TYPE, "content holds a part that is not text, and this template takes content as one string"
        )
    return "".join(text for text in texts if text)


def _call(call: Any, arguments: str) -> Any:
    """A tool call with its arguments parsed or written, wherever they stand."""
    if type(call) is not dict:
        return call
    if type(call.get("function")) is dict:
        return {**call, "function": _call(call["function"], arguments)}
    value = call.get("arguments")
    if arguments == "parsed" and type(value) is str:
        return {**call, "arguments": _parse(value, call.get("name"))}
    if arguments == "string" and value is not None and type(value) is not str:
        return {**call, "arguments": json.dumps(value, ensure_ascii=False)}
    return call


def _parse(text: str, name: Any) -> JsonDict:
    value: Any
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if type(value) is not dict or not is_json(value):
        raise RowRefused(
            Reason.WRONG_TYPE,
            f"arguments of the call to {name!r} are not a JSON object ({text[:80]!r}), and this template "
            "takes no other text",
        )
    parsed: JsonDict = value
    return parsed


@functools.cache
def transformers_alias_reasoning() -> bool:
    """Whether the installed transformers copies reasoning to the other names that templates read."""
    from transformers.utils.chat_template_utils import render_jinja_template

    probe: JsonDict = {"role": "assistant", "reasoning": "r"}
    aliased: JsonDict = {"thinking": "r", "reasoning_content": "r"}
    rendered: Any = render_jinja_template(conversations=[[probe]], chat_template="{{ messages[0] | tojson }}")
    seen = json.loads(rendered[0][0])
    if seen == probe:
        return False
    if seen == probe | aliased:
        return True
    raise EncodeError(
        f"this version of transformers prepares messages in a way packsvc does not know ({seen}). "
        "Install another version of transformers."
    )
