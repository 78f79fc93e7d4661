"""OpenAI style messages in canonical form: null fields absent, null content "", training flags apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packsvc.sources.faults import RowFault, kind, short, wrong_type
from packsvc.sources.parsing import NotJson, parse_json
from packsvc.types import JsonDict, Reason

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_FLAGS = ("train", "weight")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_TEXT_FIELDS = ("name", "tool_call_id", *REASONING_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and what their own flags say about training; see `Example`."""

    messages: list[JsonDict]
    weights: tuple[float | None, ...]
    part_weights: tuple[tuple[float | None, ...] | None, ...]


def canonical(raw: Sequence[Any], *, where: str) -> Conversation:
    """Check messages and bring them into canonical form; the raw ones stay as they are.

    Raises:
        RowFault: wrong_type, unknown_role, or empty.
    """
    messages: list[JsonDict] = []
    weights: list[float | None] = []
    part_weights: list[tuple[float | None, ...] | None] = []
    for index, item in enumerate(raw):
        if _is_plain(item):
            messages.append(dict(item))
            weights.append(None)
            part_weights.append(None)
            continue
        at = f"{where}[{index}]"
        if not isinstance(item, dict):
            raise (
                wrong_type(at, "an object", item) if item is not None else RowFault(Reason.WRONG_TYPE, f"{at} is null")
            )
        message, parts = _message(item, at)
        messages.append(message)
        weights.append(flag(item, at))
        part_weights.append(parts)
    if not any(map(_has_content, messages)):
        raise RowFault(
            Reason.EMPTY, f"{where} has no content in any message" if messages else f"{where} has no message"
        )
    return Conversation(messages=messages, weights=tuple(weights), part_weights=tuple(part_weights))


def _is_plain(item: Any) -> bool:
    """A known role and a string, nothing else: most messages are; what `_message` would do is known."""
    return (
        type(item) is dict
        and len(item) == 2
        and type(item.get("content")) is str
        and type(role := item.get("role")) is str
        and role in ROLES
    )


def _message(raw: JsonDict, at: str) -> tuple[JsonDict, tuple[float | None, ...] | None]:
    message = {k: v for k, v in raw.items() if v is not None and k not in _FLAGS}
    role = message.get("role")
    if not isinstance(role, str):
        raise wrong_type(f"{at}.role", "a string", role)
    if role not in ROLES:
        raise RowFault(Reason.UNKNOWN_ROLE, f"{at}.role is {short(role)}; known: {', '.join(sorted(ROLES))}")
    for name in _TEXT_FIELDS:
        if name in message and not isinstance(message[name], str):
            raise wrong_type(f"{at}.{name}", "a string", message[name])
    parts = None
    content = message.setdefault("content", "")
    if isinstance(content, list):
        message["content"], parts = _parts(content, f"{at}.content")
    elif not isinstance(content, str):
        raise wrong_type(f"{at}.content", "a string, null or a list of parts", content)
    if "function_call" in message:
        _adopt_function_call(message, at)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{at}.tool_calls")
    return message, parts


def _parts(content: list[Any], at: str) -> tuple[list[JsonDict], tuple[float | None, ...]]:
    parts: list[JsonDict] = []
    weights: list[float | None] = []
    for index, raw in enumerate(content):
        where = f"{at}[{index}]"
        if not isinstance(raw, dict):
            raise RowFault(Reason.WRONG_TYPE, f"{where} must be an object, not {kind(raw)}")
        part = {k: v for k, v in raw.items() if v is not None and k not in _FLAGS}
        if part.get("type") != "text":
            raise RowFault(Reason.WRONG_TYPE, f"{where}.type is {short(part.get('type'))}; only text parts are read")
        if not isinstance(part.get("text"), str):
            raise wrong_type(f"{where}.text", "a string", part.get("text"))
        parts.append(part)
        weights.append(flag(raw, where))
    return parts, tuple(weights)


def flag(raw: JsonDict, at: str) -> float | None:
    """What `train` or `weight` of a message or part says; None where neither does."""
    train, weight = raw.get("train"), raw.get("weight")
    if train is None and weight is None:
        return None
    if train is not None and not isinstance(train, bool):
        raise wrong_type(f"{at}.train", "true or false", train)
    if weight is None:
        return float(bool(train))
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise wrong_type(f"{at}.weight", "a number from 0 to 1", weight)
    if not 0 <= weight <= 1:
        raise RowFault(Reason.WRONG_TYPE, f"{at}.weight must be a number from 0 to 1, not {short(weight)}")
    if train is not None and float(train) != weight:
        raise RowFault(Reason.WRONG_TYPE, f"{at}: train {str(train).lower()} and weight {short(weight)} contradict")
    return float(weight)


def _adopt_function_call(message: JsonDict, at: str) -> None:
    """The old spelling of a single tool call, which templates would pass over in silence."""
    if message.get("tool_calls"):
        raise RowFault(Reason.WRONG_TYPE, f"{at} has both function_call and tool_calls")
    message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]


def _tool_calls(raw: Any, at: str) -> list[JsonDict]:
    if isinstance(raw, str):
        raw = parsed(raw, at)
    if not isinstance(raw, list):
        raise wrong_type(at, "a list", raw)
    return [_tool_call(call, f"{at}[{index}]") for index, call in enumerate(raw)]


def _tool_call(raw: Any, at: str) -> JsonDict:
    if not isinstance(raw, dict):
        raise RowFault(Reason.WRONG_TYPE, f"{at} must be an object, not {kind(raw)}")
    call = {k: v for k, v in raw.items() if v is not None}
    if "function" in call:
        at += ".function"
        if not isinstance(call["function"], dict):
            raise wrong_type(at, "an object", call["function"])
        function = call["function"] = {k: v for k, v in call["function"].items() if v is not None}
    else:
        function = call
    if not isinstance(function.get("name"), str):
        raise wrong_type(f"{at}.name", "a string", function.get("name"))
    if not isinstance(function.get("arguments"), (dict, str)):
        raise wrong_type(f"{at}.arguments", "an object or a JSON string", function.get("arguments"))
    return call


def _has_content(message: JsonDict) -> bool:
    content = message["content"]
    if isinstance(content, str) and content:
        return True
    if isinstance(content, list) and any(part["text"] for part in content):
        return True
    return any(message.get(name) for name in ("tool_calls", *REASONING_FIELDS))


def tool_schemas(value: Any, *, where: str) -> list[Any] | None:
    """The `tools` of a row, verbatim: a list or a JSON string of one; None where there are none."""
    if isinstance(value, str):
        value = parsed(value, where) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong_type(where, "a list of tools, or a JSON string of one", value)
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise RowFault(Reason.WRONG_TYPE, f"{where}[{index}] must be an object, not {kind(tool)}")
    return value or None


def parsed(text: str, where: str) -> Any:
    """The value of a JSON string in a row."""
    try:
        return parse_json(text.encode("utf-8"))
    except (NotJson, UnicodeEncodeError) as error:
        raise RowFault(Reason.WRONG_TYPE, f"{where} is a string that is not JSON: {error}") from None
