"""What becomes of a segment that does not fit a pack, by the job's policy.

A segment of n tokens takes ceil(n / align) x align tokens of a pack, so it fits up to `limit`, the largest
multiple of `align` in `seq_len`. Whatever is kept has a trained token; a row of which nothing can be kept is
rejected as overlong, and its tokens are accounted for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from packsvc.encode.rendered import RowRefused
from packsvc.encode.segments import Segment
from packsvc.encode.units import Unit, exchange_starts, without_oldest
from packsvc.types import ExampleKind, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How long a segment may be."""

    seq_len: int
    align: int = 1

    @property
    def limit(self) -> int:
        return self.seq_len - self.seq_len % self.align

    def refuse(self, length: int, why: str = "") -> RowRefused:
        """The refusal of a segment of `length` tokens."""
        aligned = "" if self.align == 1 else f", {self.limit} with align {self.align}"
        detail = f"{length} tokens, over seq_len {self.seq_len}{aligned}"
        return RowRefused(Reason.OVERLONG, f"{detail}; {why}" if why else detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What was kept of an overlong segment."""

    segments: list[Segment]
    cut_tokens: int
    repeated_tokens: int = 0


def truncate_right(segment: Segment, capacity: Capacity) -> Cut:
    """Keep the first tokens, if one of them is trained.

    Raises:
        RowRefused: None is.
    """
    kept = segment.part(0, capacity.limit)
    if not kept.mask.any():
        raise capacity.refuse(len(segment.ids), "no trained token is left after truncate_right")
    return Cut(segments=[kept], cut_tokens=len(segment.ids) - len(kept.ids))


def drop_turns(segment: Segment, unit: Unit, capacity: Capacity, encode: Callable[[Unit], Segment | RowRefused]) -> Cut:
    """Drop the oldest exchanges after the system message, as few as make the rest fit; the last one stays.

    Lengths are tried from the short end, 1, 2, 4, ... exchanges and then by halves, so that a conversation of
    thousands of turns is rendered at about the length that fits, a dozen times.

    Raises:
        RowRefused: The last exchange alone does not fit, or nothing in what fits is trained.
    """
    length = len(segment.ids)
    if unit.example.kind is not ExampleKind.CHAT:
        raise capacity.refuse(length, "it has no turns to drop")
    exchanges = len(exchange_starts(unit.messages))
    if exchanges < 2:
        raise capacity.refuse(length, "a single exchange does not fit, so drop_turns cannot help")
    kept: Segment | None = None
    refusal = ""
    fits, fails, tried = 0, exchanges, 1
    while fits + 1 < fails:
        result = encode(without_oldest(unit, exchanges - tried))
        if isinstance(result, RowRefused):
            refusal = f" ({result.reason}: {result.detail})"
        if isinstance(result, Segment) and len(result.ids) <= capacity.limit:
            kept, fits = result, tried
        else:
            fails = tried
        tried = min(2 * tried, fails - 1) if fails == exchanges else (fits + fails) // 2
    if kept is None:
        raise capacity.refuse(length, f"the last exchange alone does not fit{refusal}")
    if not kept.mask.any():
        raise capacity.refuse(length, "no trained token is left after drop_turns")
    return Cut(segments=[kept], cut_tokens=length - len(kept.ids))


def split(segment: Segment, capacity: Capacity) -> Cut:
    """Cut into fragments that fill the pack, in order.

    The prompt, what stands before the first trained token, is repeated before every later fragment if it takes at
    most half of `seq_len`. A first token alone is no prompt: it is untrained in every segment. A fragment without
    a trained token is cut.

    Raises:
        RowRefused: No fragment has one.
    """
    length, limit = len(segment.ids), capacity.limit
    prompt = int(np.argmax(segment.mask))
    if prompt == 1 or 2 * prompt > capacity.seq_len:
        prompt = 0
    segments: list[Segment] = []
    cut = repeated = 0
    start, stop = 0, limit
    while start < length:
        stop = min(stop, length)
        fragment = segment.part(start, stop) if start == 0 or not prompt else _behind(segment, prompt, start, stop)
        if fragment.mask.any():
            segments.append(fragment)
            repeated += len(fragment.ids) - (stop - start)
        else:
            cut += stop - start
        start, stop = stop, stop + limit - prompt
    if not segments:
        raise capacity.refuse(length, "no fragment has a trained token")
    return Cut(segments=segments, cut_tokens=cut, repeated_tokens=repeated)


def _behind(segment: Segment, prompt: int, start: int, stop: int) -> Segment:
    """The prompt, then tokens [start, stop)."""
    take = np.r_[0:prompt, start:stop]
    weight = None if segment.weight is None else segment.weight[take]
    return Segment(ids=segment.ids[take], mask=segment.mask[take], weight=weight, notes=segment.notes)
