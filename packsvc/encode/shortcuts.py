"""Shorter ways through transformers' template sandbox, for values whose answer is known to be the same.

The sandbox asks for an attribute with `getattr` before it looks for a key, and checks every attribute and every call;
on the plain dictionaries and strings of a conversation, that is most of the time of a render. Templates are compiled
by a code generator that writes a check of the exact type first, and the sandbox's own call behind it:

- an attribute of an exact dict whose name no dict has (`message.role`) is its key, or the sandbox's undefined;
- attributes of the loop, and plain values in a namespace, are what Python gives;
- a harmless method of an exact str, called with constants or names, is that method (`content.strip('\\n')`);
- `tojson` without arguments keeps its encoder;
- statements that read nothing but the tools and what is fixed for the job are rendered once for equal tools.

Whatever is not exactly one of these goes the sandbox's way. A property test renders random conversations both ways.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame

_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length"})
_STR_METHODS = (
    "strip", "lstrip", "rstrip", "split", "rsplit", "startswith", "endswith", "replace", "upper", "lower", "title",
    "find", "count", "splitlines", "removeprefix", "removesuffix",
)  # fmt: skip
_DICT_METHODS = ("get", "items", "keys", "values")
_LOCAL = re.compile(r"l_\d+_\w+\Z")
_DICT_NAMES = frozenset(dir(dict))
_PLAIN = frozenset({str, int, float, bool, type(None), list, dict, tuple})
_GET, _CALL = "packsvc_get", "packsvc_call"
_VALUE = "l_packsvc_value"
"""A variable that holds a value from the check of its type until it is used, with nothing evaluated between."""
_JSON_PROBE = {"a": [1, 1.5, None, True, "é<&'\"\\\n\u2028"], "b": {}}


class ShortcutGenerator(CodeGenerator):
    """Compiles templates with the shortcuts."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """`value.name`."""
        if node.attr.startswith("_") or node.attr in _DICT_NAMES:
            super().visit_Getattr(node, frame)
            return
        value = self._source(node.node, frame)
        name = repr(node.attr)
        local = _LOCAL.match(value) is not None
        if local and isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in _LOOP_ATTRIBUTES:
            self.write(
                f"({value}.{node.attr} if type({value}) is LoopContext else environment.getattr({value}, {name}))"
            )
        elif local:
            self.write(
                f"({value}[{name}] if type({value}) is dict and {name} in {value} "
                f"else environment.{_GET}({value}, {name}))"
            )
        else:
            self.write(f"({_VALUE}[{name}] if type({_VALUE} := {value}) is dict and {name} in {_VALUE} ")
            self.write(f"else environment.{_GET}({_VALUE}, {name}))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """`value['name']`."""
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            value, name = self._source(node.node, frame), repr(node.arg.value)
            if _LOCAL.match(value):
                self.write(
                    f"({value}[{name}] if type({value}) is dict and {name} in {value} "
                    f"else environment.getitem({value}, {name}))"
                )
            else:
                self.write(f"environment.getitem({value}, {name})")
            return
        super().visit_Getitem(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        """`value.method(...)`."""
        method = node.node
        if (
            isinstance(method, nodes.Getattr)
            and method.attr in (*_STR_METHODS, *_DICT_METHODS)
            and not (node.kwargs or node.dyn_args or node.dyn_kwargs or forward_caller)
            # a name or a constant cannot fail, so it makes no difference that it is looked up before the method
            and all(isinstance(arg, (nodes.Const, nodes.Name)) for arg in node.args)
        ):
            kind = "str" if method.attr in _STR_METHODS else "dict"
            value, given = self._source(method.node, frame), [self._source(arg, frame) for arg in node.args]
            self.write(f"({_VALUE}.{method.attr}({', '.join(given)}) if type({_VALUE} := {value}) is {kind} ")
            self.write(f"else environment.{_CALL}({', '.join(['context', _VALUE, repr(method.attr), *given])}))")
            return
        super().visit_Call(node, frame, forward_caller=forward_caller)

    def _source(self, node: nodes.Node, frame: Frame) -> str:
        """The Python source of an expression."""
        stream, self.stream = self.stream, io.StringIO()
        try:
            self.visit(node, frame)
            return self.stream.getvalue()
        finally:
            self.stream = stream


def take_shortcuts(environment: Environment) -> None:
    """Let `environment`, an overlay of the caller's own, compile with shortcuts."""
    environment.code_generator_class = ShortcutGenerator
    setattr(environment, _GET, _attribute_getter(environment))
    setattr(environment, _CALL, _method_caller(environment))
    original = environment.filters.get("tojson")
    encoder = json.JSONEncoder(ensure_ascii=False)
    if original is not None and original(_JSON_PROBE) == encoder.encode(_JSON_PROBE):
        environment.filters = {**environment.filters, "tojson": _to_json(original, encoder)}


def _attribute_getter(environment: Environment) -> Callable[[Any, str], Any]:
    slow, undefined = environment.getattr, environment.undefined
    namespace = environment.globals["namespace"]
    missing = object()
    absent: dict[str, Any] = {}

    def get(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict:  # without that key: the template has looked
            # An undefined shows no more of its dict than that it is one, so one for each name will do.
            found = absent.get(name)
            if found is None:
                found = absent[name] = undefined(obj={}, name=name)
            return found
        if kind is namespace:
            found = getattr(value, name, missing)
            if type(found) in _PLAIN:
                return found
        return slow(value, name)

    return get


def _method_caller(environment: Environment) -> Callable[..., Any]:
    """The sandbox's way to call a method."""

    def call(context: Any, value: Any, name: str, *args: Any) -> Any:
        return environment.call(context, environment.getattr(value, name), *args)  # type: ignore[attr-defined]

    return call


def _to_json(original: Callable[..., str], encoder: json.JSONEncoder) -> Callable[..., str]:
    encode = encoder.encode

    def tojson(value: Any, *args: Any, **options: Any) -> str:
        return original(value, *args, **options) if args or options else encode(value)

    return tojson


# ---------------------------------------------------------------- statements that depend on the tools alone

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
