"""Packed Parquet of Megatron-Bridge and NeMo: `input_ids`, `seq_start_id`, `loss_mask`, one row a pack.

Its loader cuts each segment of n tokens into n - 1 inputs (all but the last) and n - 1 labels (all but the first),
so its mask stands at the token that predicts: `loss_mask[j]` there is ours at j + 1, and 0 on a segment's last
token. `seq_start_id` has starts only. Padding tails are left out; the sum of n - 1 always fits into `seq_len`.

    segment   a b C D    ours  0 0 1 1     theirs  0 1 1 0     pairs trained  (b, C) (C, D)

With `pad_to_multiple` M (its `pad_seq_to_mult`: 2 x context parallel, lcm with tensor parallel) each stored segment
has k x M + 1 tokens, filled with EOS under a mask of 0.

Two things its loader does by token value, which no file can change: it takes the loss from every position whose
input token is its EOS, so a target right after one is not learned (counted in the notes); and with padding it ends a
segment at the last token that is not EOS. It ignores the stored mask unless `answer_only_loss=True`.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packsvc.errors import ConfigError, DamageError
from packsvc.export.layout import Source
from packsvc.export.segments import Segments
from packsvc.export.tables import ListRows, list_table

METADATA = "packed_metadata.json"


class Megatron(ListRows):
    """See the module."""

    rows_per_group = 500
    suffix = ".idx.parquet"
    """The ending that all versions of the loader know as packed data."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._multiple = source.pad_to_multiple
        self._refuse_padding_that_may_not_fit()
        self._lengths = _Lengths()
        self._after_stop: Counter[int] = Counter()
        facts = source.manifest.tokenizer
        self._stops = [source.eos_id] if source.eos_id is not None else sorted({*facts.stop_ids, facts.pad_id})

    def extra_files(self) -> dict[str, bytes]:
        record = self._lengths.to_json(pack_size=self._source.manifest.seq_len)
        return {METADATA: json.dumps([record], indent=1).encode() + b"\n"}

    def notes(self) -> list[str]:
        notes = [
            f"seq_length={self._source.manifest.seq_len}, answer_only_loss=True (else the stored mask is ignored), "
            f"micro_batch_size=1, pad_seq_to_mult={self._multiple}, pack_metadata_file_path={METADATA}"
        ]
        notes += [
            f"{count:,} targets stand right after token {token}: where that is the tokenizer's EOS, Megatron-Bridge "
            "takes the loss from them"
            for token, count in sorted(self._after_stop.items())
        ]
        if self._multiple > 1:
            notes.append(
                f"segments are padded with token {self._source.eos_id}; one that ends in that token itself counts one "
                "token shorter in cu_seqlens_unpadded, with no change to its loss"
            )
        return notes

    def table(self, segments: Segments) -> pa.Table:
        lengths = segments.lengths
        if len(lengths) and lengths.min() < 2:
            raise DamageError(
                f"a segment of one token in {self._source.split}: it has no label; run `packsvc validate`"
            )
        self._count_after_stops(segments)
        # The next segment's first token has no loss, so this is 0 on a segment's last one.
        predicts = np.append(segments.mask[1:], False)
        stored = -(-(lengths - 1) // self._multiple) * self._multiple + 1
        offsets = np.zeros(len(stored) + 1, dtype=np.int64)
        np.cumsum(stored, out=offsets[1:])
        ids, mask = segments.ids, predicts.astype(np.int8)
        if self._multiple > 1:
            places = np.arange(len(ids)) + np.repeat(offsets[:-1] - segments.offsets[:-1], lengths)
            ids = np.full(int(offsets[-1]), self._source.eos_id, dtype=np.int32)
            mask = np.zeros(int(offsets[-1]), dtype=np.int8)
            ids[places], mask[places] = segments.ids, predicts
        pack_offsets = offsets[segments.pack_segments]
        starts = offsets[:-1] - np.repeat(pack_offsets[:-1], np.diff(segments.pack_segments))
        self._lengths.add(stored - 1, segments.pack_segments)
        return list_table(
            {
                "input_ids": (ids, pack_offsets),
                "seq_start_id": (starts.astype(np.int32), segments.pack_segments),
                "loss_mask": (mask, pack_offsets),
            }
        )

    def _count_after_stops(self, segments: Segments) -> None:
        """Count targets whose input token could be what the loader knows as EOS."""
        inputs = segments.ids[:-1][segments.mask[1:]]  # a target is never first, so its input is of its own segment
        for stop in self._stops:
            if count := int(np.count_nonzero(inputs == stop)):
                self._after_stop[stop] += count

    def _refuse_padding_that_may_not_fit(self) -> None:
        manifest, multiple = self._source.manifest, self._multiple
        if multiple == 1:
            return
        if self._source.eos_id is None:
            raise ConfigError(
                "padding segments for Megatron needs --eos-id: its loader finds the padding by the EOS of the "
                "tokenizer it uses"
            )
        if manifest.align % multiple:
            raise ConfigError(
                f"--pad-to-multiple {multiple}: the output reserved room for multiples of {manifest.align} only, so "
                f"padded packs may pass seq_len {manifest.seq_len}; first run `packsvc repack OUT NEW --seq-len "
                f"{manifest.seq_len} --align {multiple}`"
            )


class _Lengths:
    """What the loader wants to know of all packs, in tokens at run time (n - 1 a segment)."""

    def __init__(self) -> None:
        self.packs = self.segments = self.tokens = self.longest = self.deepest = 0
        self.shortest_pack: int | None = None

    def add(self, lengths: NDArray[np.int64], pack_segments: NDArray[np.int64]) -> None:
        if len(pack_segments) < 2:
            return
        per_pack = np.add.reduceat(lengths, pack_segments[:-1])
        self.packs += len(per_pack)
        self.segments += len(lengths)
        self.tokens += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()))
        self.deepest = max(self.deepest, int(np.diff(pack_segments).max()))
        least = int(per_pack.min())
        self.shortest_pack = least if self.shortest_pack is None else min(self.shortest_pack, least)

    def to_json(self, *, pack_size: int) -> dict[str, int | float]:
        packs = max(1, self.packs)
        return {
            "dataset_max_seqlen": self.longest,
            "max_samples_per_bin": self.deepest,
            "packing_factor": round(self.segments / packs, 2),
            "packing_efficiency": round(100 * self.tokens / packs / pack_size, 2),
            "pack_size": pack_size,
            "min_packed_seqlen": self.shortest_pack or 0,
        }
