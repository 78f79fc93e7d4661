"""From a conversation to text and the characters of it that are learned.

    messages, tools -> prepared -> marked render -> text, regions -> checks -> spans

One render a row in the usual case; the checks are searches at memory speed, most of them over one serialisation of
the row that shows at once whether there is anything to look for. Whatever cannot be told exactly is refused with a
reason (`RowRefused`), never guessed. What the audit of the template decided comes in as `Decisions`. One renderer
serves one thread.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packsvc.config import ControlTokens, DroppedReasoning, TrainOn
from packsvc.encode.controls import Controls
from packsvc.encode.messages import canonical_json, prepare_messages, serialised, tools_key
from packsvc.encode.paint import Paint
from packsvc.encode.places import Places
from packsvc.encode.presence import Presence, reasoning_text, stands
from packsvc.encode.rendered import Decisions, Rendered, RowRefused
from packsvc.encode.row import Range, Row
from packsvc.encode.spans import TurnSpans, UnderivableError
from packsvc.encode.template import ClockAskedError, Marked, TurnTemplate
from packsvc.types import JsonDict, Reason

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Known whatever the template; any other must be one that the template asks for."""


class Renderer:
    """Renders conversations with one template and tells what of them is learned.

    Args:
        tokenizer: transformers' tokenizer, for its special tokens.
        template: Jinja source, or what was made of it with the same special tokens, arguments and date.
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
        template: str | TurnTemplate,
        control_tokens: Iterable[str],
        template_kwargs: Mapping[str, Any],
        date: datetime.date | None,
        train_on: TrainOn | str = TrainOn.ASSISTANT,
        dropped_reasoning: DroppedReasoning | str = DroppedReasoning.NO_LOSS,
        control_policy: ControlTokens | str = ControlTokens.REJECT,
        decisions: Decisions | None = None,
        any_stop: bool = False,
    ) -> None:
        if isinstance(template, str):
            variables = {**tokenizer.special_tokens_map, **template_kwargs}
            template = TurnTemplate(template, variables=variables, date=date)
        self.template = template
        self.controls = Controls(control_tokens)
        self.decisions = decisions if decisions is not None else Decisions()
        self.turns = TurnSpans(
            self.template,
            self.controls,
            stops={*self.decisions.stops, str(tokenizer.eos_token)},
            any_stop=any_stop,
        )
        self._train_on = TrainOn(train_on)
        self._dropped = DroppedReasoning(dropped_reasoning)
        self._policy = ControlTokens(control_policy)
        self._places = Places(self.template, self.controls, self.decisions)
        self._presence = Presence(self._places.is_shown)
        self._roles = ROLES | self.template.roles
        self._tools_seen: dict[bytes, str | None] = {}

    def plain(
        self, messages: list[JsonDict], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text alone, equal to `apply_chat_template(messages, tools=tools, tokenize=False)`."""
        prepared = prepare_messages(messages, self.decisions)
        try:
            return self.template.plain(prepared, tools, add_generation_prompt=add_generation_prompt)
        except ClockAskedError:
            raise
        except Exception as error:  # foreign code: whatever it raises is its answer to this row
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
        data = serialised(prepared)
        roles = self._roles
        for index, message in enumerate(prepared):
            if message["role"] not in roles:
                raise RowRefused(Reason.UNKNOWN_ROLE, f"message {index} has the role {message['role']!r}")
        key = tools_key(tools)
        typed = self.controls.may_stand_in(data) and self._has_typed(messages, prepared)
        if key is not None:
            typed = self._has_typed_in_tools(tools, key) or typed
        row = Row(prepared, tools, self._marked(prepared, tools, key))
        self._presence.check(prepared, tools, row.text, row.hulls)
        controls = self._places.typed_controls(row) if typed else ()
        return self._learned(row, weights, part_weights, messages, controls)

    def _marked(self, messages: list[JsonDict], tools: Any, key: bytes | None) -> Marked:
        try:
            marked = self.template.marked(messages, tools, key=key)
        except ClockAskedError:
            raise
        except Exception as error:  # foreign code: whatever it raises is its answer to this row
            raise _template_error(error) from error
        if marked is None:
            raise RowRefused(Reason.MASK_UNDERIVABLE, "the template changes text of messages after it has written it")
        return marked

    def _has_typed(self, messages: list[JsonDict], prepared: list[JsonDict]) -> bool:
        """Whether someone typed a control token in a message; refuses it where the job does."""
        for index, forms in enumerate(zip(messages, prepared, strict=True)):
            for message in forms:  # as it came, to name the field, and as parsed arguments have it
                for field, value in message.items():
                    token = self.controls.find_in(value)
                    if token is not None:
                        self._refuse_typed(token, f"message {index} ({message['role']}), {field}")
                        return True
        return False

    def _has_typed_in_tools(self, tools: Any, key: bytes) -> bool:
        if key not in self._tools_seen:
            serialised(tools, "tools")
            if len(self._tools_seen) >= 4096:
                self._tools_seen.clear()
            self._tools_seen[key] = self.controls.find_in(tools)
        token = self._tools_seen[key]
        if token is not None:
            self._refuse_typed(token, "a tool schema")
        return token is not None

    def _refuse_typed(self, token: str, place: str) -> None:
        if self._policy is ControlTokens.REJECT:
            raise RowRefused(Reason.CONTROL_TOKENS, f"the text of a control token, {token!r}, stands in {place}")

    def _learned(
        self,
        row: Row,
        weights: Sequence[float | None],
        part_weights: Sequence[tuple[float | None, ...] | None],
        messages: list[JsonDict],
        typed: tuple[Range, ...],
    ) -> Rendered:
        """Paint what the row and the job say is learned."""
        if weights.count(None) == len(weights) and part_weights.count(None) == len(part_weights):
            weights, part_weights = (), ()
        paint = Paint()
        dropped = unstopped = 0
        usual = None if typed else self.turns.usual
        learns_all = self._train_on is TrainOn.ALL
        watches_reasoning = self._dropped is DroppedReasoning.NO_LOSS
        last = self._last_assistant(row)
        if learns_all:
            paint.add(0, len(row.text), 1.0, -1)
        for index, message in enumerate(row.messages):
            said = weights[index] if weights else None
            parts = part_weights[index] if part_weights else None
            is_assistant = message["role"] == "assistant"
            if said is None and parts is None and not is_assistant:
                continue
            weight = said if said is not None else float(learns_all or (is_assistant and index >= last))
            if (
                watches_reasoning
                and is_assistant
                and (weight > 0 or (parts is not None and any(parts)))
                and _reasoning_is_lost(row, index)
            ):
                dropped += 1
                weight, said, parts = 0.0, 0.0, None
            if learns_all:
                if said is not None:
                    self._paint_whole(paint, row, index, said)
            elif weight > 0:
                turn = usual(row, index) if usual is not None and is_assistant else None
                if turn is not None:
                    paint.add(turn[0], turn[1], weight, index)
                else:
                    unstopped += self._paint_turn(paint, row, index, weight, typed)
            if parts is not None and any(part is not None and part != weight for part in parts):
                self._paint_parts(paint, row, index, parts, messages[index])
        return Rendered(row.text, paint.spans(), typed, dropped, unstopped, tuple(row.regions))

    def _last_assistant(self, row: Row) -> int:
        """The first message that `train_on` may mean by itself."""
        if self._train_on is not TrainOn.LAST_ASSISTANT:
            return 0
        return max((i for i, m in enumerate(row.messages) if m["role"] == "assistant"), default=0)

    def _paint_turn(self, paint: Paint, row: Row, index: int, weight: float, typed: tuple[Range, ...]) -> int:
        """Paint a learned turn; returns how many of its runs nothing stops."""
        try:
            if row.messages[index]["role"] != "assistant":
                start, end = self._other_turn(row, index, typed)
                paint.add(start, end, weight, index)
                return 0
            unstopped = 0
            for start, end, stop in self.turns.of(row, index, typed):
                paint.add(start, end, weight, index)
                unstopped += stop is None
            return unstopped
        except UnderivableError as error:
            raise RowRefused(Reason.MASK_UNDERIVABLE, f"message {index}: {error}") from error

    def _other_turn(self, row: Row, index: int, typed: tuple[Range, ...]) -> Range:
        """A learned turn of another role: from the first character of its content through its end token."""
        place = self._places.content(row, index)
        if place is None:
            raise UnderivableError("the place of its content in the render cannot be told")
        hull = row.hulls[index]
        if hull is not None and hull[0] <= place[0] and place[1] <= hull[1]:
            end, _, borrowed = self.turns.end(row.text, place[0], hull[1], typed)
            return place[0], hull[1] if borrowed else end
        following = self.controls.next_after(row.text, place[1])
        return place[0], following[1] if following else place[1]

    def _paint_whole(self, paint: Paint, row: Row, index: int, weight: float) -> None:
        """`train_on: all`: give everything that a message wrote its own weight."""
        runs = row.runs(index)
        if not runs:
            place = self._places.content(row, index)
            if place is None:
                raise RowRefused(
                    Reason.MASK_UNDERIVABLE,
                    f"message {index}: it has a weight of its own, and its place in the render cannot be told",
                )
            runs = [place]
        for start, end in runs:
            paint.add(start, end, weight, index)

    def _paint_parts(
        self, paint: Paint, row: Row, index: int, parts: tuple[float | None, ...], message: JsonDict
    ) -> None:
        """Give parts of a content their own weights."""
        places = self._places.parts(row, index, message)
        if places is None or len(parts) != len(message["content"]):
            raise RowRefused(
                Reason.MASK_UNDERIVABLE, f"message {index}: the places of its parts in the render cannot be told"
            )
        for number, (start, end) in places.items():
            weight = parts[number]
            if weight is not None:
                paint.add(start, end, weight, index)


def _reasoning_is_lost(row: Row, index: int) -> bool:
    """Whether a message carries reasoning that is not in the render."""
    reasoning = reasoning_text(row.messages[index])
    if reasoning is None:
        return False
    start, end = row.hulls[index] or (0, 0)
    return not stands(reasoning, row.text, start, end)


def _template_error(error: Exception) -> RowRefused:
    return RowRefused(Reason.TEMPLATE_ERROR, f"{type(error).__name__}: {error}"[:500])
