"""Rows encoded afresh by the slow, offsets-based method, as digests: the other side of the comparison.

A pure function of plan and piece: reads the piece's rows again, judges each as a run does (weight, `where`, format)
and encodes the rest. What it gives back is small enough to travel between machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.config import PackJob, Source
from packsvc.encode import open_encoder
from packsvc.sources import Reading, copies, passes, read_example, read_piece
from packsvc.storage import Store
from packsvc.types import Counts, EncodedBatch, Example, InputFile, Piece, Reject
from packsvc.validation.digests import row_keys, segment_digests
from packsvc.validation.rejects import REASONS

BATCH_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshSetting:
    """What every piece is encoded with."""

    job: PackJob
    inputs: tuple[InputFile, ...]
    readings: Mapping[str, Reading]
    encoder: dict[str, Any]
    """Settings for `open_encoder`."""
    store: Store
    storage_options: Mapping[str, Any]

    def source_of(self, piece: Piece) -> Source:
        name = self.inputs[piece.file].source
        return next(source for source in self.job.sources if source.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshRows:
    """What the rows of a piece give: S segments, R rejects."""

    row_key: NDArray[np.int64]
    """(S,)"""
    part: NDArray[np.int32]
    """(S,)"""
    digest: NDArray[np.uint64]
    """(S,)"""
    split: NDArray[np.int16]
    """(S,) index into the sorted names of splits."""
    copies: NDArray[np.int64]
    """(S,) how often each is to be packed."""
    reject_key: NDArray[np.int64]
    """(R,)"""
    reject_part: NDArray[np.int32]
    """(R,) -1 for a whole row."""
    reject_reason: NDArray[np.int64]
    """(R,) index into `REASONS`."""
    source: str
    counts: Counts


@dataclass(slots=True)
class _Gathered:
    row_key: list[NDArray[np.int64]] = field(default_factory=list)
    part: list[NDArray[np.int32]] = field(default_factory=list)
    digest: list[NDArray[np.uint64]] = field(default_factory=list)
    split: list[NDArray[np.int16]] = field(default_factory=list)
    copies: list[NDArray[np.int64]] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def encode_piece(piece: Piece, *, setting: FreshSetting) -> FreshRows:
    """Every row of a piece, afresh. Raises SourceError, EncodeError."""
    out = _Gathered()
    for batch, often in encoded(piece, setting, out.counts, out.rejects):
        lengths = np.diff(batch.offsets)
        repeats = np.array([often.get(int(row), 1) for row in batch.row], dtype=np.int64)
        out.counts.repeated_tokens += int(((repeats - 1) * lengths).sum())
        out.row_key.append(row_keys(batch.file, batch.row))
        out.part.append(batch.part)
        out.digest.append(segment_digests(batch.input_ids, batch.loss_mask, batch.loss_weight, batch.offsets))
        out.split.append(batch.split)
        out.copies.append(repeats)
    files = np.array([r.file for r in out.rejects], dtype=np.int32)
    return FreshRows(
        row_key=np.concatenate([np.zeros(0, np.int64), *out.row_key]),
        part=np.concatenate([np.zeros(0, np.int32), *out.part]),
        digest=np.concatenate([np.zeros(0, np.uint64), *out.digest]),
        split=np.concatenate([np.zeros(0, np.int16), *out.split]),
        copies=np.concatenate([np.zeros(0, np.int64), *out.copies]),
        reject_key=row_keys(files, np.array([r.row for r in out.rejects], dtype=np.int64)),
        reject_part=np.array([-1 if r.part is None else r.part for r in out.rejects], dtype=np.int32),
        reject_reason=np.array([REASONS.index(r.reason.value) for r in out.rejects], dtype=np.int64),
        source=setting.inputs[piece.file].source,
        counts=out.counts,
    )


def encoded(
    piece: Piece, setting: FreshSetting, counts: Counts, rejects: list[Reject]
) -> Iterator[tuple[EncodedBatch, dict[int, int]]]:
    """Batches of a piece by the slow method, and how often each row is to be packed where that is not once."""
    encoder = open_encoder(setting.job, setting.encoder)
    source = setting.source_of(piece)
    often: dict[int, int] = {}
    examples: list[Example] = []

    def flush() -> EncodedBatch:
        batch: EncodedBatch = encoder.encode_slow(examples, source=source.name)
        counts.add(batch.counts)
        rejects.extend(batch.rejects)
        examples.clear()
        return batch

    for example in judged(piece, setting, source, counts, rejects, often):
        examples.append(example)
        if len(examples) == BATCH_ROWS:
            yield flush(), often
    if examples:
        yield flush(), often


def judged(
    piece: Piece,
    setting: FreshSetting,
    source: Source,
    counts: Counts,
    rejects: list[Reject],
    often: dict[int, int],
) -> Iterator[Example]:
    """The rows of a piece that are to be encoded; the others are counted."""
    file = setting.inputs[piece.file]
    reading = setting.readings[source.name]
    for row in read_piece(piece, file, store=setting.store, storage_options=setting.storage_options):
        if source.where and row.error is None and not passes(row, source.where):
            counts.rows += 1
            counts.filtered += 1
            continue
        times = copies(source.weight, seed=setting.job.seed, source=source.name, path=file.path, row=row.row)
        if times == 0:
            counts.rows += 1
            counts.left_out += 1
            continue
        example = read_example(row, reading, source_name=source.name)
        if isinstance(example, Reject):
            counts.rows += 1
            counts.rejected += 1
            reason = example.reason.value
            counts.rejected_by_reason[reason] = counts.rejected_by_reason.get(reason, 0) + 1
            rejects.append(example)
            continue
        if times != 1:
            often[row.row] = times
        yield example
