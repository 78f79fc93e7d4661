"""Frozen records that cross rooms. Numpy for typing only; nothing here does work."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

JsonDict = dict[str, Any]


class Reason(StrEnum):
    """Why a row, or a part of one, was rejected. The names are contract."""

    INVALID_JSON = "invalid_json"
    WRONG_TYPE = "wrong_type"
    EMPTY = "empty"
    UNKNOWN_ROLE = "unknown_role"
    TEMPLATE_ERROR = "template_error"
    TEXT_MISSING = "text_missing"
    CONTROL_TOKENS = "control_tokens"
    MASK_UNDERIVABLE = "mask_underivable"
    NO_TRAINED_TOKENS = "no_trained_tokens"
    FRACTIONAL_WEIGHT = "fractional_weight"
    OVERLONG = "overlong"
    ENCODE_MISMATCH = "encode_mismatch"


class ExampleKind(StrEnum):
    """How an example becomes tokens."""

    CHAT = "chat"
    TEXT = "text"
    PRETOKENIZED = "pretokenized"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """One row as it stands in its file, parsed or not."""

    file: int
    """Index of the input in the plan's list of inputs."""
    row: int
    """0-based row in the file: line number in JSONL (blank lines counted), record number elsewhere."""
    record: Any = None
    """The parsed value; None when `error` is set."""
    raw: str | None = None
    """The text as read, for formats that have one. None: the record is written as JSON when it is needed."""
    error: str | None = None
    """Why the row could not be parsed (a reject for `invalid_json`)."""
    error_reason: Reason = Reason.INVALID_JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One training example in canonical form, before any template."""

    file: int
    row: int
    kind: ExampleKind
    messages: list[JsonDict] = field(default_factory=list)
    """Chat: OpenAI style, null fields absent, null content "". `content` is a string or a list of parts.
    Without the `train` and `weight` fields, which are in `weights` and `part_weights`."""
    tools: list[Any] | None = None
    """Chat: tool schemas, verbatim."""
    weights: tuple[float | None, ...] = ()
    """Chat: one for each message: what its `train` or `weight` says, None where it says nothing."""
    part_weights: tuple[tuple[float | None, ...] | None, ...] = ()
    """Chat: one for each message: the same for each of its content parts, None where content is a string."""
    text: str | None = None
    """Text: the raw text."""
    input_ids: NDArray[np.int32] | None = None
    """Pretokenized: (n,) int32."""
    loss_mask: NDArray[np.bool_] | None = None
    """Pretokenized: (n,) bool, aligned with `input_ids`, not shifted."""
    raw: RawRow | None = None
    """Where it came from, for the reject record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A row, or one part of a row, that is not packed, and why."""

    file: int
    row: int
    part: int | None
    """None: the whole row."""
    source: str
    reason: Reason
    detail: str
    record: str
    """The raw record as JSON text, or as read where it is not JSON."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What became of rows and tokens; adds up over batches, groups and sources. Names as in the manifest."""

    rows: int = 0
    packed: int = 0
    """Rows with at least one segment."""
    rejected: int = 0
    """Rows with none."""
    rejected_parts: int = 0
    """Refused parts of packed rows."""
    filtered: int = 0
    left_out: int = 0
    truncated: int = 0
    """Rows cut by `truncate_right` or `drop_turns`."""
    split: int = 0
    """Rows cut into fragments by `overlong: split`."""
    reasoning_dropped: int = 0
    """Trained turns without loss, since the template leaves their reasoning out of the render."""
    edge_tokens: int = 0
    """Tokens across the start of a response span; they count as prompt."""
    turns_without_stop: int = 0
    """Trained turns that no stop token ends."""
    encoded_tokens: int = 0
    repeated_tokens: int = 0
    cut_tokens: int = 0
    rejected_tokens: int = 0
    rejected_by_reason: dict[str, int] = field(default_factory=dict)
    """Whole rows only."""

    def add(self, other: Counts) -> None:
        """Add `other` into self, field by field."""
        for f in fields(self):
            if f.name != "rejected_by_reason":
                setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        for reason, n in other.rejected_by_reason.items():
            self.rejected_by_reason[reason] = self.rejected_by_reason.get(reason, 0) + n


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """Segments ready to be packed, flat, and what became of the other rows.

    A row gives no segment (rejected), one, or several (`turns: each`, `overlong: split`); its segments are
    neighbours, in order. N tokens, S segments.
    """

    input_ids: NDArray[np.int32]
    """(N,) int32, all segments back to back."""
    loss_mask: NDArray[np.bool_]
    """(N,) bool, aligned with `input_ids`; False on the first token of every segment."""
    loss_weight: NDArray[np.float32] | None
    """(N,) float32, 0 off target; None unless the job has `loss_weights: true`."""
    offsets: NDArray[np.int64]
    """(S + 1,) int64, starts of segments in the flat arrays; last is N."""
    file: NDArray[np.int32]
    """(S,)"""
    row: NDArray[np.int64]
    """(S,)"""
    part: NDArray[np.int32]
    """(S,) number of the segment among those its row gave, from 0."""
    split: NDArray[np.int16]
    """(S,) index into the sorted names of the job's splits."""
    rejects: list[Reject]
    counts: Counts
    """Of these rows: every field but `filtered` and `left_out`, with each row counted once."""

    @property
    def num_segments(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One input of a plan, as `plan.json` and the manifest list it."""

    path: str
    """As the job wrote it, globs and folders expanded."""
    url: str
    """Absolute path or URL to open; not part of the plan's identity."""
    source: str
    size_bytes: int
    etag: str | None = None
    mtime: float | None = None
    num_rows: int | None = None
    """None until counted."""
    num_lines: int | None = None
    """One more than the last row's number: more than `num_rows` where lines are blank. None until counted."""
    content_hash: str | None = None
    """sha256 of the bytes (Parquet: of the footer)."""


class PieceKind(StrEnum):
    """What part of an input a piece is."""

    WHOLE = "whole"
    """All of it."""
    BYTES = "bytes"
    """Plain JSONL: the lines whose first byte lies in [start, stop)."""
    ROWS = "rows"
    """Parquet, Arrow: rows [start, stop)."""
    RECUT = "recut"
    """`path` is a file made from rows [start, stop) of a compressed input, one line a row."""
    SHARD = "shard"
    """Packing again: packs [start, stop) of the shard number `file` of another output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one input that one group reads; the unit that the planner deals out."""

    file: int
    """Index into the plan's inputs."""
    kind: PieceKind
    start: int = 0
    stop: int = 0
    """Bytes or rows, by `kind`; unused for WHOLE."""
    first_row: int = 0
    """Row number of the piece's first row (line number in JSONL)."""
    num_rows: int | None = None
    """Rows in the piece; None where nothing was counted (a trial run)."""
    size_bytes: int = 0
    """Uncompressed."""
    path: str | None = None
    """RECUT: relative to the output."""
    take: tuple[int, ...] | None = None
    """Row numbers to take (a trial run takes some of them), in order; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What identifies a tokenizer in plans and manifests."""

    id: str
    revision: str | None
    fingerprint: str
    """sha256 of the sorted (token, id) pairs, the added tokens and the ids of fixed probe strings."""
    files_sha256: dict[str, str]
    """Tokenizer and template files, by name."""
    template_sha256: str
    vocab_size: int
    """One more than the largest id."""
    pad_id: int
    """The tokenizer's, else its EOS, else 0."""
    stop_ids: list[int]
    """Tokens on which trained turns end, found by the audit."""
    backend: str
    """Name and version of what made the ids, e.g. "fastokens 0.3.5" or "tokenizers 0.23.3"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackColumns:
    """Some packs as arrays, as they stand in a shard: P packs, S segments in all of them.

    `cu_offsets[i]:cu_offsets[i+1]` is pack i's part of `cu_seqlens`; `segment_offsets` likewise for the
    three origin arrays. A pack with a padding tail has one boundary more than a full one.
    """

    input_ids: NDArray[np.int32]
    """(P, seq_len); the tail is the pad id."""
    position_ids: NDArray[np.int32]
    """(P, seq_len); 0..n-1 in every segment, the tail included."""
    loss_mask: NDArray[np.bool_]
    """(P, seq_len)"""
    loss_weight: NDArray[np.float32] | None
    """(P, seq_len) or None."""
    cu_seqlens: NDArray[np.int32]
    """Flat; per pack 0 first, seq_len last, strictly increasing; a tail is one last segment of its own."""
    cu_offsets: NDArray[np.int64]
    """(P + 1,)"""
    segment_file: NDArray[np.int32]
    """(S,)"""
    segment_row: NDArray[np.int64]
    """(S,)"""
    segment_part: NDArray[np.int32]
    """(S,)"""
    segment_offsets: NDArray[np.int64]
    """(P + 1,)"""
    num_segments: NDArray[np.int32]
    """(P,) real ones, no tail."""
    num_tokens: NDArray[np.int32]
    """(P,) real ones, no tail."""
    num_loss_tokens: NDArray[np.int32]
    """(P,)"""
    sum_squared_lengths: NDArray[np.int64]
    """(P,) of the real segments."""

    @property
    def num_packs(self) -> int:
        return len(self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a packer put each segment: packs in their final order. S segments, P packs."""

    order: NDArray[np.int64]
    """(S,) segment numbers, pack by pack, in their order inside the pack."""
    pack_offsets: NDArray[np.int64]
    """(P + 1,) starts of packs in `order`."""

    @property
    def num_packs(self) -> int:
        return len(self.pack_offsets) - 1
