"""The audit of a chat template: once a job, before a row is encoded.

Probe conversations whose words occur nowhere else are rendered and masked as rows would be. Then, word by word: no
word of another role may be learned; every rendered word of an assistant must be; every learned turn must end in a
token that a model can stop at. A finding about the mask stops the job. A finding about content (a system message that
the template drops) is told, and rows with such content are rejected one by one later on. Conversations that only
some data have (tools, reasoning) and that a template refuses, or that cannot be masked exactly, are told as well:
such rows are rejected, never guessed.

The audit also decides what is the same for every row: how tool call arguments and lists of text parts reach the
template, and on which tokens turns end.

Price: some thirty renders of tiny conversations.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from packsvc.encode.messages import prepare_messages
from packsvc.encode.probes import Probe, decide_arguments, decide_parts, probes
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import Decisions, Rendered, RowRefused
from packsvc.encode.template import ClockAskedError, TurnTemplate
from packsvc.errors import EncodeError
from packsvc.types import JsonDict, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateAudit:
    """What the audit found."""

    decisions: Decisions
    lines: list[str]
    """To be printed when a job starts."""


def audit_template(
    tokenizer: Any,
    *,
    template: str,
    control_tokens: Iterable[str],
    template_kwargs: Mapping[str, Any],
    date: datetime.date | None,
) -> TemplateAudit:
    """Audit a template with the tokenizer it is to be used with.

    Raises:
        EncodeError: An exact mask cannot be had with this template, or it asks for a date that the job does not name.
    """
    bare = TurnTemplate(template, variables={**tokenizer.special_tokens_map, **template_kwargs}, date=date)
    decisions = _decide(bare)
    renderer = Renderer(
        tokenizer,
        template=bare,
        control_tokens=control_tokens,
        template_kwargs=template_kwargs,
        date=date,
        dropped_reasoning="train",
        decisions=decisions,
        any_stop=True,
    )
    as_parts = _takes_parts_only(bare)
    notes = _Notes()
    if as_parts:
        notes.content["only lists of text parts are rendered; rows with other content are rejected"] = ["strings"]
    for probe in probes(as_parts):
        _examine(renderer, probe, notes)
    audit = _sum_up(decisions, notes, str(tokenizer.eos_token))
    if date is None and "date_string" in bare.names and "date_string" not in template_kwargs:
        audit.lines.append("note: the template writes a date of its own; set `date` for another one")
    return audit


class _Notes:
    """What the probes told."""

    def __init__(self) -> None:
        self.own_stops: dict[str, None] = {}
        self.borrowed_stops: dict[str, None] = {}
        self.content: dict[str, list[str]] = {}
        self.unstopped = False
        self.reasoning_shown: dict[str, list[bool]] = {}

    def find(self, probe: Probe, what: str) -> None:
        """Something of a probe is left out or refused."""
        self.content.setdefault(what, []).append(probe.name)

    def findings(self) -> tuple[str, ...]:
        """One sentence for each thing, naming the conversations that show it."""
        return tuple(f"{', '.join(names)}: {what}" for what, names in self.content.items())


def _decide(bare: TurnTemplate) -> Decisions:
    def render(messages: list[JsonDict], tools: Any) -> str | None:
        try:
            return bare.plain(prepare_messages(messages, Decisions()), tools)
        except ClockAskedError:
            raise
        except Exception:  # foreign code: it does not take this
            return None

    return Decisions(arguments=decide_arguments(render), parts=decide_parts(render))


def _takes_parts_only(bare: TurnTemplate) -> bool:
    """Whether contents must be lists of parts."""
    seen: list[bool] = []
    for as_parts in (False, True):
        probe = probes(as_parts)[0]
        try:
            text = bare.plain(probe.messages, None)
        except ClockAskedError:
            raise
        except Exception:  # foreign code: it does not take this
            text = ""
        seen.append(all(word in text for word in probe.content))
    return seen == [False, True]


def _examine(renderer: Renderer, probe: Probe, notes: _Notes) -> None:
    try:
        rendered = renderer.render(probe.messages, probe.tools)
    except RowRefused as refusal:
        if refusal.reason is Reason.TEXT_MISSING:
            _note_missing(renderer, probe, notes)
        elif probe.basic:
            why = f"the conversation of {probe.name!r} is refused: {refusal.detail}"
            if refusal.reason is Reason.MASK_UNDERIVABLE:
                why += " (are its markers control tokens of this tokenizer, or is it the template of another one?)"
            raise EncodeError(_stopped(why)) from refusal
        else:
            verb = "refused by the template" if refusal.reason is Reason.TEMPLATE_ERROR else "not maskable exactly"
            notes.find(probe, f"{verb} ({refusal.detail}); such rows are rejected as {refusal.reason}")
        return
    prepared = prepare_messages(probe.messages, renderer.decisions)
    if rendered.text != renderer.template.plain(prepared, probe.tools):
        raise EncodeError(_stopped(f"the conversation of {probe.name!r} renders differently with turn marks"))
    _check_words(rendered, probe)
    _check_starts(renderer, rendered, probe)
    for token, borrowed in _stops(renderer, rendered):
        (notes.borrowed_stops if borrowed else notes.own_stops).setdefault(token)
        renderer.turns.stops.add(token)
    notes.unstopped = notes.unstopped or rendered.turns_without_stop > 0
    if probe.reasoning:
        notes.reasoning_shown[probe.name] = [word in rendered.text for word in probe.reasoning]


def _note_missing(renderer: Renderer, probe: Probe, notes: _Notes) -> None:
    text = renderer.plain(probe.messages, probe.tools)
    lost = [f"the content of the {role} message" for word, role in probe.content.items() if word not in text]
    lost += [f"the tool call ({word})" for word in probe.calls if word not in text]
    if probe.basic:
        raise EncodeError(_stopped(f"{' and '.join(lost) or 'some content'} is not in the render of {probe.name!r}"))
    what = " and ".join(lost) or "some content"
    notes.find(probe, f"{what} is not in the render; such rows are rejected as {Reason.TEXT_MISSING}")


def _check_words(rendered: Rendered, probe: Probe) -> None:
    """No word of another role is learned; every rendered word of an assistant is."""
    for word, role in probe.content.items():
        if role != "assistant" and any(word in rendered.text[s.start : s.end] for s in rendered.spans):
            raise EncodeError(_stopped(f"in {probe.name!r} the words of the {role} message would be learned"))
    # A tool schema names the function as well, and a tool result may: so words of calls must be learned once.
    mine = [word for word, role in probe.content.items() if role == "assistant"] + [*probe.reasoning, *probe.calls]
    for word in mine:
        if word in rendered.text and not any(word in rendered.text[s.start : s.end] for s in rendered.spans):
            raise EncodeError(_stopped(f"in {probe.name!r} words of an assistant would not be learned ({word})"))


def _check_starts(renderer: Renderer, rendered: Rendered, probe: Probe) -> None:
    """A template that shows no generation prompt must not write a header before the answer."""
    if not probe.basic:
        return
    shows_prompt = bool(renderer.turns.prompts.before([{"role": "user", "content": "x"}], 1, None))
    for span in rendered.spans:
        head = rendered.text[span.start : span.end]
        word = min((head.find(w) for w, role in probe.content.items() if role == "assistant" and w in head), default=0)
        if not shows_prompt and head[:word].strip():
            raise EncodeError(
                _stopped(
                    f"it writes {head[:word]!r} before an answer but shows no generation prompt, so it cannot be told "
                    "where the model's own text begins. Let the template write its header for "
                    "`add_generation_prompt` too"
                )
            )


def _stops(renderer: Renderer, rendered: Rendered) -> list[tuple[str, bool]]:
    """(token, borrowed) of each learned span that a control token stops."""
    found: list[tuple[str, bool]] = []
    for span in rendered.spans:
        token = renderer.controls.ending_at(rendered.text, span.start, span.end)
        if token is not None:
            mine = any(m == span.message and a < span.end <= b for m, a, b in rendered.regions)
            found.append((token, not mine))
    return found


def _sum_up(decisions: Decisions, notes: _Notes, eos: str) -> TemplateAudit:
    if not notes.own_stops and not notes.borrowed_stops:
        raise EncodeError(
            _stopped(
                "no control token of this tokenizer ends an assistant's turn, so a model trained on it would never "
                "stop. Is the template that of another tokenizer?"
            )
        )
    shown = notes.reasoning_shown
    known = bool(shown.get("reasoning") and shown["reasoning"][-1])
    decided = replace(
        decisions,
        stops=(*notes.own_stops, *(s for s in notes.borrowed_stops if s not in notes.own_stops)),
        next_marker_stops=not notes.own_stops,
        reasoning="known" if known else "unknown",
        drops_earlier_reasoning=known and not all(shown.get("reasoning in two turns", [True])),
        content_findings=notes.findings(),
    )
    return TemplateAudit(decisions=decided, lines=_lines(decided, notes, eos))


def _lines(decided: Decisions, notes: _Notes, eos: str) -> list[str]:
    stops = ", ".join(decided.stops)
    lines = [f"turns end with {stops}" + (" (the next role marker)" if decided.next_marker_stops else "")]
    if eos not in decided.stops:
        lines.append(f"note: {eos}, the tokenizer's EOS, ends no turn; let generation stop at {stops}")
    if notes.unstopped:
        lines.append("note: nothing ends a last turn; such turns are kept and counted as turns_without_stop")
    if decided.arguments == "parsed":
        lines.append("tool call arguments that are JSON strings are parsed: the template would escape or refuse them")
    if decided.arguments == "string":
        lines.append("tool call arguments that are objects are written as JSON strings: the template refuses objects")
    if decided.parts == "joined":
        lines.append("contents that are lists of text parts are joined into one string")
    if decided.reasoning == "unknown":
        lines.append(
            "reasoning is not rendered: turns with reasoning get no loss (reasoning_dropped) "
            "unless `dropped_reasoning: train`"
        )
    elif decided.drops_earlier_reasoning:
        lines.append(
            "reasoning of earlier turns is not rendered: such turns get no loss (reasoning_dropped); "
            "`turns: each` learns them all"
        )
    return lines + [f"finding: {finding}" for finding in decided.content_findings]


def _stopped(why: str) -> str:
    return (
        f"the chat template gives no exact mask: {why}. "
        "Use the model's own template, or another one under `chat_template`."
    )
