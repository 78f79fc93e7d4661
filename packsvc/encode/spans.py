"""Response spans: the characters of a render that the model itself must produce.

A turn begins where its generation prompt ends: what the template writes behind the previous turn when it is asked
for `add_generation_prompt`. The prompt is looked up once for each kind of previous turn where the template's tail
reads nothing that could differ, and rendered anew for each turn where it does (a namespace, the messages).
A turn ends with the control token by which the template ends the message, or, where no token of its own ends it, with
the next role marker. Nothing is searched for in content: control tokens typed by people are refused or passed in as
ranges to be ignored.

Price: a few string comparisons a turn; one more render a turn for templates whose prompt depends on earlier turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import nodes

from packsvc.encode.controls import REASONING_HEADS, Controls, after_empty_reasoning, is_prefill, is_structure
from packsvc.encode.row import Range, Row
from packsvc.encode.template import ClockAskedError, Marked, TurnTemplate
from packsvc.types import JsonDict

STAND_INS: tuple[list[JsonDict], ...] = (
    [{"role": "user", "content": "x"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
)
"""Conversations to ask for a constant generation prompt, where the real beginning cannot be rendered alone."""


class UnderivableError(Exception):
    """Start or stop of a turn cannot be told exactly."""


class GenerationPrompts:
    """What stands between the end of the previous turn and the first character that the model writes."""

    def __init__(self, template: TurnTemplate) -> None:
        self._template = template
        self.constant, self._in_loop = _tail_dependence(template.tree)
        self._known: dict[tuple[Any, bool], str | None] = {}
        self.only: str | None = None
        """The prompt of every turn, where only the template's tail writes it and that is constant."""

    def before(self, messages: list[JsonDict], index: int, tools: Any) -> str | None:
        """The prompt of turn `index`; None where it cannot be told."""
        if self.only is not None:
            return self.only
        if not self.constant:
            return self._ask(messages[:index], tools)
        previous = messages[index - 1] if index else {}
        key = (previous.get("role"), bool(previous.get("tool_calls")))
        if key not in self._known:
            prompt = self._ask(messages[:index], tools) if index else None
            for stand_in in STAND_INS:
                if prompt is None:
                    prompt = self._ask(stand_in, None)
            self._known[key] = prompt
            if self.constant and not self._in_loop:
                self.only = prompt
        return self._known[key]

    def _ask(self, messages: list[JsonDict], tools: Any) -> str | None:
        try:
            asked = self._template.marked(messages, tools, add_generation_prompt=True)
            if asked is None:
                return None
            if not asked.regions:
                plain = self._template.plain(messages, tools)
                return asked.text[len(plain) :] if plain and asked.text.startswith(plain) else None
            tail = asked.text[asked.regions[-1][2] :]
            if self._in_loop:
                tail = self._written_in_loop(messages, tools, asked) + tail
            return tail
        except ClockAskedError:
            raise
        except Exception:  # a template is foreign code: this beginning cannot be rendered, whatever it raised
            return None

    def _written_in_loop(self, messages: list[JsonDict], tools: Any, asked: Marked) -> str:
        """What the last message's own region holds more when a prompt is asked for."""
        plain = self._template.marked(messages, tools)
        if plain is None or not plain.regions:
            return ""
        _, start, end = asked.regions[-1]
        _, plain_start, plain_end = plain.regions[-1]
        mine, other = asked.text[start:end], plain.text[plain_start:plain_end]
        if len(mine) > len(other) and mine.startswith(other):
            self.constant = False
            self._known.clear()
            self.only = None
            return mine[len(other) :]
        return ""


class TurnSpans:
    """Start and end of assistants' turns in the renders of one template.

    Args:
        stops: Tokens known to stop turns.
        any_stop: Take any control token that follows a turn for its stop.
    """

    def __init__(self, template: TurnTemplate, controls: Controls, *, stops: set[str], any_stop: bool) -> None:
        self.prompts = GenerationPrompts(template)
        self.stops = stops
        self._controls = controls
        self._any_stop = any_stop
        self._ending = ""
        self._ending_stop = ""

    def usual(self, row: Row, index: int) -> Range | None:
        """(start, end) of a turn that is just like most: the prompt before it, the stop of the turn before behind it.

        None where it is not, or something was typed that could look like a stop: then `of` looks closely. Equal to
        what `of` gives, since nothing but the stop can end there if no token, and no white space, ends before it; a
        token right before it that closes a tool call stops nothing where the one behind it is a known stop.
        """
        hull, prompt, ending = row.hulls[index], self.prompts.only, self._ending
        if hull is None or prompt is None or not ending or row.is_split(index):
            return None
        text = row.text
        begin, end = hull
        start, before = begin + len(prompt), end - len(ending)
        if not (start < before and text.startswith(prompt, begin) and text.endswith(ending, start, end)):
            return None
        if text[start] in REASONING_HEADS:
            start = after_empty_reasoning(text, start, end)
            if start >= before:
                return None
        if self._controls.ends_plainly(text, start, before) or self._ends_in_structure(text, start, before):
            return start, before + len(self._ending_stop)
        return None

    def _ends_in_structure(self, text: str, start: int, end: int) -> bool:
        """Whether one token that stops nothing ends at `end`, right before a known stop, and plain text before it."""
        token = self._controls.ending_at(text, start, end)
        return (
            token is not None
            and not self._any_stop
            and token not in self.stops
            and self._ending_stop in self.stops
            and self._controls.is_unambiguous(token)
            and self._controls.ends_plainly(text, start, end - len(token))
        )

    def of(self, row: Row, index: int, typed: Sequence[Range]) -> list[tuple[int, int, str | None]]:
        """(start, end, stop) of each run of characters that the model itself writes in one turn.

        Raises:
            UnderivableError: Start or stop cannot be told exactly.
        """
        found: list[tuple[int, int, str | None]] = []
        for begin, end in row.runs(index):
            if not found:
                start = self._start(row, index, begin, end)
            elif self._controls.ending_at(row.text, 0, begin):
                start = begin
            else:
                raise UnderivableError("it goes on after text of another message")
            stop, token, borrowed = self.end(row.text, start, end, typed)
            if token is None:
                stop = _unstopped_end(row, index, start, end)
            elif borrowed and not self._any_stop and token not in self.stops:
                raise UnderivableError(f"the template ends it with no token of its own, before {token!r}")
            found.append((start, stop, token))
        if not found and (row.messages[index].get("content") or row.messages[index].get("tool_calls")):
            raise UnderivableError("the template does not write it message by message")
        return found

    def _start(self, row: Row, index: int, begin: int, end: int) -> int:
        prompt = self.prompts.before(row.messages, index, row.tools)
        if prompt is None:
            raise UnderivableError("its generation prompt cannot be rendered")
        return turn_start(row.text, begin, end, prompt, self._controls)

    def end(self, text: str, start: int, end: int, typed: Sequence[Range]) -> tuple[int, str | None, bool]:
        """(end, stop, borrowed) of a turn whose own text begins at `start` and that the template wrote up to `end`.

        A token that closes a tool call or reasoning stops nothing, unless it is one of the known stops.
        """
        run = _trailing_controls(text, start, end, self._controls, typed)
        place = self._stop_in(text, run)
        if place is not None:
            token = text[place[0] : place[1]]
            if len(run) == 1 and self._controls.is_unambiguous(token):
                self._ending, self._ending_stop = text[place[0] : end], token
            return place[1], token, False
        following = self._controls.next_after(text, end)
        if following is not None and not _overlaps(typed, *following):
            return following[1], text[following[0] : following[1]], True
        return end, None, False

    def _stop_in(self, text: str, run: list[Range]) -> Range | None:
        """Which of the control tokens that end a turn stops it.

        The last of those that stand side by side, and of several such groups the first: what a template writes after
        a line break is not the model's. Where the content is white space alone, the header stands among them; the
        known stops tell it apart.
        """
        ends = [place for i, place in enumerate(run) if i + 1 == len(run) or run[i + 1][0] != place[1]]
        known = [place for place in ends if text[place[0] : place[1]] in self.stops]
        others = [place for place in ends if not is_structure(text[place[0] : place[1]])]
        if self._any_stop:
            return min([*known, *others], default=None)
        return known[0] if known else max(others, default=None)


def turn_start(text: str, start: int, end: int, prompt: str, controls: Controls) -> int:
    """Where the model's own text begins in a turn that the template wrote at [start, end).

    Raises:
        UnderivableError: The prompt does not stand there, nor does its header.
    """
    if text.startswith(prompt, start):
        begin = start + len(prompt)
    else:
        begin = _start_by_parts(text, start, end, prompt, controls)
    if begin >= end:
        if begin == end:
            return begin
        raise UnderivableError("its generation prompt is longer than the turn")
    return after_empty_reasoning(text, begin, end)


def _start_by_parts(text: str, start: int, end: int, prompt: str, controls: Controls) -> int:
    for k in range(1, len(prompt) + 1):  # the prompt may begin in what the previous turn wrote
        if text.endswith(prompt[:k], 0, start) and text.startswith(prompt[k:], start):
            return start + len(prompt) - k
    edges = [stop for _, stop in controls.positions(prompt)]
    if edges:  # other text may stand before it in the region, such as a default system message
        first = text.find(prompt, start, end)
        if first >= 0:
            return first + len(prompt)
    same = 0
    while same < len(prompt) and start + same < end and prompt[same] == text[start + same]:
        same += 1
    header = [cut for cut in _edges(prompt, edges) if cut <= same and is_prefill(prompt[cut:])]
    if not header:
        raise UnderivableError(f"the generation prompt {prompt!r} does not stand before it")
    return start + max(header)


def _edges(prompt: str, ends: list[int]) -> list[int]:
    """Ends of control tokens and of lines in a prompt."""
    return [*ends, *(i + 1 for i, character in enumerate(prompt) if character == "\n" and ends and i >= ends[0])]


def _trailing_controls(text: str, start: int, end: int, controls: Controls, typed: Sequence[Range]) -> list[Range]:
    """The control tokens, white space between them apart, with which the characters [start, end) end."""
    run: list[Range] = []
    position = end
    while True:
        last = position
        if text[position - 1 : position].isspace():
            last = start + len(text[start:position].rstrip())
        token = controls.ending_at(text, start, last)
        if token is None or _overlaps(typed, last - len(token), last):
            return run[::-1]
        position = last - len(token)
        run.append((position, last))


def _unstopped_end(row: Row, index: int, start: int, end: int) -> int:
    """Where a last turn ends that nothing stops: with its content, white space of the template left out."""
    text, content = row.text, row.messages[index].get("content")
    if text[end:].strip():
        raise UnderivableError("no control token stops it")
    if type(content) is str and content and text.endswith(content, start, end):
        return end
    return start + len(text[start:end].rstrip())


def _overlaps(ranges: Sequence[Range], start: int, end: int) -> bool:
    return any(a < end and start < b for a, b in ranges)


def _tail_dependence(tree: nodes.Template) -> tuple[bool, bool]:
    """Whether what follows the messages is the same for every conversation, and whether loops ask for the prompt.

    The first is shown by names: the statements behind the last loop that writes read nothing but names that no
    statement assigns, or that are assigned from such names outside loops and conditions on others.
    """
    last = max(
        (i for i, n in enumerate(tree.body) if isinstance(n, nodes.For) and next(n.find_all(nodes.Output), None)),
        default=-1,
    )
    tail, head = tree.body[last + 1 :], tree.body[: last + 1]
    in_loop = any("add_generation_prompt" in _names(n) for n in head if not _sets_the_prompt_alone(n))
    assigned = _stored(tree)
    constant = _constant_names(tree, assigned)
    varying = (assigned - constant) | {"messages", "loop", "tools", "documents"}
    read = {name for node in tail for name in _names(node)}
    macros = {macro.name: _names(macro) for macro in tree.find_all(nodes.Macro)}
    while more := {name for called in read & macros.keys() for name in macros[called]} - read:
        read |= more
    loops = any(isinstance(n, nodes.For) or next(n.find_all(nodes.For), None) for n in tail)
    return not loops and not read & varying, in_loop


def _sets_the_prompt_alone(node: nodes.Node) -> bool:
    """Whether a statement writes nothing and gives no value to anything but `add_generation_prompt`, as defaults do."""
    return _stored(node) == {"add_generation_prompt"} and next(node.find_all(nodes.Output), None) is None


def _constant_names(tree: nodes.Template, assigned: set[str]) -> set[str]:
    """Names whose every assignment stands outside loops and reads only constant names."""
    constant = set(assigned)
    varying = {"messages", "loop", "tools", "documents"}
    while True:
        bad: set[str] = set()
        for node in tree.body:
            bad |= _varying_assignments(node, varying | (assigned - constant), False)
        if not bad & constant:
            return constant
        constant -= bad


def _varying_assignments(node: nodes.Node, varying: set[str], inside: bool) -> set[str]:
    """Names that `node` may give a value that differs between conversations."""
    if isinstance(node, nodes.If):
        inside = inside or bool(_names(node.test) & varying)
        branches = [*node.body, *node.else_, *node.elif_]
        return {name for child in branches for name in _varying_assignments(child, varying, inside)}
    if isinstance(node, nodes.Assign):
        differs = inside or bool(_names(node.node) & varying) or not isinstance(node.target, nodes.Name)
        return _stored(node) if differs else set()
    if isinstance(node, nodes.Macro):
        return set()
    return _stored(node)


def _stored(node: nodes.Node) -> set[str]:
    """Names that statements in `node` assign to, namespaces by their own name."""
    names = {n.name for n in node.find_all(nodes.Name) if n.ctx == "store"}
    return names | {n.name for n in node.find_all(nodes.NSRef)}


def _names(node: nodes.Node) -> set[str]:
    found = {n.name for n in node.find_all(nodes.Name) if n.ctx == "load"}
    if isinstance(node, nodes.Name):
        found.add(node.name)
    return found
