"""Chats, texts and ready-made ids to segments: exact ids, an exact mask, closed accounts.

    Example -> messages prepared -> template rendered with turn marks -> text and response spans
            -> ids by the fastest backend that is exact -> byte lengths -> mask -> what fits a pack

The template is audited once a job; what cannot be told exactly is rejected with a reason, never guessed. Needs
transformers and tokenizers; fastokens, if it is there and agrees, makes the ids.
"""

from packsvc.encode.audit import TemplateAudit, audit_template
from packsvc.encode.collecting import collect_new, collector_paused
from packsvc.encode.encoder import Encoder
from packsvc.encode.explaining import TokenNote
from packsvc.encode.merging import BatchMerger, merge_batches
from packsvc.encode.opening import load_encoder, open_encoder
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import Decisions, Rendered, RowRefused, Span
from packsvc.encode.tokenizer import LoadedTokenizer, fingerprint, load_tokenizer, read_fingerprint

__all__ = [
    "BatchMerger",
    "Decisions",
    "Encoder",
    "LoadedTokenizer",
    "Rendered",
    "Renderer",
    "RowRefused",
    "Span",
    "TemplateAudit",
    "TokenNote",
    "audit_template",
    "collect_new",
    "collector_paused",
    "fingerprint",
    "load_encoder",
    "load_tokenizer",
    "merge_batches",
    "open_encoder",
    "read_fingerprint",
]
