"""Chat templates to test with, a tokenizer that is only names, and renders by transformers itself."""

from __future__ import annotations

import datetime
import importlib.util
import re
from pathlib import Path
from typing import Any

from packsvc.encode.audit import audit_template
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import Decisions, Rendered

DATE = datetime.date(2026, 1, 1)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_MARKER = re.compile(
    r"<\|[^|<>\n' ]+\|?>|<[a-z_]+\|>|<(?:start|end)_of_turn>|</s>|<s>|<｜[^｜]+｜>"
    r"|\[/?[A-Z_]+\]|<end_of_utterance>|<image>"
)


_audited: dict[str, Decisions] = {}


class Names:
    """A tokenizer as far as rendering looks at it."""

    def __init__(self, eos: str = "</s>") -> None:
        self.eos_token = eos
        self.special_tokens_map = SPECIAL | {"eos_token": eos}


def trl_templates() -> dict[str, str]:
    """Source of every chat template that the installed trl carries, by name."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "trl is a dev dependency: pip install packsvc[dev]"
    folder = Path(next(iter(spec.submodule_search_locations or ()))) / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def controls_of(source: str) -> set[str]:
    """Control tokens as they would stand in the tokenizer that a template belongs to."""
    return {m for m in _MARKER.findall(source) if not re.search("think", m, re.IGNORECASE)} | {"<s>", "</s>"}


def make_renderer(source: str, *, eos: str = "</s>", controls: set[str] | None = None, **options: Any) -> Renderer:
    """A renderer for a template, audited unless `decisions` are given."""
    names = Names(eos)
    controls = controls if controls is not None else controls_of(source) | {eos}
    shared: dict[str, Any] = {
        "template": source,
        "control_tokens": controls,
        "template_kwargs": options.pop("template_kwargs", {}),
        "date": options.pop("date", DATE),
    }
    decisions = options.pop("decisions", None)
    if decisions is None:
        key = repr((eos, sorted(shared.items(), key=str), sorted(controls)))
        if key not in _audited:
            _audited[key] = audit_template(names, **shared).decisions
        decisions = _audited[key]
    return Renderer(names, **shared, decisions=decisions, **options)


def by_transformers(source: str, messages: list[Any], tools: Any = None, **options: Any) -> str:
    """The render that `apply_chat_template(tokenize=False)` gives, with the same special tokens and date."""
    from transformers.utils import chat_template_utils as utils

    utils._compile_jinja_template(source).environment.globals["strftime_now"] = lambda form: datetime.datetime(
        2026, 1, 1
    ).strftime(form)
    texts: Any = utils.render_jinja_template(
        conversations=[messages], tools=tools, chat_template=source, date_string="01 Jan 2026", **SPECIAL | options
    )
    return str(texts[0][0])


def show(rendered: Rendered, start: int = 0) -> str:
    """The text with its learned spans in brackets."""
    pieces, last = [], start
    for span in rendered.spans:
        pieces += [rendered.text[last : span.start], "⟦", rendered.text[span.start : span.end], "⟧"]
        last = span.end
    return "".join([*pieces, rendered.text[last:]])


def chat(*turns: Any) -> list[dict[str, Any]]:
    """User and assistant in turn; a turn may be a whole message."""
    return [
        t if isinstance(t, dict) else {"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)
    ]


def call(arguments: Any, name: str = "find", id: str = "c4d5e6f7g") -> dict[str, Any]:
    """A tool call."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
