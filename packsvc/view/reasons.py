"""Why each token of a packed segment is trained or not: its row is read again and encoded with reasons.

A shard keeps what is trained, not why. The source says why, if it is still there and still gives the same tokens;
otherwise the view says what stands in the way, and shows the segment without reasons.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from packsvc.config import Format, Turns, parse_job
from packsvc.encode import RowRefused, open_encoder
from packsvc.errors import PacksvcError
from packsvc.shards import PLAN
from packsvc.sources import Reading, read_example, read_piece
from packsvc.storage import Store
from packsvc.types import Example, InputFile, Piece, PieceKind


class Reasons:
    """Reasons for the segments of one output."""

    def __init__(self, store: Store) -> None:
        """Raises PacksvcError when there is no plan that says where the sources are, or its encoder cannot be had."""
        try:
            plan: Mapping[str, Any] = json.loads(store.read(PLAN))
            self._job = parse_job(plan["config"], base=plan["base"], where=PLAN)
            self._inputs = [InputFile(**file) for file in plan["inputs"]]
            self._readings = {
                name: Reading(format=Format(tree["format"]), columns=tree["columns"], why=tree["why"])
                for name, tree in plan["readings"].items()
            }
            settings = dict(plan["encoder"])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise PacksvcError(f"{store.describe(PLAN)} cannot be read ({type(error).__name__}: {error})") from error
        self._encoder = open_encoder(self._job, settings)
        self._options = store.storage_options

    def of(self, ids: Sequence[int], *, file: int, row: int, part: int) -> list[str]:
        """The reason of every token.

        Raises:
            PacksvcError: The row is gone, refused now, or gives other tokens.
        """
        example = self._example(file, row)
        try:
            notes = self._encoder.explain(example, part=part if self._job.turns is Turns.EACH else None)
        except RowRefused as error:
            raise PacksvcError(f"its row is refused now ({error.reason.value}: {error.detail})") from error
        if [note.id for note in notes[: len(ids)]] != list(ids):
            raise PacksvcError("its row was cut to fit, or gives other tokens now")
        return [note.why for note in notes[: len(ids)]]

    def _example(self, file: int, row: int) -> Example:
        entry = self._inputs[file]
        piece = Piece(file=file, kind=PieceKind.WHOLE, take=(row,))
        for raw in read_piece(piece, entry, storage_options=self._options):
            example = read_example(raw, self._readings[entry.source], source_name=entry.source)
            if isinstance(example, Example):
                return example
        raise PacksvcError(f"{entry.path} has no such row now")
