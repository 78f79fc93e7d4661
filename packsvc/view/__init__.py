"""View: a pack, or an example before it is packed, as a person reads it.

`showing` reads the pack and finds its tokenizer, `words` turns ids into exact texts, `visible` shows what cannot
be seen, `reasons` reads the sources again for why a token is trained, `text` and `page` lay it out for terminals
and browsers; `records` is what they share.
"""

from packsvc.view.records import PackView, SegmentView, TokenView
from packsvc.view.showing import show, view_example, view_tokens, words_from
from packsvc.view.text import segment_text, tokens_text
from packsvc.view.words import Words

__all__ = [
    "PackView",
    "SegmentView",
    "TokenView",
    "Words",
    "segment_text",
    "show",
    "tokens_text",
    "view_example",
    "view_tokens",
    "words_from",
]
