"""A pack as one HTML page that loads nothing."""

from __future__ import annotations

from html import escape

from packsvc.view.records import PackView, SegmentView, TokenView
from packsvc.view.visible import NEWLINE, visible

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #6b7280; --page: #ffffff; --card: #f6f7f9;
  --trained: #d3f4dc; --trained-ink: #0b4a22; --control: #7c2d92; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --soft: #9ca3af; --page: #14161a; --card: #1d2026;
  --trained: #124d28; --trained-ink: #c9f7d6; --control: #e29bf5; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.2rem; overflow-wrap: anywhere; }
h2 { font-size: .95rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
p, .soft { color: var(--soft); }
section { background: var(--card); border-radius: 8px; padding: 1rem; margin: 1rem 0; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.l { background: var(--trained); color: var(--trained-ink); border-radius: 2px; }
.c { color: var(--control); font-weight: 600; }
.note { color: #b45309; }
"""


def pack_page(view: PackView) -> str:
    """The page; every text of the data is escaped."""
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in view.notes)
    tail = ""
    if view.padding and len(view.segments) == view.num_segments:
        tail = f'<section class="soft">padding: {view.padding:,} tokens, no loss</section>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>pack {view.pack}</title><style>{STYLE}</style></head><body>"
        f"<h1>{_text(view.heading)}</h1>"
        f'<p>{_text(view.summary)}. <span class="l">Trained</span> tokens are highlighted, '
        f'<span class="c">control tokens</span> coloured; point at a token for its id.</p>'
        f"{notes}{''.join(_segment(s) for s in view.segments)}{tail}</body></html>\n"
    )


def _segment(segment: SegmentView) -> str:
    head = f"segment {segment.number}: {segment.origin}"
    counts = f"{len(segment.tokens):,} tokens from {segment.start:,}, {segment.num_loss_tokens:,} trained"
    tokens = "".join(_token(token, segment.start + at) for at, token in enumerate(segment.tokens))
    return f'<section><h2>{_text(head)} <span class="soft">{counts}</span></h2><pre>{tokens}</pre></section>\n'


def _token(token: TokenView, position: int) -> str:
    about = f"token {position}, id {token.id}, weight {token.weight:g}" + (f", {token.why}" if token.why else "")
    kinds = " ".join(name for name, on in (("l", token.trained), ("c", token.control)) if on)
    cls = f' class="{kinds}"' if kinds else ""
    return f'<span{cls} title="{escape(about)}">{_text(token.text)}</span>'


def _text(text: str) -> str:
    return escape(visible(text)).replace(NEWLINE, '<span class="soft">' + NEWLINE + "</span>")
