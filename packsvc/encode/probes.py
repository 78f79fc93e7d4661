"""Small conversations with words that occur nowhere else, to see what a chat template does with each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from packsvc.types import JsonDict

CALL_ID = "c4d5e6f7g"
"""Nine letters and digits, since some templates take no other."""
FUNCTION = "lookup_quarvel"
ARGUMENT = "brenthal"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": FUNCTION,
            "description": "Finds a dorvinque.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where to look."}},
                "required": ["place"],
            },
        },
    }
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One conversation and the words in it."""

    name: str
    messages: list[JsonDict]
    tools: list[Any] | None = None
    content: dict[str, str] = field(default_factory=dict)
    """Word: role, of what contents say."""
    reasoning: tuple[str, ...] = ()
    """Words of reasoning, by turn."""
    calls: tuple[str, ...] = ()
    """Words that tool calls hold."""
    basic: bool = False
    """Every template for chats must render and mask it."""


def probes(as_parts: bool) -> list[Probe]:
    """The conversations of an audit, contents as strings or as lists of one text part."""
    say = _parts if as_parts else _string
    user1, user2 = _m("user", "tavrindel", say), _m("user", "mossifern", say)
    answer1, answer2 = _m("assistant", "gellowick", say), _m("assistant", "parnassil", say)
    system = _m("system", "ostelvane", say)
    first = {"tavrindel": "user", "gellowick": "assistant"}
    both = first | {"mossifern": "user", "parnassil": "assistant"}
    call = {"role": "assistant", "content": say(""), "tool_calls": [tool_call({"place": ARGUMENT})]}
    talk_and_call = call | {"content": say("fennimore")}
    result = {"role": "tool", "tool_call_id": CALL_ID, "name": FUNCTION, "content": say("dunlavish")}
    tool_words = {"tavrindel": "user", "dunlavish": "tool", "gellowick": "assistant"}
    called = (FUNCTION, ARGUMENT)
    return [
        Probe(name="one turn", messages=[user1, answer1], content=first, basic=True),
        Probe(name="two turns", messages=[user1, answer1, user2, answer2], content=both, basic=True),
        Probe(name="system", messages=[system, user1, answer1], content=first | {"ostelvane": "system"}),
        Probe(
            name="system and two turns",
            messages=[system, user1, answer1, user2, answer2],
            content=both | {"ostelvane": "system"},
        ),
        Probe(
            name="reasoning", messages=[user1, _think(answer1, "ulbricane")], content=first, reasoning=("ulbricane",)
        ),
        Probe(
            name="reasoning in two turns",
            messages=[user1, _think(answer1, "ulbricane"), user2, _think(answer2, "skelderin")],
            content=both,
            reasoning=("ulbricane", "skelderin"),
        ),
        Probe(
            name="tool call",
            messages=[user1, call, result, answer1],
            tools=TOOLS,
            content=tool_words,
            calls=called,
        ),
        Probe(
            name="tool call in two turns",
            messages=[user1, call, result, answer1, user2, answer2],
            tools=TOOLS,
            content=tool_words | {"mossifern": "user", "parnassil": "assistant"},
            calls=called,
        ),
        Probe(
            name="tool call at the end",
            messages=[user1, call],
            tools=TOOLS,
            content={"tavrindel": "user"},
            calls=called,
        ),
        Probe(
            name="words and a tool call",
            messages=[user1, talk_and_call, result, answer1],
            tools=TOOLS,
            content=tool_words | {"fennimore": "assistant"},
            calls=called,
        ),
        Probe(
            name="reasoning and a tool call",
            messages=[user1, _think(call, "ulbricane"), result, _think(answer1, "skelderin")],
            tools=TOOLS,
            content=tool_words,
            calls=called,
            reasoning=("ulbricane", "skelderin"),
        ),
    ]


def tool_call(arguments: Any) -> JsonDict:
    """A call to the probes' function."""
    return {"id": CALL_ID, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}}


def decide_arguments(render: Callable[[list[JsonDict], Any], str | None]) -> str:
    """How tool call arguments must reach a template: "verbatim", "parsed" or "string"."""
    written = json.dumps({"place": ARGUMENT})

    def show(arguments: Any) -> str | None:
        shown = None
        for content in ("", "gellowick"):
            assistant = {"role": "assistant", "content": content, "tool_calls": [tool_call(arguments)]}
            shown = shown or render([_m("user", "tavrindel", _string), assistant], TOOLS)
        return shown if shown is not None and ARGUMENT in shown else None

    as_object, as_string = show({"place": ARGUMENT}), show(written)
    if as_object is None:
        return "verbatim" if as_string is None else "string"
    if as_string is None or json.dumps(written)[1:-1] in as_string:
        return "parsed"
    return "verbatim"


def decide_parts(render: Callable[[list[JsonDict], Any], str | None]) -> str:
    """Whether a template renders lists of text parts as their text: "verbatim", else "joined"."""
    for conversation, tools in (
        (["user", "assistant"], None),
        (["system", "user", "assistant"], None),
        (["user", "call", "tool", "assistant"], TOOLS),
    ):
        words = ["tavrindel", "gellowick", "ostelvane", "dunlavish"][: len(conversation)]
        whole = render([_speak(r, w, _string) for r, w in zip(conversation, words, strict=True)], tools)
        parted = render([_speak(r, w, _parts) for r, w in zip(conversation, words, strict=True)], tools)
        if whole is None and tools is None and len(conversation) == 2:
            return "verbatim" if parted is not None and all(w in parted for w in words) else "joined"
        if whole is None:
            continue
        if parted is None or any(w in whole and w not in parted for w in words):
            return "joined"
        if any(mark in parted and mark not in whole for mark in ("'type'", '"type"', '\\"type\\"')):
            return "joined"
    return "verbatim"


def _speak(role: str, word: str, say: Callable[[str], Any]) -> JsonDict:
    if role == "call":
        return _m("assistant", "", say) | {"tool_calls": [tool_call({"place": ARGUMENT})]}
    message = _m(role, word, say)
    return message | {"tool_call_id": CALL_ID, "name": FUNCTION} if role == "tool" else message


def _m(role: str, word: str, say: Callable[[str], Any]) -> JsonDict:
    return {"role": role, "content": say(word)}


def _think(message: JsonDict, word: str) -> JsonDict:
    return message | {"reasoning_content": word}


def _string(text: str) -> Any:
    return text


def _parts(text: str) -> Any:
    return [{"type": "text", "text": text}] if text else []
