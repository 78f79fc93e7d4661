"""Examples to segments with exact ids and an exact mask, and what became of the rest.

    examples -> units (turns) -> Renderer: text and spans -> backend: ids -> byte lengths: mask
             -> what does not fit (overlong) -> EncodedBatch with closed accounts

`load_encoder` makes an encoder for a job in the driver: it audits the template and chooses the backend. Its
`settings` are plain JSON that `open_encoder` makes the same encoder from in a worker, without the audit. A seeded
share of rows is encoded a second time by the slow twin while the job runs.

Price: rendering is most of the time; a batch needs its ids, mask and some bounded buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packsvc.config import PackJob
from packsvc.encode.backends import Backend
from packsvc.encode.building import BatchBuilder
from packsvc.encode.byte_lengths import ByteLengths
from packsvc.encode.collecting import collector_paused
from packsvc.encode.comparing import first_difference
from packsvc.encode.draws import draw_split, is_audited
from packsvc.encode.explaining import TokenNote, note_chat, note_ready
from packsvc.encode.fast_path import FastPath
from packsvc.encode.masks import mask_from_offsets
from packsvc.encode.paths import Offsets, Path, render_unit
from packsvc.encode.render import Renderer
from packsvc.encode.rendered import Rendered, RowRefused
from packsvc.encode.rows import Rows
from packsvc.encode.slow_path import SlowPath
from packsvc.encode.tokenizer import LoadedTokenizer
from packsvc.encode.units import Unit, units_of
from packsvc.errors import EncodeError
from packsvc.types import EncodedBatch, Example, ExampleKind, TokenizerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What encoders of one job share in a process."""

    loaded: LoadedTokenizer
    renderer: Renderer | None
    backend: Backend
    lengths: ByteLengths | None
    offsets: Offsets


class Encoder:
    """Encodes a job's examples.

    Args:
        job: What to train on, how long, how to split.
        engine: Tokenizer, renderer and backend.
        settings: What `open_encoder` needs to make it again; plain JSON.
        audit_lines: What the audit has to say to people.
    """

    def __init__(
        self, job: PackJob, *, engine: Engine, settings: dict[str, Any], audit_lines: Sequence[str] = ()
    ) -> None:
        self.job = job
        self.settings = settings
        self.audit_lines = list(audit_lines)
        self.facts = TokenizerFacts(**settings["facts"])
        self.audited = 0
        """Rows that were encoded a second time and found equal."""
        self._engine = engine
        self._sources = {source.name: source for source in job.sources}
        self._fast = FastPath(
            engine.loaded,
            renderer=engine.renderer,
            backend=engine.backend,
            lengths=engine.lengths,
            offsets=engine.offsets,
            weights=job.loss_weights,
        )
        self._slow = SlowPath(engine.loaded, renderer=engine.renderer, offsets=engine.offsets, weights=job.loss_weights)

    @property
    def loaded(self) -> LoadedTokenizer:
        """The tokenizer with its template."""
        return self._engine.loaded

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, with the job's template."""
        return self._engine.loaded.tokenizer

    def encode(self, examples: Sequence[Example], *, source: str) -> EncodedBatch:
        """Encode examples of one source, and a sample of them twice.

        Raises:
            EncodeError: The two ways disagree, or the job cannot encode such rows at all.
            LimitError: A row is overlong and the job says `overlong: error`.
        """
        with collector_paused():
            batch = self._encode(examples, source=source, path=self._fast)
        self._audit(examples, batch, source=source)
        return batch

    def encode_slow(self, examples: Sequence[Example], *, source: str) -> EncodedBatch:
        """The same batch by offsets, token by token, without byte lengths or a fast backend."""
        return self._encode(examples, source=source, path=self._slow)

    def explain(self, example: Example, *, part: int | None = None) -> list[TokenNote]:
        """Every token of an example as it is before any policy for length, with its weight and the reason for it.

        Args:
            part: With `turns: each`, the turn to look at; None: all of them, one after the other.

        Raises:
            RowRefused: The example would be rejected.
        """
        notes: list[TokenNote] = []
        for unit in units_of(example, row=0, turns=self.job.turns):
            if part is None or part == unit.number:
                notes += self._explain_unit(unit)
        return notes

    def _explain_unit(self, unit: Unit) -> list[TokenNote]:
        engine, backend = self._engine, self._engine.loaded.backend
        if unit.example.kind is not ExampleKind.CHAT:
            segment = self._slow.one(unit)
            if isinstance(segment, RowRefused):
                raise segment
            return note_ready(segment, backend)
        rendered = render_unit(engine.renderer, unit)
        if not isinstance(rendered, Rendered):
            raise rendered if rendered is not None else AssertionError("a chat renders or is refused")
        tokens = engine.offsets.encode(rendered)
        weights = mask_from_offsets(tokens.offsets, rendered.spans).weight
        return note_chat(tokens, rendered, weights=weights, unit=unit, job=self.job, backend=backend)

    def _encode(self, examples: Sequence[Example], *, source: str, path: Path) -> EncodedBatch:
        builder = BatchBuilder(
            source=source, split_of=lambda example: self._split_of(example, source), weights=self.job.loss_weights
        )
        Rows(self.job, examples, builder=builder, path=path, source=source).run()
        return builder.finish()

    def _split_of(self, example: Example, source: str) -> int:
        job = self.job
        fixed = self._sources[source].split if source in self._sources else None
        if fixed is not None:
            return job.split_names.index(fixed)
        if len(job.splits) == 1:
            return 0
        return draw_split(job.splits, seed=job.seed, data=self._canonical(example))

    def _canonical(self, example: Example) -> bytes:
        """What a row says, the same for equal rows."""
        if example.kind is ExampleKind.TEXT:
            return b"text\0" + (example.text or "").encode()
        if example.kind is ExampleKind.PRETOKENIZED:
            assert example.input_ids is not None
            assert example.loss_mask is not None
            ids, mask = example.input_ids.astype("<i4"), example.loss_mask.astype(np.uint8)
            return b"pretokenized\0" + ids.tobytes() + mask.tobytes()
        assert self._engine.renderer is not None
        return self._engine.renderer.canonical(example.messages, example.tools)

    def _audit(self, examples: Sequence[Example], batch: EncodedBatch, *, source: str) -> None:
        job = self.job
        chosen = [
            example
            for example in examples
            if is_audited(job.audit_fraction, seed=job.seed, source=source, file=example.file, row=example.row)
        ]
        if not chosen:
            return
        again = self.encode_slow(chosen, source=source)
        if difference := first_difference(batch, again, rows=[(e.file, e.row) for e in chosen]):
            raise EncodeError(
                f"source {source!r}, {difference}. The fast and the slow way of encoding disagree with "
                f"{self.facts.backend}; nothing is written from this group. Please report the row; "
                "without the `fast` extra the tokenizer's own backend is used."
            )
        self.audited += len(chosen)
