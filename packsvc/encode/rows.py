"""Carries the rows of one call through an encoding path: units out, segments in, rows ended in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from packsvc.config import Overlong, PackJob, Turns
from packsvc.encode.building import BatchBuilder
from packsvc.encode.overlong import Capacity, Cut, drop_turns, split, truncate_right
from packsvc.encode.paths import Path
from packsvc.encode.rendered import RowRefused
from packsvc.encode.segments import Flat, Notes, Segment
from packsvc.encode.units import Unit, fractional_weight, units_of
from packsvc.errors import LimitError
from packsvc.types import Example, Reason

HOPELESS = 64
"""After so many neighbouring turns over the limit the rest of a row is refused without a look (`turns: each`).

Each turn is rendered with all turns before it, so that a row of thousands would cost their square for nothing.
"""


class Rows:
    """The rows of one call.

    Args:
        job: Its policies.
        examples: The rows.
        builder: Takes what comes of them.
        path: The way to encode.
        source: Name of the source, for messages.
    """

    def __init__(
        self, job: PackJob, examples: Sequence[Example], *, builder: BatchBuilder, path: Path, source: str
    ) -> None:
        self._job = job
        self._examples = examples
        self._builder = builder
        self._path = path
        self._source = source
        self._capacity = Capacity(seq_len=job.seq_len, align=job.packing.align)
        self._may_give_up = job.turns is Turns.EACH and job.overlong in (Overlong.REJECT, Overlong.TRUNCATE_RIGHT)
        self._row = 0
        self._overlong_in_line = 0
        self._hopeless = RowRefused(
            Reason.OVERLONG, f"not encoded: the {HOPELESS} turns before it are all over seq_len {job.seq_len}"
        )

    def run(self) -> None:
        """Encode all rows into the builder."""
        for units, flat in self._path.batches(self._units()):
            self._take(units, flat)
        self._end_rows(len(self._examples))

    def _units(self) -> Iterator[Unit]:
        for row, example in enumerate(self._examples):
            refused = self._weight_refusal(example)
            for unit in units_of(example, row=row, turns=self._job.turns):
                given_up = self._row == row and self._overlong_in_line >= HOPELESS
                refusal = self._hopeless if given_up else refused
                yield unit if refusal is None else unit._replace(refused=refusal)

    def _weight_refusal(self, example: Example) -> RowRefused | None:
        if self._job.loss_weights or (weight := fractional_weight(example)) is None:
            return None
        detail = f"weight {weight:g} is neither 0 nor 1; set loss_weights: true to train with it"
        return RowRefused(Reason.FRACTIONAL_WEIGHT, detail)

    def _take(self, units: Sequence[Unit], flat: Flat) -> None:
        lengths = np.diff(flat.offsets).tolist()
        trained = np.diff(np.flatnonzero(flat.mask).searchsorted(flat.offsets)).tolist()
        for i, unit in enumerate(units):
            self._end_rows(unit.row)
            overlong = lengths[i] > self._capacity.limit
            if self._overlong_in_line >= HOPELESS:
                self._builder.refuse(self._hopeless)
                continue
            if i in flat.refused:
                self._builder.refuse(flat.refused[i])
            elif not trained[i]:
                self._builder.refuse(_nothing_trained(flat.notes[i]), encoded=lengths[i])
                self._builder.counts.reasoning_dropped += flat.notes[i].reasoning_dropped
            elif overlong:
                self._take_overlong(unit, flat.segment(i))
            else:
                self._builder.keep(flat, i, lengths[i])
            self._overlong_in_line = self._overlong_in_line + 1 if overlong and self._may_give_up else 0

    def _end_rows(self, row: int) -> None:
        """All units of the rows before `row` are in."""
        while self._row < row:
            self._builder.end_row(self._examples[self._row])
            self._row += 1
            self._overlong_in_line = 0

    def _take_overlong(self, unit: Unit, segment: Segment) -> None:
        length = len(segment.ids)
        try:
            cut = self._cut(unit, segment)
        except RowRefused as refusal:
            self._builder.refuse(refusal.kept(), encoded=length)
            return
        self._builder.keep_cut(
            cut.segments,
            encoded=length,
            cut=cut.cut_tokens,
            repeated=cut.repeated_tokens,
            split=self._job.overlong is Overlong.SPLIT,
        )

    def _cut(self, unit: Unit, segment: Segment) -> Cut:
        match self._job.overlong:
            case Overlong.TRUNCATE_RIGHT:
                return truncate_right(segment, self._capacity)
            case Overlong.DROP_TURNS:
                return drop_turns(segment, unit, self._capacity, self._path.one)
            case Overlong.SPLIT:
                return split(segment, self._capacity)
        refusal = self._capacity.refuse(len(segment.ids))
        if self._job.overlong is Overlong.ERROR:
            raise LimitError(
                f"source {self._source!r}, input {unit.example.file}, row {unit.example.row}: {refusal.detail}, and "
                "the job says `overlong: error`. Raise seq_len, or choose reject, truncate_right, drop_turns or split."
            )
        raise refusal


def _nothing_trained(notes: Notes) -> RowRefused:
    if notes.reasoning_dropped:
        why = "the template leaves the reasoning of every trained turn out; see turns: each and dropped_reasoning"
    else:
        why = "no token but a segment's first would be trained"
    return RowRefused(Reason.NO_TRAINED_TOKENS, why)
