"""A pack on a terminal: colours where there are any, marks where there are none."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from packsvc.view.records import PackView, SegmentView, TokenView
from packsvc.view.visible import visible

TRAINED, PROMPT, CONTROL, HEADING, NOTE = "bold green", "default", "magenta", "bold", "yellow"
OPEN, CLOSE = "[[", "]]"


def tokens_text(tokens: Sequence[TokenView], *, marks: bool, why: bool = False) -> Text:
    """Tokens as running text.

    Args:
        marks: Trained runs stand between [[ and ]].
        why: After each run of one reason, the reason, where it is known.
    """
    out, inside = Text(), False
    for at, token in enumerate(tokens):
        if token.trained != inside:
            inside = token.trained
            if marks:
                out.append(OPEN if inside else CLOSE, style="dim")
        style = TRAINED if token.trained else PROMPT
        if token.control:
            style = f"{TRAINED if token.trained else ''} {CONTROL}".strip()
        out.append(visible(token.text), style=style)
        last_of_run = at + 1 == len(tokens) or tokens[at + 1].why != token.why
        if why and token.why and last_of_run:
            out.append(f"({token.why})", style="dim italic")
    if inside and marks:
        out.append(CLOSE, style="dim")
    return out


def segment_text(segment: SegmentView, *, marks: bool, why: bool = False) -> Text:
    """One segment under a line that names it."""
    trained = f"{segment.num_loss_tokens:,} trained"
    place = f"{len(segment.tokens):,} tokens from {segment.start:,}"
    head = f"-- segment {segment.number}: {segment.origin}; {place}, {trained}"
    return Text.assemble((visible(head) + "\n", HEADING), tokens_text(segment.tokens, marks=marks, why=why))


@dataclass(frozen=True)
class _Adapting:
    """Decides by the console it is printed on."""

    view: PackView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _pack(self.view, marks=console.color_system is None or not console.is_terminal)


def pack_text(view: PackView, *, marks: bool | None) -> RenderableType:
    """The whole pack for a rich console."""
    return _Adapting(view) if marks is None else _pack(view, marks=marks)


def plain_text(view: PackView) -> str:
    """The whole pack as a string, marked."""
    console = Console(file=io.StringIO(), color_system=None, width=10**6, highlight=False, soft_wrap=True)
    with console.capture() as captured:
        console.print(_pack(view, marks=True))
    return captured.get()


def _pack(view: PackView, *, marks: bool) -> Text:
    legend = f"trained tokens stand between {OPEN} and {CLOSE}" if marks else "trained tokens are green"
    why = any(token.why for segment in view.segments for token in segment.tokens)
    parts: list[Text | tuple[str, str]] = [
        (visible(view.heading) + "\n", HEADING),
        (f"{view.summary}; {legend}\n", ""),
        *((f"note: {note}\n", NOTE) for note in view.notes),
    ]
    for segment in view.segments:
        parts += [Text("\n"), segment_text(segment, marks=marks, why=why), Text("\n")]
    if view.padding and len(view.segments) == view.num_segments:
        parts.append((f"\n-- padding: {view.padding:,} tokens, no loss\n", HEADING))
    return Text.assemble(*parts)
