"""Turn marks: calls put into a template's syntax tree that tell which message wrote which characters.

At the start of every for-loop body that writes, and after `set x = ...` inside such a loop, the template is made to
write a mark when the value *is* (by identity) one of the conversation's messages. Cutting the marks out of the
render gives back the plain text, since templates cannot read what they have written, and the messages that wrote it.
A mark is one character that texts do not hold, the number of its event, and that character again; `cut` compares the
numbers it finds with the events that happened, so a text that does hold the character is noticed and never misread.

Scopes are levels of a stack: a mark first closes what was open at its own place in the template, so `continue` and
`break` need no care; a loop closes its level once when it is over.

Price: about 0.3 microseconds a mark; memory for the pieces of one render. Text that a template captures (in a macro
or a `set` block) may be changed before it is written, and a mark in it could change the outcome; so nothing is marked
there but a real message, and `MarkWriter.captured` then says that this render must be compared with the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import Environment, nodes

OPEN = "packsvc_turn_opens_"
CLOSE = "packsvc_turn_closes_"

NOT_MESSAGES = frozenset({"tools", "documents"})
"""Names whose elements are never messages: loops over them need no marks."""
_NOWHERE = 0
"""No place has this number."""
_FIELDS = frozenset({"tool_calls", "content", "arguments", "function", "parameters", "properties", "required"})


def add_marks(tree: nodes.Template) -> int:
    """Put turn marks into `tree`, in place; returns the number of places that write them."""
    places = _Places()
    _mark_body(tree.body, places)
    return places.count


class _Places:
    def __init__(self) -> None:
        self.count = 0
        self.capturing = 0
        self.loops = 0

    def next(self) -> int:
        """A new place; odd ones stand in text that the template captures."""
        self.count += 1
        return 2 * self.count + (self.capturing > 0)


def _mark_body(body: list[nodes.Node], places: _Places) -> None:
    """Mark a list of statements: loops that write, and inside those, assignments that may name a message."""
    out: list[nodes.Node] = []
    assigned: list[int] = []
    for node in body:
        after: list[nodes.Node] = []
        if isinstance(node, nodes.For):
            after = _mark_loop(node, places)
        elif isinstance(node, nodes.Assign) and places.loops and _may_name_message(node.node):
            for name in _target_names(node.target):
                place = places.next()
                assigned.append(place)
                after.append(_open(place, name))
        elif isinstance(node, (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock)):
            if isinstance(node, nodes.CallBlock) and _is_generation(node):
                _mark_body(node.body, places)
            else:
                _captured_bodies(node, places)
        else:
            for inner in _bodies(node):
                _mark_body(inner, places)
        out.append(node)
        out.extend(after)
    out.extend(_close(place) for place in reversed(assigned))
    body[:] = out


def _mark_loop(loop: nodes.For, places: _Places) -> list[nodes.Node]:
    """Mark one loop; returns what has to follow it."""
    writes = any(_writes(output) for output in loop.find_all(nodes.Output))
    places.loops += writes
    for inner in (loop.body, loop.else_):
        _mark_body(inner, places)
    places.loops -= writes
    if not writes or not _may_yield_messages(loop.iter):
        return []
    after: list[nodes.Node] = []
    for name in _target_names(loop.target):
        place = places.next()
        loop.body.insert(0, _open(place, name))
        after.append(_close(place))
    return after


def _captured_bodies(node: nodes.Node, places: _Places) -> None:
    loops, places.loops = places.loops, 0 if isinstance(node, nodes.Macro) else places.loops
    places.capturing += 1
    for inner in _bodies(node):
        _mark_body(inner, places)
    places.capturing -= 1
    places.loops = loops


def _bodies(node: nodes.Node) -> Iterator[list[nodes.Node]]:
    for field in ("body", "else_"):
        inner = getattr(node, field, None)
        if isinstance(inner, list):
            yield inner
    for branch in getattr(node, "elif_", ()):
        yield from _bodies(branch)


def _writes(output: nodes.Output) -> bool:
    """False for an output that only raises: a loop that checks roles writes nothing."""
    return not all(
        isinstance(child, nodes.Call) and isinstance(child.node, nodes.Name) and child.node.name == "raise_exception"
        for child in output.nodes
    )


def _may_yield_messages(source: nodes.Node) -> bool:
    """False where a loop runs over parts of a message or over tools, whose elements are never messages."""
    if isinstance(source, nodes.Name):
        return source.name not in NOT_MESSAGES
    if isinstance(source, nodes.Getattr):
        return source.attr not in _FIELDS
    if isinstance(source, nodes.Getitem) and isinstance(source.arg, nodes.Const):
        return source.arg.value not in _FIELDS
    if isinstance(source, nodes.Filter):
        return source.name != "dictsort"
    if isinstance(source, nodes.Call) and isinstance(source.node, nodes.Getattr):
        return source.node.attr not in ("items", "split", "keys")
    return not (isinstance(source, nodes.Call) and isinstance(source.node, nodes.Name) and source.node.name == "range")


def _may_name_message(value: nodes.Node) -> bool:
    """False where a value is built or read in a way that never gives a message itself."""
    if isinstance(value, nodes.Getattr):  # of the loop or of a namespace; a field of a message is no message
        return value.attr in ("previtem", "nextitem") or (
            isinstance(value.node, nodes.Name) and value.node.name.startswith(("ns", "state", "namespace"))
        )
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Const):
        return not isinstance(value.arg.value, str)
    if isinstance(value, nodes.Filter) and value.node is not None:
        return value.name in ("first", "last", "random") or (value.name == "default" and _may_name_message(value.node))
    if isinstance(value, nodes.CondExpr):
        return _may_name_message(value.expr1) or (value.expr2 is not None and _may_name_message(value.expr2))
    if isinstance(value, (nodes.And, nodes.Or)):
        return _may_name_message(value.left) or _may_name_message(value.right)
    return isinstance(value, (nodes.Name, nodes.Getitem))


def _target_names(target: nodes.Node) -> list[str]:
    if isinstance(target, nodes.Name):
        return [target.name]
    if isinstance(target, nodes.Tuple):
        return [name for item in target.items for name in _target_names(item)]
    return []


def _is_generation(node: nodes.CallBlock) -> bool:
    """`{% generation %}` hands its text on as it is."""
    call = node.call
    return isinstance(call, nodes.Call) and isinstance(call.node, nodes.ExtensionAttribute)


def _open(place: int, name: str) -> nodes.Node:
    return _output(nodes.Filter(nodes.Name(name, "load"), OPEN, [nodes.Const(place)], [], None, None))


def _close(place: int) -> nodes.Node:
    # Given a name to work on, though it needs none: a filter of constants would be worked out when compiling.
    return _output(nodes.Filter(nodes.Name("messages", "load"), CLOSE, [nodes.Const(place)], [], None, None))


def _output(value: nodes.Expr) -> nodes.Node:
    return nodes.Output([value])


class MarkWriter:
    """Writes the marks of one render at a time; not for several threads."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.captured = False
        """A message was marked inside text that the template captures."""
        self._marks: list[str] = []
        self._numbers: list[str] = []
        self._grow(64)
        self.begin([])

    def begin(self, messages: list[Any]) -> None:
        self.captured = False
        self._events: list[tuple[int, int]] = []
        self._used: set[int] = set()
        self._index = {id(message): i for i, message in enumerate(messages)}

    def opens(self, value: Any, place: int) -> str:
        """Filter: `place` is entered with `value`."""
        message = self._index.get(id(value), -1)
        if message < 0:
            if place not in self._used:
                return ""
        else:
            self._used.add(place)
            if place & 1:
                self.captured = True
        events = self._events
        n = len(events)
        events.append((place, message))
        if n >= len(self._marks):
            self._grow(2 * n)
        return self._marks[n]

    def closes(self, _: Any, place: int) -> str:
        """Filter: `place` is left."""
        return self.opens(None, place)

    def cut(self, text: str) -> tuple[str, list[tuple[int, int, int]]] | None:
        """The text without its marks, and (message, start, end) of its regions.

        None when the marks in the text are not exactly those written, in order.
        """
        pieces = text.split(self.marker)
        events = self._events
        n = len(events)
        if len(pieces) != 2 * n + 1 or pieces[1::2] != self._numbers[:n]:
            return None
        texts = pieces[0::2]
        return "".join(texts), _regions(texts, events)

    def _grow(self, size: int) -> None:
        for n in range(len(self._marks), size):
            self._numbers.append(str(n))
            self._marks.append(f"{self.marker}{n}{self.marker}")


def _regions(texts: list[str], events: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(message, start, end) of the runs of characters that one message wrote."""
    regions: list[tuple[int, int, int]] = []
    below: list[tuple[int, int]] = []
    place, now = _NOWHERE, -1  # the innermost level that is open, and its message
    owner, begun, position = -1, 0, len(texts[0])
    for (at, message), text in zip(events, texts[1:], strict=True):
        if at == place:
            if message < 0:
                place, now = below.pop()
            else:
                now = message
        else:
            if any(at == outer for outer, _ in below):
                while place != at:
                    place, now = below.pop()
                place, now = below.pop()
            if message >= 0:
                below.append((place, now))
                place, now = at, message
        if now != owner:
            if owner >= 0 and position > begun:
                regions.append((owner, begun, position))
            owner, begun = now, position
        position += len(text)
    if owner >= 0 and position > begun:
        regions.append((owner, begun, position))
    return regions


def install(environment: Environment, writer: MarkWriter) -> None:
    """Let templates of `environment` write the marks of `writer`."""
    environment.filters = {**environment.filters, OPEN: writer.opens, CLOSE: writer.closes}
