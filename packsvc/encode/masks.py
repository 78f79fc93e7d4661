"""Character spans of a text to a mask over its tokens, exactly.

A token is trained when all of it lies inside a span. One that lies across the start of a span is prompt, since at
inference its text is there already; one that lies across the end would train text that is not to be trained.
Where two spans touch, a token across the join is wholly trained text and takes the weight of the first.

The fast way needs ids only: the cumulative sum of the ids' byte lengths is the end of every token in the UTF-8
text, spans become bytes (for ASCII texts they are), and `searchsorted` finds their tokens, for a whole batch at
once. A row counts only if its lengths add up to its text's own length after the tokenizer's normalisation. The
slow way asks the tokenizer for offsets and looks at each token.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from packsvc.encode.byte_lengths import ByteLengths
from packsvc.encode.rendered import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Masks of S texts of N tokens, flat."""

    mask: NDArray[np.bool_]
    """(N,)"""
    weight: NDArray[np.float32] | None
    """(N,), 0 off target; None when no weights were asked for."""
    edge_tokens: NDArray[np.int32]
    """(S,) tokens across the start of a span."""
    failed: list[int]
    """Texts whose byte lengths do not add up; nothing of theirs is in the mask."""


def masks_from_bytes(
    ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    *,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    lengths: ByteLengths,
    weights: bool,
) -> Masks:
    """Find the tokens of every span of a batch from ids alone.

    Args:
        ids: (N,) int32, tokens of all texts back to back.
        offsets: (S + 1,) int64, where each text starts in `ids`.
        texts: S texts.
        spans: Of each text, in characters; sorted and disjoint.
        lengths: The tokenizer's.
        weights: Make the weight array.
    """
    starts = np.empty(len(ids) + 1, np.int64)
    starts[0] = 0
    np.cumsum(lengths.table[ids], out=starts[1:], dtype=np.int64)
    first_byte = starts[offsets]
    totals, begin, end, weight, owner = _span_bytes(texts, spans, nfc=lengths.nfc)
    good = np.diff(first_byte) == totals
    use = good[owner]
    owner = owner[use]
    begin, end = begin[use] + first_byte[owner], end[use] + first_byte[owner]
    joins = np.zeros(len(begin) + 1, np.bool_)
    # joins[i]: span i goes on where span i - 1 ends. Across texts that means nothing, since no token lies across them.
    joins[1:-1] = begin[1:] == end[:-1]
    first = np.searchsorted(starts, begin, side="left")
    stop = np.searchsorted(starts, _run_ends(end, joins), side="right") - 1
    stop[joins[1:]] = np.minimum(stop[joins[1:]], first[joins[:-1]])
    stop = np.maximum(stop, first)
    across = (starts[first] != begin) & ~joins[:-1]
    change = np.zeros(len(ids) + 1, np.int8)
    np.add.at(change, first, 1)
    np.subtract.at(change, stop, 1)
    mask = np.cumsum(change[:-1], dtype=np.int8).view(np.bool_)
    values = None
    if weights:
        values = np.zeros(len(ids), np.float32)
        values[mask] = np.repeat(weight[use], stop - first)
    edges = np.bincount(owner[across], minlength=len(texts)).astype(np.int32)
    return Masks(mask=mask, weight=values, edge_tokens=edges, failed=np.flatnonzero(~good).tolist())


def _run_ends(end: NDArray[np.int64], joins: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each span, where the trained text it belongs to ends: spans that touch are one text."""
    last = np.flatnonzero(~joins[1:])
    runs = np.diff(last, prepend=-1)
    return np.repeat(end[last], runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMask:
    """Mask of one text of n tokens."""

    mask: list[bool]
    weight: list[float]
    edge_tokens: int


def mask_from_offsets(token_offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> RowMask:
    """Mask of one text from its tokens' character offsets, token by token."""
    starts = [span.start for span in spans]
    run_end = [span.end for span in spans]
    for i in range(len(spans) - 2, -1, -1):
        if spans[i].end == spans[i + 1].start:
            run_end[i] = run_end[i + 1]
    weight = [0.0] * len(token_offsets)
    edge_tokens = 0
    for index, (start, stop) in enumerate(token_offsets):
        i = bisect_right(starts, start) - 1
        if i >= 0 and start < spans[i].end and stop <= run_end[i]:
            weight[index] = spans[i].weight
        for j in range(i + 1, len(spans)):
            if starts[j] >= stop:
                break
            if j == 0 or spans[j - 1].end != starts[j]:
                edge_tokens += 1
    return RowMask(mask=[w > 0 for w in weight], weight=weight, edge_tokens=edge_tokens)


def _span_bytes(
    texts: Sequence[str], spans: Sequence[Sequence[Span]], *, nfc: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Lengths of texts, and starts, ends, weights and owners of spans, in bytes of normalised UTF-8.

    A text in which an edge has no place after normalisation gets the length -1, which nothing adds up to.
    """
    counts = [len(row) for row in spans]
    total = sum(counts)
    fields = chain.from_iterable(chain.from_iterable(spans))
    table = np.fromiter(fields, np.float64, len(Span._fields) * total).reshape(total, len(Span._fields))
    edges = table[:, :2].astype(np.int64)
    totals = list(map(len, texts))
    done = 0
    for row, text in enumerate(texts):
        after = done + counts[row]
        if not text.isascii():
            totals[row], places = _edge_bytes(text, edges[done:after].ravel().tolist(), nfc=nfc)
            edges[done:after] = np.array(places, np.int64).reshape(-1, 2)
        done = after
    owner = np.arange(len(texts)).repeat(counts)
    return np.array(totals, np.int64), edges[:, 0].copy(), edges[:, 1].copy(), table[:, 2].astype(np.float32), owner


def _edge_bytes(text: str, edges: list[int], *, nfc: bool) -> tuple[int, list[int]]:
    pieces = [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]
    if nfc and not unicodedata.is_normalized("NFC", text):
        if any(piece and _may_join(piece[0]) for piece in pieces[1:]):
            return -1, edges
        pieces = [unicodedata.normalize("NFC", piece) for piece in pieces]
    done, places = 0, []
    for piece in pieces:
        done += len(piece.encode())
        places.append(done)
    return done, places[:-1]


# The second halves of canonical compositions that are no combining marks, in the basic plane.
_JOINING = frozenset(
    "\u09be\u09d7\u0b3e\u0b56\u0b57\u0bbe\u0bd7\u0cc2\u0cd5\u0cd6\u0d3e\u0d57\u0dcf\u0ddf\u0fb5\u0fb7\u102e\u1b35"
)


def _may_join(character: str) -> bool:
    """Whether normalisation may move or compose a character with what stands before it; no byte is the edge then."""
    return (
        unicodedata.combining(character) != 0
        or "\u1160" <= character <= "\u11ff"  # Hangul vowels and finals
        or character in _JOINING
        or character >= "\U00010000"  # newer scripts, which Python's tables may not know
    )
