"""A look before a run: encode up to 1,000 rows of evenly spaced files and say what the whole would be.

Nothing is counted or written. Figures about the whole are estimates from the sample and the sizes of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.config import PackJob
from packsvc.encode import Encoder, load_encoder, merge_batches
from packsvc.plan import permutation, place
from packsvc.run.planning import GROUP_BYTES, evenly, list_all_inputs, recognise_all
from packsvc.sources import Reading, copies, passes, read_example, sample_rows
from packsvc.types import Counts, EncodedBatch, Example, InputFile, Reject

ROWS = 1000
FILES = 50
EFFICIENCY_SEGMENTS = 50_000
"""Lengths of the sample are drawn again up to this many, since a few packs say little about a full group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a trial of a job found."""

    audit_lines: list[str]
    readings: dict[str, str]
    """Source to the reason for how it is read."""
    num_files: int
    input_bytes: int
    counts: Counts
    num_segments: int
    num_tokens: int
    num_loss_tokens: int
    length_percentiles: dict[str, int]
    estimated_rows: int
    estimated_groups: int
    estimated_tokens: int
    estimated_packs: int
    estimated_output_bytes: int
    efficiency: float
    """Expected, of a full group of such rows."""
    rejects: list[Reject]
    example: Example | None
    """The first row that gave a segment."""
    encoder: Encoder
    """Opens the example for display."""

    def to_json(self) -> dict[str, Any]:
        skip = ("encoder", "example", "counts", "rejects")
        tree = {k: getattr(self, k) for k in self.__dataclass_fields__ if k not in skip}
        counts, rejects = asdict(self.counts), [asdict(r) for r in self.rejects]
        return {**tree, "counts": counts, "rejects": rejects, "example": self._example()}

    def _example(self) -> dict[str, Any] | None:
        """The example as tokens, each with whether it is trained and why."""
        if self.example is None:
            return None
        notes = self.encoder.explain(self.example)
        tokens = [
            {"id": note.id, "text": note.text, "trained": note.weight > 0, "weight": note.weight, "why": note.why}
            for note in notes
        ]
        return {"file": self.example.file, "row": self.example.row, "tokens": tokens}


def dry_run(job: PackJob, *, storage_options: Mapping[str, Any] | None = None) -> DryRun:
    """Look at a job without running it.

    Raises:
        PacksvcError: What `pack` would stop on before its first group.
    """
    encoder = load_encoder(job)
    inputs = list_all_inputs(job, storage_options=storage_options)
    readings = recognise_all(job, inputs, storage_options=storage_options)
    counts, rejects, batches = Counts(), list[Reject](), list[EncodedBatch]()
    repeats: list[NDArray[np.int64]] = []
    seen: dict[str, _Seen] = {}
    first: Example | None = None
    files = evenly(inputs, FILES)
    for file in files:
        here, before = seen.setdefault(file.source, _Seen()), counts.rows
        examples, often, bytes_seen = _examples(
            job, file, readings[file.source], ROWS // len(files) or 1, counts, rejects, storage_options
        )
        batch = encoder.encode(examples, source=file.source)
        counts.add(batch.counts)
        rejects += batch.rejects
        batches.append(batch)
        repeats.append(np.array([often.get(int(row), 1) for row in batch.row], np.int64))
        here.rows += counts.rows - before
        here.tokens += int((repeats[-1] * np.diff(batch.offsets)).sum())
        here.size_bytes += bytes_seen
        if first is None and batch.num_segments:
            first = next(e for e in examples if e.row == int(batch.row[0]))
    batch = merge_batches(batches)
    lengths = np.diff(batch.offsets)
    input_bytes = sum(f.size_bytes for f in inputs)
    efficiency = _efficiency(job, np.repeat(lengths, np.concatenate(repeats)) if repeats else lengths)
    rows, tokens = _scaled(inputs, seen)
    return DryRun(
        audit_lines=encoder.audit_lines,
        readings={name: reading.why for name, reading in readings.items()},
        num_files=len(inputs),
        input_bytes=input_bytes,
        counts=counts,
        num_segments=batch.num_segments,
        num_tokens=int(lengths.sum()),
        num_loss_tokens=int(batch.loss_mask.sum()),
        length_percentiles=_percentiles(lengths),
        estimated_rows=rows,
        estimated_groups=max(1, -(-rows // job.packing.group_examples), -(-input_bytes // GROUP_BYTES)) if rows else 0,
        estimated_tokens=tokens,
        estimated_packs=int(np.ceil(tokens / (job.seq_len * efficiency))) if efficiency else 0,
        estimated_output_bytes=int(tokens * 1.1),
        efficiency=efficiency,
        rejects=rejects,
        example=first,
        encoder=encoder,
    )


@dataclass(slots=True)
class _Seen:
    """What was looked at of a source: rows, tokens with what `weight` repeats, and the stored bytes they stand for."""

    rows: int = 0
    tokens: int = 0
    size_bytes: float = 0.0


def _scaled(inputs: Sequence[InputFile], seen: Mapping[str, _Seen]) -> tuple[int, int]:
    """Rows and tokens of the whole job: each source's by its bytes, one that was not looked at as the others are."""
    whole = _Seen(
        rows=sum(s.rows for s in seen.values()),
        tokens=sum(s.tokens for s in seen.values()),
        size_bytes=sum(s.size_bytes for s in seen.values()),
    )
    rows = tokens = 0.0
    for file in inputs:
        like = seen.get(file.source, whole)
        if like.size_bytes:
            rows += like.rows * file.size_bytes / like.size_bytes
            tokens += like.tokens * file.size_bytes / like.size_bytes
    return int(rows), int(tokens)


def _examples(
    job: PackJob,
    file: InputFile,
    reading: Reading,
    limit: int,
    counts: Counts,
    rejects: list[Reject],
    storage_options: Mapping[str, Any] | None,
) -> tuple[list[Example], dict[int, int], float]:
    """The first rows of a file as examples, how often rows are packed if not once, and the stored bytes they are."""
    source = next(s for s in job.sources if s.name == file.source)
    rows = sample_rows(file, limit=limit, storage_options=storage_options)
    examples: list[Example] = []
    often: dict[int, int] = {}
    for row in rows:
        if source.where and row.error is None and not passes(row, source.where):
            counts.rows += 1
            counts.filtered += 1
            continue
        if source.weight != 1:
            often[row.row] = copies(source.weight, seed=job.seed, source=source.name, path=file.path, row=row.row)
            if often[row.row] == 0:
                counts.rows += 1
                counts.left_out += 1
                continue
        example = read_example(row, reading, source_name=source.name)
        if isinstance(example, Reject):
            counts.rows += 1
            counts.rejected += 1
            counts.rejected_by_reason[example.reason] = counts.rejected_by_reason.get(example.reason, 0) + 1
            rejects.append(example)
        else:
            examples.append(example)
    if len(rows) < limit:
        return examples, often, float(file.size_bytes)
    text = sum(len(row.raw.encode()) + 1 if row.raw is not None else 0 for row in rows)
    plain = text if text and not file.path.endswith((".gz", ".zst")) else text / 4
    stands_for = min(file.size_bytes, plain or file.size_bytes * limit / max(file.num_rows or 10 * limit, limit))
    return examples, often, float(stands_for)


def _efficiency(job: PackJob, lengths: NDArray[np.int64]) -> float:
    if not len(lengths):
        return 0.0
    repeats = -(-EFFICIENCY_SEGMENTS // len(lengths))
    many = np.tile(lengths, repeats)
    many = many[permutation(len(many), job.seed, 3)]
    placement = place(
        many,
        job.seq_len,
        strategy=job.packing.strategy.value,
        max_segments=job.packing.max_segments,
        align=job.packing.align,
        seed=job.seed,
    )
    return float(many.sum() / (placement.num_packs * job.seq_len))


def _percentiles(lengths: Sequence[int] | NDArray[np.int64]) -> dict[str, int]:
    if not len(lengths):
        return {}
    at = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: int(np.percentile(lengths, p, method="nearest")) for name, p in at.items()}
