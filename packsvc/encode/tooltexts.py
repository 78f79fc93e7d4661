"""Statements of a template that depend on the tools alone, rendered once for equal tools.

Rows of one source mostly share a few lists of tools, and writing their schemas as JSON is the longest part of such a
render. A statement qualifies where it reads nothing but the tools and names that are fixed for the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, nodes

_KNOWN, _KEEP = "packsvc_tools_known_", "packsvc_tools_keep_"


class ToolTexts:
    """What statements of a template wrote for a list of tools, kept for the next equal list.

    Equal means equal bytes of `tools_key`: same values, types and order of keys.
    """

    def __init__(self, *, most: int = 512) -> None:
        self._texts: dict[tuple[bytes, int], str] = {}
        self._key: bytes | None = None
        self._most = most

    def begin(self, key: bytes | None) -> None:
        """A render with these tools begins; None: nothing is known of them."""
        self._key = key

    def known(self, _: Any, place: int) -> str | None:
        """Filter: what the statements at `place` wrote for equal tools, None if that is not known."""
        return self._texts.get((self._key, place)) if self._key is not None else None

    def keep(self, text: str, place: int) -> str:
        """Filter: they have written this."""
        if self._key is not None:
            if len(self._texts) >= self._most:
                self._texts.clear()
            self._texts[self._key, place] = text
        return text


def remember_tool_texts(tree: nodes.Template, environment: Environment, given: Mapping[str, Any]) -> ToolTexts:
    """Let statements of `tree` that read nothing but tools and fixed names be rendered once for equal tools."""
    texts = ToolTexts()
    environment.filters = {**environment.filters, _KNOWN: texts.known, _KEEP: texts.keep}
    fixed = _fixed_names(tree, environment, given)
    _Rememberer(fixed).body(tree.body)
    return texts


class _Rememberer:
    def __init__(self, fixed: frozenset[str]) -> None:
        self._fixed = fixed
        self._places = 0

    def body(self, body: list[nodes.Node]) -> None:
        """Wrap the statements of a list that qualify, and look into those that do not."""
        for i, node in enumerate(body):
            if self._qualifies(node):
                body[i] = self._remembered(node)
            elif isinstance(node, nodes.If):
                for branch in (node, *node.elif_):
                    self.body(branch.body)
                self.body(node.else_)

    def _qualifies(self, node: nodes.Node) -> bool:
        if not isinstance(node, (nodes.For, nodes.Output)):
            return False
        if isinstance(node, nodes.Output) and next(node.find_all(nodes.Call), None) is None:
            return False  # not worth it
        if next(node.find_all((nodes.NSRef, nodes.CallBlock, nodes.Continue, nodes.Break)), None) is not None:
            return False
        if any(f.name == "random" for f in node.find_all(nodes.Filter)):
            return False
        names = [*node.find_all(nodes.Name)]
        own = {n.name for n in names if n.ctx == "store"}
        if own & self._fixed:
            return False
        if isinstance(node, nodes.For):
            if "loop" in _loaded(node.iter):
                return False
            own |= {"loop"}
        read = {n.name for n in names if n.ctx == "load"} - own
        return "tools" in read and read <= self._fixed

    def _remembered(self, node: nodes.Node) -> nodes.Node:
        place, self._places = self._places, self._places + 1
        name = f"packsvc_tools_text_{place}"

        def read() -> nodes.Expr:
            return nodes.Name(name, "load")

        known = nodes.Filter(nodes.Name("tools", "load"), _KNOWN, [nodes.Const(place)], [], None, None)
        keep = nodes.Filter(None, _KEEP, [nodes.Const(place)], [], None, None)
        return nodes.Scope(
            [
                nodes.Assign(nodes.Name(name, "store"), known),
                nodes.If(
                    nodes.Test(read(), "none", [], [], None, None),
                    [nodes.FilterBlock([node], keep)],
                    [],
                    [nodes.Output([read()])],
                ),
            ]
        )


def _fixed_names(tree: nodes.Template, environment: Environment, given: Mapping[str, Any]) -> frozenset[str]:
    """Tools, the job's variables, globals that have no state, and macros that read only such names."""
    assigned = {n.name for n in tree.find_all(nodes.Name) if n.ctx == "store"}
    assigned |= {n.name for n in tree.find_all(nodes.NSRef)}
    fixed = ({"tools", "raise_exception", "namespace", "dict", "range", *given}) - assigned
    fixed -= {"messages", "add_generation_prompt"}
    macros = {m.name: m for m in tree.find_all(nodes.Macro)}
    while True:
        more = {name for name, m in macros.items() if name not in fixed and _reads(m, tree) <= fixed | {name}}
        if not more:
            return frozenset(fixed)
        fixed |= more


def _reads(macro: nodes.Macro, tree: nodes.Template) -> set[str]:
    """Names that a macro may take from outside: what it sets itself counts where others set it too."""
    names = [*macro.find_all(nodes.Name)]
    inside = {n.name for n in names if n.ctx == "store"}
    elsewhere = {n.name for n in tree.find_all(nodes.Name) if n.ctx == "store" and n not in names}
    inside -= elsewhere | {"messages", "add_generation_prompt", "documents"}
    inside |= {n.name for n in names if n.ctx == "param"} | {"loop", "caller", "varargs", "kwargs"}
    return {n.name for n in names if n.ctx == "load"} - inside


def _loaded(node: nodes.Node) -> set[str]:
    own = {node.name} if isinstance(node, nodes.Name) else set()
    return own | {n.name for n in node.find_all(nodes.Name) if n.ctx == "load"}
