"""Nothing of a conversation is lost in silence: what the template left out of the render, per message.

Contents are looked for in the characters that their own message wrote, first where the last content of that role
stood (a comparison of memory), then by search; short texts, which could be found by chance, and messages that have no
characters of their own are looked for by rendering the conversation once more with a stand-in for the content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from packsvc.encode.messages import reasoning_of
from packsvc.encode.rendered import RowRefused
from packsvc.types import JsonDict, Reason

_CLOSERS = ("</think>", "[/THINK]", "</thinking>", "</thought>", "</reasoning>", "<|END_THINKING|>", "<channel|>")
_OPENER = re.compile(r"<think>|\[THINK\]|<thinking>|<thought>|<reasoning>|<\|START_THINKING\|>|<\|channel>thought")
_SHORT = 16


class Presence:
    """Checks the renders of one template.

    Args:
        shown: (messages, tools, index) -> whether the content of that message appears in a render, found by
            rendering again with a stand-in.
    """

    def __init__(self, shown: Callable[[list[JsonDict], Any, int], bool]) -> None:
        self._shown = shown
        self._offsets: dict[str, list[int]] = {}

    def check(self, messages: list[JsonDict], tools: Any, text: str, hulls: list[tuple[int, int] | None]) -> None:
        """Raise RowRefused(text_missing) for the first message whose content or tool call is not in the render."""
        offsets = self._offsets
        for index, message in enumerate(messages):
            content = message.get("content")
            hull = hulls[index]
            if type(content) is str:
                core = content.strip()
                if not core:
                    pass
                elif hull is not None and (known := offsets.get(message["role"])) is not None:
                    place = hull[0] + known[0]
                    if not text.startswith(core, place) or place + len(core) > hull[1]:
                        self._look(messages, tools, index, core, text, hull)
                else:
                    self._look(messages, tools, index, core, text, hull)
            elif type(content) is list:
                self._check_parts(messages, tools, index, text, hull)
            elif content is not None:
                self._check_value(message, index, content, text, hull)
            if message.get("tool_calls"):
                _check_calls(message, index, text, hull)

    def _look(
        self,
        messages: list[JsonDict],
        tools: Any,
        index: int,
        core: str,
        text: str,
        hull: tuple[int, int] | None,
    ) -> None:
        """Look where other contents of that role stood, then all over what the message wrote, then closer."""
        if hull is not None:
            start, end = hull
            role = messages[index]["role"]
            offsets = self._offsets.get(role, [])
            for k, offset in enumerate(offsets):
                place = start + offset
                if text.startswith(core, place) and place + len(core) <= end:
                    if k:  # so that the usual one comes first in time
                        offsets[k - 1], offsets[k] = offset, offsets[k - 1]
                    return
            if len(core) >= _SHORT and (found := text.find(core, start, end)) >= 0:
                self._learn(role, found - start)
                return
        self._look_closer(messages, tools, index, core, text, hull)

    def _learn(self, role: str, offset: int) -> None:
        offsets = self._offsets.setdefault(role, [])
        if offset not in offsets:
            offsets.insert(0, offset)
            del offsets[4:]

    def _look_closer(
        self,
        messages: list[JsonDict],
        tools: Any,
        index: int,
        core: str,
        text: str,
        hull: tuple[int, int] | None,
    ) -> None:
        message = messages[index]
        start, end = hull if hull is not None else (0, len(text))
        if stands(core, text, start, end):
            by_chance = len(core) < _SHORT or (hull is None and _stands_elsewhere(core, messages, index))
            if not by_chance:
                return
            if self._shown(messages, tools, index):
                if hull is not None and text.count(core, start, end) == 1:
                    self._learn(message["role"], text.find(core, start, end) - start)
                return
        if message["role"] == "assistant":
            rest = after_reasoning(core)
            if rest is not None and (not rest or stands(rest, text, start, end)):
                return
        raise _missing(index, message, "content", core)

    def _check_parts(
        self, messages: list[JsonDict], tools: Any, index: int, text: str, hull: tuple[int, int] | None
    ) -> None:
        start, end = hull if hull is not None else (0, len(text))
        for part in messages[index]["content"]:
            value = part.get("text") if type(part) is dict else part
            core = value.strip() if type(value) is str else ""
            if core and not stands(core, text, start, end):
                rest = after_reasoning(core) if messages[index]["role"] == "assistant" else None
                if rest is None or (rest and rest not in text[start:end]):
                    raise _missing(index, messages[index], "a part of the content", core)

    def _check_value(self, message: JsonDict, index: int, value: Any, text: str, hull: tuple[int, int] | None) -> None:
        start, end = hull if hull is not None else (0, len(text))
        for leaf in _leaves(value):
            if not stands(leaf, text, start, end):
                raise _missing(index, message, "content", leaf)


def _check_calls(message: JsonDict, index: int, text: str, hull: tuple[int, int] | None) -> None:
    calls = message["tool_calls"]
    if type(calls) is not list:
        raise RowRefused(Reason.WRONG_TYPE, f"tool_calls of message {index} is not a list")
    start, end = hull if hull is not None else (0, len(text))
    position = start
    for call in calls:
        function = call.get("function", call) if type(call) is dict else None
        name = function.get("name") if type(function) is dict else None
        if type(function) is not dict or type(name) is not str:
            raise RowRefused(Reason.WRONG_TYPE, f"a tool call of message {index} has no function name")
        found = text.find(name, position, end)
        if found < 0:
            raise _missing(index, message, "the tool call", name)
        position = found + len(name)
        arguments = function.get("arguments")
        if type(arguments) is str:
            core = arguments.strip()
            if not core or text.find(core, position, end) >= 0:
                continue
            arguments = _parsed(core)
        for leaf in _leaves(arguments):
            if text.find(leaf, start, end) < 0 and not stands(leaf, text, start, end):
                raise _missing(index, message, f"an argument of the call to {name}", leaf)


def stands(wanted: str, text: str, start: int, end: int) -> bool:
    """Whether `wanted` stands in [start, end) of `text`, as it is or with JSON's escapes."""
    if text.find(wanted, start, end) >= 0:
        return True
    return any(text.find(json.dumps(wanted, ensure_ascii=e)[1:-1], start, end) >= 0 for e in (False, True))


def _stands_elsewhere(core: str, messages: list[JsonDict], index: int) -> bool:
    return any(i != index and core in str(m.get("content")) for i, m in enumerate(messages))


def reasoning_text(message: JsonDict) -> str | None:
    """The reasoning of an assistant message, from its field or from the tags in its content; None without any."""
    value = reasoning_of(message) if len(message) > 2 else None  # role and content
    if value is not None:
        text = value if type(value) is str else "\n".join(_leaves(value))
        return text.strip() or None
    content = message.get("content")
    if type(content) is list:
        content = "".join(p.get("text") or "" for p in content if type(p) is dict and type(p.get("text", "")) is str)
    if type(content) is not str or not ("<" in content or "[/THINK]" in content):  # what closers begin with
        return None
    if not any(closer in content for closer in _CLOSERS):
        return None
    before = content[: max(content.rfind(closer) for closer in _CLOSERS)]
    openers = list(_OPENER.finditer(before))
    return (before[openers[0].end() :] if openers else before).strip() or None


def after_reasoning(content: str) -> str | None:
    """What stands behind the last reasoning tag that closes, trimmed; None without such a tag."""
    stop = max(content.rfind(closer) + len(closer) if closer in content else -1 for closer in _CLOSERS)
    return content[stop:].strip() if stop >= 0 else None


def _leaves(value: Any) -> list[str]:
    """Texts and numbers in a JSON value, keys too, as templates write them; true, false and null are left out."""
    if type(value) is str:
        core = value.strip()
        return [core] if core else []
    if type(value) is dict:
        leaves = list(filter(None, value))
        for inner in value.values():
            leaves += _leaves(inner)
        return leaves
    if type(value) is list:
        return [leaf for item in value for leaf in _leaves(item)]
    if type(value) is int or type(value) is float:
        return [str(value)]
    return []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _missing(index: int, message: JsonDict, what: str, text: str) -> RowRefused:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return RowRefused(
        Reason.TEXT_MISSING,
        f"{what} of message {index} ({message.get('role')}) is not in what the template renders: {shown!r}",
    )
