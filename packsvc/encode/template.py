"""A chat template, compiled once and called directly: plain, or with turn marks.

The environment is transformers' own sandbox (its filters, `{% generation %}` tags and guards), so a render equals
`apply_chat_template(messages, tools=..., tokenize=False)`; what is left out is its work around every call: copies
of all values, and the search for callables and media. Messages are prepared once by `messages.py` instead.

Nothing here knows a model. The clock is the job's `date`: a template that asks for today's date without one stops
the job, since its output would differ tomorrow.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jinja2 import Environment, nodes

from packsvc.encode.messages import tools_key
from packsvc.encode.shortcuts import take_shortcuts
from packsvc.encode.tooltexts import remember_tool_texts
from packsvc.encode.turnmarks import MarkWriter, add_marks, install
from packsvc.errors import EncodeError

# What marks are made of; the next stands in where a text holds the one before. Control characters that no text needs
# come first, since a character above U+00FF makes Python widen, and narrow again, the whole text.
_MARKERS = ("\x01", "\x02", "\x03", "\ufdd0", "\ufdd1", "\ufdd2", "\U0010fffe", "\U0010ffff")


_Run = Callable[[list[Any], Any, bytes | None, bool], str]
"""(messages, tools, key of the tools, add_generation_prompt) -> text"""


class ClockAskedError(EncodeError):
    """The template asked for today's date, and the job names none."""


class Marked(NamedTuple):
    """A render and who wrote it."""

    text: str
    regions: list[tuple[int, int, int]]
    """(message, start, end) of each run of characters written by one message, in order, none empty."""


class TurnTemplate:
    """One chat template with its fixed variables.

    Args:
        source: Jinja source.
        variables: What every render gets besides messages and tools: special tokens and `template_kwargs`.
        date: What `strftime_now` tells, and `date_string`; None lets a template that asks stop the job.
    """

    def __init__(self, source: str, *, variables: Mapping[str, Any], date: datetime.date | None) -> None:
        self.source = source
        self.variables = dict(variables)
        if date is not None:
            self.variables.setdefault("date_string", date.strftime("%d %b %Y"))
        self._clock = _clock(date)
        self._sandbox = _sandbox(source)
        self.tree = self._sandbox.parse(source)
        self.names = frozenset(n.name for n in self.tree.find_all(nodes.Name) if n.ctx == "load")
        """Names that the template reads."""
        self.roles = frozenset(role for test in self.tree.find_all(nodes.Compare) for role in _roles_in(test))
        """Roles that the template compares with."""
        self._plain = self._compile(self._sandbox.overlay(), self._sandbox.parse(source))
        self._writers: list[tuple[MarkWriter, _Run]] = []

    def plain(self, messages: list[Any], tools: Any, *, add_generation_prompt: bool = False) -> str:
        """The text that transformers gives; raises whatever the template raises."""
        return self._plain(messages, tools, tools_key(tools), add_generation_prompt)

    def marked(
        self, messages: list[Any], tools: Any, *, key: bytes | None = None, add_generation_prompt: bool = False
    ) -> Marked | None:
        """The same text and its regions; None when a mark got lost, so that regions cannot be told.

        Args:
            key: `tools_key(tools)`, where it is known already.
        """
        if key is None:
            key = tools_key(tools)
        for k in range(len(_MARKERS)):
            writer, run = self._writer(k)
            writer.begin(messages)
            text = run(messages, tools, key, add_generation_prompt)
            cut = writer.cut(text)
            if cut is not None and not (
                writer.captured and cut[0] != self._plain(messages, tools, key, add_generation_prompt)
            ):
                return Marked(*cut)
            if cut is not None or writer.marker not in text:
                return None
        return None

    def _writer(self, k: int) -> tuple[MarkWriter, _Run]:
        while len(self._writers) <= k:
            writer = MarkWriter(_MARKERS[len(self._writers)])
            tree = self._sandbox.parse(self.source)
            add_marks(tree)
            environment = self._sandbox.overlay()
            install(environment, writer)
            self._writers.append((writer, self._compile(environment, tree)))
        return self._writers[k]

    def _compile(self, environment: Environment, tree: nodes.Template) -> _Run:
        take_shortcuts(environment)
        tool_texts = remember_tool_texts(tree, environment, self.variables)
        tree.set_environment(environment)
        tree.set_lineno(1)
        template = environment.from_string(tree, globals={"strftime_now": self._clock})
        fixed = {**template.globals, **self.variables, "documents": None}
        write, join = template.root_render_func, "".join
        context_class, name, blocks = environment.context_class, template.name, template.blocks

        def run(messages: list[Any], tools: Any, key: bytes | None, add_generation_prompt: bool) -> str:
            tool_texts.begin(key)
            # What Template.render does, with its globals and the fixed variables merged beforehand.
            variables = {
                **fixed,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
            return join(write(context_class(environment, variables, name, blocks)))

        return run


def _sandbox(source: str) -> Environment:
    """transformers' environment for chat templates."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment: Environment = _compile_jinja_template(source).environment
    except TemplateSyntaxError as error:
        what = str(error.message).rstrip(".")
        raise EncodeError(f"the chat template is not valid Jinja, line {error.lineno}: {what}.") from error
    return environment


def _roles_in(test: nodes.Compare) -> list[str]:
    """The texts that a comparison holds a role against."""
    sides = [test.expr, *(operand.expr for operand in test.ops)]
    if not any(_is_role(side) for side in sides):
        return []
    listed = [item for side in sides if isinstance(side, (nodes.List, nodes.Tuple)) for item in side.items]
    return [n.value for n in (*sides, *listed) if isinstance(n, nodes.Const) and isinstance(n.value, str) and n.value]


def _is_role(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return (isinstance(node, nodes.Getattr) and node.attr == "role") or (
        isinstance(node, nodes.Name) and node.name == "role"
    )


def _clock(date: datetime.date | None) -> Any:
    def strftime_now(format: str) -> str:
        if date is None:
            raise ClockAskedError(
                "the chat template asks for today's date, so the same job would give other tokens tomorrow. "
                "Set `date: YYYY-MM-DD` in the job."
            )
        return datetime.datetime.combine(date, datetime.time()).strftime(format)

    return strftime_now
