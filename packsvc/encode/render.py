"""From a conversation to text and the characters of it that are learned.

    messages, tools -> prepared -> marked render -> text, regions -> checks -> spans

One render a row in the usual case; the checks are searches at memory speed. Whatever cannot be told exactly is
refused with a reason (`RowRefused`), never guessed. What the audit of the template decided comes in as `Decisions`.
One renderer serves one thread.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from packsvc.config.job import ControlTokens, DroppedReasoning, TrainOn
from packsvc.encode.controls import Controls
from packsvc.encode.messages import canonical_json, prepare_messages
from packsvc.encode.presence import Presence, reasoning_text, stands
from packsvc.encode.rendered import Decisions, Rendered, RowRefused, Span
from packsvc.encode.spans import GenerationPrompts, UnderivableError, turn_end, turn_start
from packsvc.encode.substitute import holds_frame, lay_over, stand_in
from packsvc.encode.template import ClockAskedError, Marked, TurnTemplate
from packsvc.types import JsonDict, Reason

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Known whatever the template; any other must be a word that the template itself knows."""

_Ranges = tuple[tuple[int, int], ...]


class Renderer:
    """Renders conversations with one template and tells what of them is learned.

    Args:
        tokenizer: transformers' tokenizer, for its special tokens.
        template: Jinja source.
        control_tokens: Special tokens and turn markers, as text.
        template_kwargs: Passed to the template.
        date: What the template sees as today.
        train_on, dropped_reasoning, control_policy: As in the job.
        decisions: What the audit found.
        any_stop: Let any role marker that follows a turn stop it; for the audit, which finds out which do.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str,
        control_tokens: Iterable[str],
        template_kwargs: Mapping[str, Any],
        date: datetime.date | None,
        train_on: TrainOn | str = TrainOn.ASSISTANT,
        dropped_reasoning: DroppedReasoning | str = DroppedReasoning.NO_LOSS,
        control_policy: ControlTokens | str = ControlTokens.REJECT,
        decisions: Decisions | None = None,
        any_stop: bool = False,
    ) -> None:
        self.template = TurnTemplate(template, variables={**tokenizer.special_tokens_map, **template_kwargs}, date=date)
        self.controls = Controls(control_tokens)
        self.decisions = decisions if decisions is not None else Decisions()
        self.known_stops = {*self.decisions.stops, str(tokenizer.eos_token)}
        self._any_stop = any_stop
        self._train_on = TrainOn(train_on)
        self._dropped = DroppedReasoning(dropped_reasoning)
        self._policy = ControlTokens(control_policy)
        self._prompts = GenerationPrompts(self.template)
        self._presence = Presence(self._is_shown)
        self._known_words = ROLES | self.template.words

    def plain(
        self, messages: list[JsonDict], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text alone, equal to `apply_chat_template(messages, tools=tools, tokenize=False)`."""
        prepared = prepare_messages(messages, self.decisions)
        try:
            return self.template.plain(prepared, tools, add_generation_prompt=add_generation_prompt)
        except ClockAskedError:
            raise
        except Exception as error:
            raise _template_error(error) from error

    def canonical(self, messages: list[JsonDict], tools: list[Any] | None = None) -> bytes:
        """Canonical JSON of messages and tools as the template sees them."""
        return canonical_json(prepare_messages(messages, self.decisions), tools)

    def render(
        self,
        messages: list[JsonDict],
        tools: list[Any] | None = None,
        weights: Sequence[float | None] = (),
        part_weights: Sequence[tuple[float | None, ...] | None] = (),
    ) -> Rendered:
        """Render one conversation.

        Args:
            messages: In canonical form.
            tools: Tool schemas, verbatim.
            weights: For each message what it says itself, None where it says nothing; may be empty.
            part_weights: For each message the same for its content parts; may be empty.

        Raises:
            RowRefused: It cannot be rendered or masked exactly.
        """
        prepared = prepare_messages(messages, self.decisions)
        for index, message in enumerate(prepared):
            if message["role"] not in self._known_words:
                raise RowRefused(Reason.UNKNOWN_ROLE, f"message {index} has the role {message['role']!r}")
        typed = self._find_typed(prepared, tools)
        marked = self._marked(prepared, tools)
        row = _Row(prepared, tools, marked)
        self._presence.check(prepared, tools, marked.text, row.hulls)
        controls = self._place_typed(row) if typed else ()
        return self._spans(row, weights, part_weights, messages, controls)

    @property
    def has_no_prompt(self) -> bool:
        """The template shows no generation prompt for a question."""
        return not self._prompts.before([{"role": "user", "content": "x"}], 1, None)

    def stops(self, rendered: Rendered) -> list[tuple[int, str, bool]]:
        """(end, token, borrowed) of each learned span of a render that a control token stops."""
        found: list[tuple[int, str, bool]] = []
        for span in rendered.spans:
            token = self.controls.ending_at(rendered.text, span.start, span.end)
            if token is not None:
                mine = any(m == span.message and a < span.end <= b for m, a, b in rendered.regions)
                found.append((span.end, token, not mine))
        return found

    def _marked(self, messages: list[JsonDict], tools: Any) -> Marked:
        try:
            marked = self.template.marked(messages, tools)
        except ClockAskedError:
            raise
        except Exception as error:  # foreign code: whatever it raises is its answer to this row
            raise _template_error(error) from error
        if marked is None:
            raise RowRefused(Reason.MASK_UNDERIVABLE, "the template changes text of messages after it has written it")
        return marked

    # ---------------------------------------------------------------- control tokens typed by people

    def _find_typed(self, messages: list[JsonDict], tools: Any) -> bool:
        find = self.controls.find_in
        found = next(
            (
                (f"message {index} ({message['role']}), {key}", token)
                for index, message in enumerate(messages)
                for key, value in message.items()
                if (token := find(value)) is not None
            ),
            None,
        )
        if found is None and tools and (token := find(tools)) is not None:
            found = ("a tool schema", token)
        if found is None:
            return False
        if self._policy is ControlTokens.REJECT:
            raise RowRefused(Reason.CONTROL_TOKENS, f"the text of a control token, {found[1]!r}, stands in {found[0]}")
        return True

    def _place_typed(self, row: _Row) -> _Ranges:
        """Where in the text the typed control tokens stand."""
        originals: list[str] = []

        def swap(value: Any) -> Any:
            if type(value) is str and self.controls.find(value):
                pieces, last = [], 0
                for start, stop in self.controls.positions(value):
                    pieces += [value[last:start], stand_in(len(originals))]
                    originals.append(value[start:stop])
                    last = stop
                return "".join([*pieces, value[last:]])
            if type(value) is dict:
                return {k: swap(v) for k, v in value.items()}
            if type(value) is list:
                return [swap(item) for item in value]
            return value

        swapped = [{k: v if k == "role" else swap(v) for k, v in m.items()} for m in row.messages]
        places = self._lay_over(row, swapped, swap(row.tools), originals, exact=True)
        if places is None or self.controls.find_in([m["role"] for m in row.messages]):
            raise RowRefused(
                Reason.CONTROL_TOKENS, "control tokens are typed where the template does not render them as they stand"
            )
        return tuple(places)

    def _lay_over(
        self, row: _Row, messages: list[JsonDict], tools: Any, originals: list[str], *, exact: bool = False
    ) -> list[tuple[int, int]] | None:
        if holds_frame(row.text):
            return None
        try:
            skeleton = self.template.plain(messages, tools)
        except ClockAskedError:
            raise
        except Exception:  # the template does not take the stand-ins
            return None
        return lay_over(skeleton, row.text, originals, exact=exact)

    def _is_shown(self, messages: list[JsonDict], tools: Any, index: int) -> bool:
        """Whether the content of a message appears in the render at all."""
        swapped = [{**m, "content": stand_in(0)} if i == index else m for i, m in enumerate(messages)]
        try:
            return stand_in(0) in self.template.plain(swapped, tools)
        except ClockAskedError:
            raise
        except Exception:
            return False

    # ---------------------------------------------------------------- spans

    def _spans(
        self,
        row: _Row,
        weights: Sequence[float | None],
        part_weights: Sequence[tuple[float | None, ...] | None],
        messages: list[JsonDict],
        typed: _Ranges,
    ) -> Rendered:
        last = max((i for i, m in enumerate(row.messages) if m["role"] == "assistant"), default=-1)
        paint = _Paint()
        dropped = unstopped = 0
        if self._train_on is TrainOn.ALL:
            paint.add(0, len(row.text), 1.0, -1)
        for index, message in enumerate(row.messages):
            said = weights[index] if weights else None
            parts = part_weights[index] if part_weights else None
            is_assistant = message["role"] == "assistant"
            weight = said if said is not None else self._default(is_assistant, index == last)
            is_trained = weight > 0 or (parts is not None and any(parts))
            if is_trained and is_assistant and self._dropped is DroppedReasoning.NO_LOSS and row.lost_reasoning(index):
                dropped += 1
                weight, said, parts = 0.0, 0.0, None
            if self._train_on is TrainOn.ALL:
                if said is not None:
                    self._paint_whole(paint, row, index, said)
            elif weight > 0:
                unstopped += self._paint_turn(paint, row, index, weight, typed)
            if parts is not None and any(p is not None and p != weight for p in parts):
                self._paint_parts(paint, row, index, parts, messages[index])
        return Rendered(
            text=row.text,
            spans=paint.spans(),
            typed_controls=typed,
            reasoning_dropped=dropped,
            turns_without_stop=unstopped,
            regions=tuple(row.regions),
        )

    def _default(self, is_assistant: bool, is_last: bool) -> float:
        if self._train_on is TrainOn.ALL:
            return 1.0
        return float(is_assistant and (is_last or self._train_on is TrainOn.ASSISTANT))

    def _paint_turn(self, paint: _Paint, row: _Row, index: int, weight: float, typed: _Ranges) -> int:
        """Paint the response span of a trained turn; returns how many of its runs nothing stops."""
        message = row.messages[index]
        runs = row.runs(index)
        if not runs and message["role"] == "assistant":
            if message.get("content") or message.get("tool_calls"):
                raise _underivable(index, "the template does not write it message by message")
            return 0
        if message["role"] != "assistant":
            start, end = self._content_start(row, index)
            stop, _, borrowed = turn_end(row.text, start, end, self.controls, typed=typed, stops=self.known_stops)
            paint.add(start, end if borrowed else stop, weight, index)
            return 0
        unstopped = 0
        for k, (begin, end) in enumerate(runs):
            try:
                if k == 0:
                    prompt = self._prompts.before(row.messages, index, row.tools)
                    if prompt is None:
                        raise UnderivableError("its generation prompt cannot be rendered")
                    start = turn_start(row.text, begin, end, prompt, self.controls)
                elif self.controls.ending_at(row.text, 0, begin):
                    start = begin
                else:
                    raise UnderivableError("it goes on after text of another message")
            except UnderivableError as error:
                raise _underivable(index, str(error)) from error
            stop, token, borrowed = turn_end(row.text, start, end, self.controls, typed=typed, stops=self.known_stops)
            if token is None:
                if end < len(row.text.rstrip()):
                    raise _underivable(index, "no control token stops it")
                stop = self._content_end(row, index, start, end)
                unstopped += 1
            elif borrowed and not self._any_stop and token not in self.known_stops:
                raise _underivable(index, f"the template ends it with no token of its own, before {token!r}")
            paint.add(start, stop, weight, index)
        return unstopped

    def _content_end(self, row: _Row, index: int, start: int, end: int) -> int:
        """Where a last turn ends that nothing stops: with its content, white space of the template left out."""
        content = row.messages[index].get("content")
        if type(content) is str and content and row.text.endswith(content, start, end):
            return end
        return start + len(row.text[start:end].rstrip())

    def _content_start(self, row: _Row, index: int) -> tuple[int, int]:
        """(first character of a message's content in the render, end of what the template wrote for it)."""
        swapped = [{**m, "content": stand_in(0)} if i == index else m for i, m in enumerate(row.messages)]
        content = row.messages[index].get("content")
        if type(content) is list:
            content = "".join(p.get("text") or "" for p in content if type(p) is dict)
        places = self._lay_over(row, swapped, row.tools, [content]) if type(content) is str and content else None
        if places is None or len(places) != 1:
            raise _underivable(index, "the place of its content in the render cannot be told")
        start, stop = places[0]
        hull = row.hulls[index]
        if hull is not None and hull[0] <= start:
            return start, max(stop, hull[1])
        following = self.controls.next_after(row.text, stop)
        return start, following[1] if following else stop

    def _paint_whole(self, paint: _Paint, row: _Row, index: int, weight: float) -> None:
        """`train_on: all`: give everything that a message wrote its own weight."""
        runs = row.runs(index)
        if not runs:
            start, end = self._content_start(row, index)
            runs = [(start, end)]
        for start, end in runs:
            paint.add(start, end, weight, index)

    def _paint_parts(
        self,
        paint: _Paint,
        row: _Row,
        index: int,
        parts: tuple[float | None, ...],
        message: JsonDict,
    ) -> None:
        """Give parts of a content their own weights."""
        content = message.get("content")
        if type(content) is not list or len(content) != len(parts):
            raise _underivable(index, "its parts cannot be matched with their weights")
        texts = [p.get("text") if type(p) is dict else p for p in content]
        if not all(type(text) is str for text in texts):
            raise _underivable(index, "a part that is not text has a weight of its own")
        numbered = [(n, text) for n, text in enumerate(texts) if text]
        originals = [text for _, text in numbered]
        filled: list[Any] = [p if type(p) is not dict else dict(p) for p in content]
        for k, (n, _) in enumerate(numbered):
            filled[n] = {**filled[n], "text": stand_in(k)} if type(filled[n]) is dict else stand_in(k)
        swapped = list(row.messages)
        swapped[index] = prepare_messages([{**message, "content": filled}], self.decisions)[0]
        places = self._lay_over(row, swapped, row.tools, originals)
        if places is None or len(places) != len(originals):
            raise _underivable(index, "the places of its parts in the render cannot be told")
        for (n, _), (start, end) in zip(numbered, places, strict=True):
            value = parts[n]
            if value is not None:
                paint.add(start, end, value, index)


class _Row:
    """One conversation and its render."""

    __slots__ = ("hulls", "messages", "regions", "text", "tools")

    def __init__(self, messages: list[JsonDict], tools: Any, marked: Marked) -> None:
        self.messages = messages
        self.tools = tools
        self.text = marked.text
        self.regions = marked.regions
        hulls: list[tuple[int, int] | None] = [None] * len(messages)
        for message, start, end in marked.regions:
            before = hulls[message]
            hulls[message] = (start, end) if before is None else (before[0], end)
        self.hulls = hulls

    def runs(self, index: int) -> list[tuple[int, int]]:
        """The runs of characters that a message wrote."""
        return [(start, end) for message, start, end in self.regions if message == index]

    def lost_reasoning(self, index: int) -> bool:
        """Whether the message carries reasoning that is not in the render."""
        reasoning = reasoning_text(self.messages[index])
        if reasoning is None:
            return False
        start, end = self.hulls[index] or (0, 0)
        return not stands(reasoning, self.text, start, end)


class _Paint:
    """Weights over characters; later paint covers earlier."""

    def __init__(self) -> None:
        self._strokes: list[tuple[int, int, float, int]] = []

    def add(self, start: int, end: int, weight: float, message: int) -> None:
        if start < end:
            self._strokes.append((start, end, weight, message))

    def spans(self) -> tuple[Span, ...]:
        strokes = self._strokes
        if all(a[1] <= b[0] for a, b in pairwise(strokes)):
            pieces = strokes
        else:
            pieces = self._flatten()
        return tuple(Span(*piece) for piece in pieces if piece[2] > 0)

    def _flatten(self) -> list[tuple[int, int, float, int]]:
        edges = sorted({edge for stroke in self._strokes for edge in stroke[:2]})
        pieces: list[tuple[int, int, float, int]] = []
        for start, end in pairwise(edges):
            top = next((s for s in reversed(self._strokes) if s[0] <= start and end <= s[1]), None)
            if top is None:
                continue
            if pieces and pieces[-1][1] == start and pieces[-1][2:] == top[2:]:
                start = pieces.pop()[0]
            pieces.append((start, end, top[2], top[3]))
        return pieces


def _underivable(index: int, why: str) -> RowRefused:
    return RowRefused(Reason.MASK_UNDERIVABLE, f"message {index}: {why}")


def _template_error(error: Exception) -> RowRefused:
    return RowRefused(Reason.TEMPLATE_ERROR, f"{type(error).__name__}: {error}"[:500])
