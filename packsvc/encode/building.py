"""Segments and refusals of a batch, row by row, to an `EncodedBatch` with closed accounts.

A row's segments are neighbours. Runs of segments that a policy left alone are taken from the flat buffers they lie
in without a copy of their own; they are copied once, at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.encode.rendered import RowRefused
from packsvc.encode.segments import Flat, Notes, Segment
from packsvc.types import Counts, EncodedBatch, Example, RawRow, Reject


@dataclass(slots=True)
class _Row:
    """A row whose units are coming in."""

    parts: int = 0
    """Numbers used so far, by segments and refused parts."""
    segments: int = 0
    refusals: list[tuple[int, RowRefused]] = field(default_factory=list)
    truncated: bool = False
    split: bool = False


@dataclass(slots=True)
class _Run:
    """Neighbouring tokens of one flat buffer."""

    flat: Flat | Segment
    start: int
    stop: int


class BatchBuilder:
    """Takes the units of each row in order and ends with the batch.

    Args:
        source: Name of the source of all rows.
        split_of: The split of a row that gave a segment.
        weights: The batch has weights.
    """

    def __init__(self, *, source: str, split_of: Callable[[Example], int], weights: bool) -> None:
        self._source = source
        self._split_of = split_of
        self._weights = weights
        self._row = _Row()
        self._runs: list[_Run] = []
        self._lengths: list[int] = []
        self._files: list[int] = []
        self._rows: list[int] = []
        self._parts: list[int] = []
        self._splits: list[int] = []
        self.rejects: list[Reject] = []
        self.counts = Counts()

    def keep(self, flat: Flat, unit: int, length: int) -> None:
        """A unit that stays as it was encoded."""
        start = int(flat.offsets[unit])
        last = self._runs[-1] if self._runs else None
        if last is not None and last.flat is flat and last.stop == start:
            last.stop = start + length
        else:
            self._runs.append(_Run(flat, start, start + length))
        self._add_segment(length)
        self.counts.encoded_tokens += length
        self._count(flat.notes[unit])

    def keep_cut(
        self, segments: Sequence[Segment], *, encoded: int, cut: int, repeated: int = 0, split: bool = False
    ) -> None:
        """What a policy kept of a unit of `encoded` tokens."""
        for segment in segments:
            self._runs.append(_Run(segment, 0, len(segment.ids)))
            self._add_segment(len(segment.ids))
        self.counts.encoded_tokens += encoded
        self.counts.cut_tokens += cut
        self.counts.repeated_tokens += repeated
        self._row.split |= split
        self._row.truncated |= not split
        self._count(segments[0].notes)

    def refuse(self, refusal: RowRefused, *, encoded: int = 0) -> None:
        """A unit of which nothing is kept."""
        self._row.refusals.append((self._row.parts, refusal))
        self._row.parts += 1
        self.counts.encoded_tokens += encoded
        self.counts.rejected_tokens += encoded

    def end_row(self, example: Example) -> None:
        """All units of a row are in."""
        row, self._row = self._row, _Row()
        self.counts.rows += 1
        if row.segments:
            self.counts.packed += 1
            self.counts.truncated += row.truncated
            self.counts.split += row.split
            self.counts.rejected_parts += len(row.refusals)
            self.rejects += [self._reject(example, part, refusal) for part, refusal in row.refusals]
            self._files += [example.file] * row.segments
            self._rows += [example.row] * row.segments
            self._splits += [self._split_of(example)] * row.segments
        else:
            refusal = row.refusals[0][1]
            self.counts.rejected += 1
            reasons = self.counts.rejected_by_reason
            reasons[refusal.reason.value] = reasons.get(refusal.reason.value, 0) + 1
            self.rejects.append(self._reject(example, None, refusal))

    def finish(self) -> EncodedBatch:
        """The batch."""
        weights: list[NDArray[np.float32]] = []
        if self._weights:
            weights = [run.flat.weight[run.start : run.stop] for run in self._runs if run.flat.weight is not None]
        return EncodedBatch(
            input_ids=_joined([run.flat.ids[run.start : run.stop] for run in self._runs], np.int32),
            loss_mask=_joined([run.flat.mask[run.start : run.stop] for run in self._runs], np.bool_),
            loss_weight=_joined(weights, np.float32) if self._weights else None,
            offsets=np.cumsum([0, *self._lengths], dtype=np.int64),
            file=np.array(self._files, np.int32),
            row=np.array(self._rows, np.int64),
            part=np.array(self._parts, np.int32),
            split=np.array(self._splits, np.int16),
            rejects=self.rejects,
            counts=self.counts,
        )

    def _add_segment(self, length: int) -> None:
        self._lengths.append(length)
        self._parts.append(self._row.parts)
        self._row.parts += 1
        self._row.segments += 1

    def _count(self, notes: Notes) -> None:
        self.counts.edge_tokens += notes.edge_tokens
        self.counts.reasoning_dropped += notes.reasoning_dropped
        self.counts.turns_without_stop += notes.turns_without_stop

    def _reject(self, example: Example, part: int | None, refusal: RowRefused) -> Reject:
        return Reject(
            file=example.file,
            row=example.row,
            part=part,
            source=self._source,
            reason=refusal.reason,
            detail=refusal.detail,
            record=record_text(example.raw),
        )


def record_text(raw: RawRow | None) -> str:
    """What a reject keeps of a row: its text as read, else its record as JSON. Always valid Unicode."""
    if raw is None:
        return ""
    text = raw.raw
    if text is None:
        try:
            text = json.dumps(raw.record, ensure_ascii=False, default=repr)
        except (RecursionError, TypeError, ValueError):
            text = "(a record that cannot be written as JSON)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)
