"""Shorter ways through transformers' template sandbox, for values whose answer is known to be the same.

The sandbox asks for an attribute with `getattr` before it looks for a key, and checks every attribute and every call;
on the plain dictionaries and strings of a conversation, that is most of the time of a render. Templates are compiled
by a code generator that writes a check of the exact type first, and the sandbox's own call behind it:

- an attribute of an exact dict whose name no dict has (`message.role`) is its key, or the sandbox's undefined;
- a loop over an exact list that is asked for nothing but its place gets ready-made places instead of a loop object;
- plain values in a namespace are what Python gives, and a namespace is made without the checks of a call;
- a harmless method of an exact str, called with constants or names, is that method (`content.strip('\\n')`);
- the tests `none`, `string`, `defined`, `true` and `false` are written out;
- `tojson` without arguments keeps its encoder.

Whatever is not exactly one of these goes the sandbox's way. A property test renders random conversations both ways.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable, Iterable
from keyword import iskeyword
from typing import Any

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import LoopContext
from jinja2.tests import TESTS
from jinja2.utils import Namespace

_PLACE = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length"})
_STR_METHODS = (
    "strip", "lstrip", "rstrip", "split", "rsplit", "startswith", "endswith", "replace", "upper", "lower", "title",
    "find", "count", "splitlines", "removeprefix", "removesuffix",
)  # fmt: skip
_DICT_METHODS = ("get", "items", "keys", "values")
_LOCAL = re.compile(r"l_\d+_\w+\Z")
_DICT_NAMES = frozenset(dir(dict))
_ATTRIBUTES = "_Namespace__attrs"
"""Where a namespace keeps its values; `getattr` would take a way through Python code of its own."""
_MOST_PLACES = 256
_PLAIN = frozenset({str, int, float, bool, type(None), list, dict, tuple})
_GET, _CALL = "packsvc_get", "packsvc_call"
_NAMESPACE, _NAMESPACE_TYPE = "packsvc_namespace", "packsvc_namespace_type"
_LOOP, _LOOPS, _ABSENT = "packsvc_loop", "packsvc_loops", "packsvc_absent_"
_TESTS = {
    "none": "({} is None)",
    "string": "isinstance({}, str)",
    "defined": "(not isinstance({}, Undefined))",
    "true": "({} is True)",
    "false": "({} is False)",
}
_VALUE = "l_packsvc_value"
"""A variable that holds a value from the check of its type until it is used, with nothing evaluated between."""
_JSON_PROBE = {"a": [1, 1.5, None, True, "é<&'\"\\\n\u2028"], "b": {}}


class LoopPlace:
    """What a loop knows of its place; nothing of its items."""

    __slots__ = ("first", "index", "index0", "last", "length", "revindex", "revindex0")

    def __init__(self, index0: int, length: int) -> None:
        self.index0, self.index, self.length = index0, index0 + 1, length
        self.revindex0, self.revindex = length - index0 - 1, length - index0
        self.first, self.last = index0 == 0, index0 == length - 1


@functools.cache
def _loop_places(length: int) -> tuple[LoopPlace, ...]:
    return tuple(LoopPlace(index0, length) for index0 in range(length))


def _loop(items: Any, undefined: Any) -> Iterable[tuple[Any, Any]]:
    """Items with their loop variables."""
    if type(items) is list and len(items) <= _MOST_PLACES:
        return zip(items, _loop_places(len(items)), strict=True)
    return LoopContext(items, undefined)


def _loads_of(name: str, node: nodes.Node) -> list[nodes.Name]:
    """Where a name is read in a statement."""
    own = [node] if isinstance(node, nodes.Name) else []
    return [n for n in (*own, *node.find_all(nodes.Name)) if n.name == name and n.ctx == "load"]


def _is_plain(call: nodes.Call) -> bool:
    """Whether a call gives names only, ones that Python takes and that namespaces let through."""
    return not call.args and not any(pair.key.startswith("_") or iskeyword(pair.key) for pair in call.kwargs)


class ShortcutGenerator(CodeGenerator):
    """Compiles templates with the shortcuts."""

    _loop_call: str | None = None
    """What the next loop is to call instead of `LoopContext`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        """A loop."""
        uses = [n for inner in node.body for n in _loads_of("loop", inner)]
        places = [n.node for inner in node.body for n in inner.find_all(nodes.Getattr) if n.attr in _PLACE]
        knows_place_alone = all(any(use is place for place in places) for use in uses)
        self._loop_call = f"environment.{_LOOP}(" if knows_place_alone and not node.recursive else None
        super().visit_For(node, frame)

    def write(self, x: str) -> None:
        """Write a piece of the program."""
        if self._loop_call is not None and x.endswith(" in LoopContext("):
            x = x.removesuffix("LoopContext(") + self._loop_call
            self._loop_call = None
        super().write(x)

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """`value.name`."""
        if node.attr.startswith("_") or node.attr in _DICT_NAMES:
            super().visit_Getattr(node, frame)
            return
        value, name = self._source(node.node, frame), repr(node.attr)
        is_loop = isinstance(node.node, nodes.Name) and node.node.name == "loop" and _LOCAL.match(value)
        if is_loop and node.attr in _PLACE:
            known = f"{value}.{node.attr} if type({value}) in environment.{_LOOPS}"
            self.write(f"({known} else environment.getattr({value}, {name}))")
            return
        self._write_key(value, node.attr, _GET)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """`value['name']`."""
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) and node.arg.value not in _DICT_NAMES:
            self._write_key(self._source(node.node, frame), node.arg.value, "getitem")
            return
        super().visit_Getitem(node, frame)

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:
        """`value is name`."""
        form = _TESTS.get(node.name)
        if (
            form is not None
            and self.environment.tests.get(node.name) is TESTS[node.name]
            and not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
            and isinstance(node.node, (nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Call))
        ):
            self.write(form.format(self._source(node.node, frame)))
            return
        super().visit_Test(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        """`value.method(...)` and `namespace(...)`."""
        method = node.node
        if node.dyn_args or node.dyn_kwargs or forward_caller:
            pass
        elif isinstance(method, nodes.Name) and method.name == "namespace" and _is_plain(node):
            value = self._source(method, frame)
            given = ", ".join(f"{pair.key}={self._source(pair.value, frame)}" for pair in node.kwargs)
            self.write(f"(environment.{_NAMESPACE}({given}) if {value} is environment.{_NAMESPACE_TYPE} ")
            self.write(f"else environment.call(context, {value}, {given}))")
            return
        elif (
            isinstance(method, nodes.Getattr)
            and method.attr in (*_STR_METHODS, *_DICT_METHODS)
            and not node.kwargs
            # a name or a constant cannot fail, so it makes no difference that it is looked up before the method
            and all(isinstance(arg, (nodes.Const, nodes.Name)) for arg in node.args)
        ):
            kind = "str" if method.attr in _STR_METHODS else "dict"
            value, args = self._source(method.node, frame), [self._source(arg, frame) for arg in node.args]
            self.write(f"({_VALUE}.{method.attr}({', '.join(args)}) if type({_VALUE} := {value}) is {kind} ")
            self.write(f"else environment.{_CALL}({', '.join(['context', _VALUE, repr(method.attr), *args])}))")
            return
        super().visit_Call(node, frame, forward_caller=forward_caller)

    def _write_key(self, value: str, name: str, otherwise: str) -> None:
        """`value[name]` of a dict, its undefined where it is not there, and who is asked about other values."""
        absent = f"{_ABSENT}{name.encode('utf-8', 'surrogatepass').hex()}"
        # An undefined shows no more of its dict than that it is one, so one for each name will do.
        setattr(self.environment, absent, self.environment.undefined(obj={}, name=name))
        begin = value
        if not _LOCAL.match(value):
            begin, value = f"({_VALUE} := {value})", _VALUE
        self.write(f"(({value}[{name!r}] if {name!r} in {value} else environment.{absent}) ")
        self.write(f"if type({begin}) is dict else environment.{otherwise}({value}, {name!r}))")

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
    namespace: Any = environment.globals["namespace"]
    known = issubclass(namespace, Namespace) and namespace.__getattribute__ is Namespace.__getattribute__
    setattr(environment, _GET, _attribute_getter(environment) if known else environment.getattr)
    setattr(environment, _NAMESPACE_TYPE, namespace)
    setattr(environment, _NAMESPACE, _namespace_maker(namespace) if known else namespace)
    setattr(environment, _CALL, _method_caller(environment))
    setattr(environment, _LOOP, _loop)
    setattr(environment, _LOOPS, (LoopPlace, LoopContext))
    original = environment.filters.get("tojson")
    encoder = json.JSONEncoder(ensure_ascii=False)
    if original is not None and original(_JSON_PROBE) == encoder.encode(_JSON_PROBE):
        environment.filters = {**environment.filters, "tojson": _to_json(original, encoder)}


def _attribute_getter(environment: Environment) -> Callable[[Any, str], Any]:
    """Attributes of what is no exact dict."""
    slow = environment.getattr
    kind: Any = environment.globals["namespace"]
    attributes: Callable[[Any, str], dict[str, Any]] = object.__getattribute__
    missing = object()

    def get(value: Any, name: str) -> Any:
        if type(value) is kind:
            found = attributes(value, _ATTRIBUTES).get(name, missing)
            if type(found) in _PLAIN:
                return found
        return slow(value, name)

    return get


def _namespace_maker(kind: Any) -> Callable[..., Any]:
    """Namespaces with names that need no check."""

    def namespace(**values: Any) -> Any:
        made = kind.__new__(kind)
        setattr(made, _ATTRIBUTES, values)
        return made

    return namespace


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
