"""Other ways to write a conversation, as OpenAI style messages: ShareGPT, Alpaca, prompt/completion."""

from __future__ import annotations

from typing import Any

from packsvc.sources.faults import RowFault, kind, short, wrong_type
from packsvc.sources.fields import Fields
from packsvc.sources.messages import ROLES, parsed
from packsvc.types import JsonDict, Reason

ROLE_KEYS = ("from", "role", "speaker")
TEXT_KEYS = ("value", "content", "text")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    **{role: role for role in ROLES},
}
_CALLS = ("function_call", "tool_call", "tool_calls")


def from_messages(fields: Fields) -> list[Any]:
    """`messages`, a list or a JSON string of one."""
    return _with_system(fields, fields.listed("messages"), mapped_only=True)


def from_sharegpt(fields: Fields) -> list[Any]:
    """`conversations` of from and value, in the dialects in use."""
    where = fields.name("messages")
    turns = [_turn(turn, f"{where}[{i}]") for i, turn in enumerate(fields.listed("messages"))]
    return _with_system(fields, turns, mapped_only=False)


def _turn(turn: Any, at: str) -> JsonDict:
    if not isinstance(turn, dict):
        raise RowFault(Reason.WRONG_TYPE, f"{at} must be an object, not {kind(turn)}")
    role_key = next((k for k in ROLE_KEYS if turn.get(k) is not None), ROLE_KEYS[0])
    text_key = next((k for k in TEXT_KEYS if turn.get(k) is not None), TEXT_KEYS[0])
    name, text = turn.get(role_key), turn.get(text_key)
    if not isinstance(name, str):
        raise wrong_type(f"{at}.{role_key}", "a string", name)
    rest = {k: v for k, v in turn.items() if k not in (role_key, text_key)}
    if name.lower() in _CALLS:
        return {"role": "assistant", "content": "", "tool_calls": _calls(text, f"{at}.{text_key}"), **rest}
    role = _SHAREGPT_ROLES.get(name.lower())
    if role is None:
        raise RowFault(Reason.UNKNOWN_ROLE, f"{at}.{role_key} is {short(name)}; known: {', '.join(_SHAREGPT_ROLES)}")
    if text is not None and not isinstance(text, (str, list)):
        raise wrong_type(f"{at}.{text_key}", "a string", text)
    return {"role": role, "content": text, **rest}


def _calls(text: Any, at: str) -> list[JsonDict]:
    """A function_call turn: JSON of name and arguments, or a list of those."""
    value = parsed(text, at) if isinstance(text, str) else text
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) for call in calls):
        raise wrong_type(at, "JSON of name and arguments", value)
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def from_alpaca(fields: Fields) -> list[Any]:
    """Instruction, a blank line and the input if there is one; the output; earlier exchanges in `history`."""
    instruction, output = fields.text("instruction"), fields.text("output")
    extra = fields.optional_text("input")
    history = fields.get("history") or []
    if isinstance(history, str):
        history = parsed(history, fields.name("history"))
    messages: list[Any] = []
    for index, pair in enumerate(history if isinstance(history, list) else [history]):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise RowFault(Reason.WRONG_TYPE, f"{fields.name('history')}[{index}] must be a pair of strings")
        messages += _exchange(pair[0], pair[1])
    messages += _exchange(f"{instruction}\n\n{extra}" if extra else instruction, output)
    return _with_system(fields, messages, mapped_only=False)


def from_prompt_completion(fields: Fields) -> list[Any]:
    """Strings, or lists of messages. Replies inside a prompt are context: no loss unless they say so."""
    prompt, completion = fields.get("prompt"), fields.get("completion")
    for field, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, (str, list)):
            raise wrong_type(fields.name(field), "a string or a list of messages", value)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_context(m) for m in prompt]
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    return _with_system(fields, before + after, mapped_only=True)


def _context(message: Any) -> Any:
    silent = isinstance(message, dict) and message.get("train") is None and message.get("weight") is None
    return {**message, "weight": 0} if silent and message.get("role") == "assistant" else message


def _exchange(user: str, assistant: str) -> list[JsonDict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _with_system(fields: Fields, messages: list[Any], *, mapped_only: bool) -> list[Any]:
    """Put the `system` column first. Where `system` is no part of the format, only if the job maps it."""
    if mapped_only and "system" not in fields.columns:
        return messages
    system = fields.optional_text("system")
    if not system:
        return messages
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        detail = f"{fields.name('system')} and the first message are two different system prompts"
        raise RowFault(Reason.WRONG_TYPE, detail)
    return messages
