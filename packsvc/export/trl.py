"""TRL's SFTTrainer: one row a pack, with `input_ids`, `labels` and `seq_lengths`.

    args = SFTConfig(padding_free=True, packing=False, max_length=None)

The collator of TRL 1.16 makes positions and boundaries from `seq_lengths` when `padding_free` is on. Without that
column, without `padding_free`, or packed once more, the same rows train with attention across examples, and the
loss looks normal. `packsvc.trainers` sets these and refuses the rest. Labels stand at their own token (the model
shifts), -100 off target and on each segment's first token. Padding tails are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from packsvc.export.layout import Source
from packsvc.export.segments import Segments
from packsvc.export.tables import list_table, parquet_name, write_parquet

ROWS_PER_GROUP = 1000


class Trl:
    """See the module."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def write(self, chunks: Iterable[Segments], *, number: int, folder: Path) -> Iterator[Path]:
        path = folder / parquet_name(self._source.split, number, self._source.num_shards)
        write_parquet(path, map(_table, chunks), rows_per_group=ROWS_PER_GROUP)
        yield path

    def extra_files(self) -> dict[str, bytes]:
        return {}

    def notes(self) -> list[str]:
        return [
            "SFTConfig: padding_free=True, packing=False, max_length=None, and keep the column seq_lengths; "
            "packsvc.trainers.sft_trainer sets and checks this. Unsloth's SFTTrainer takes the same"
        ]


def _table(segments: Segments) -> pa.Table:
    return list_table(
        {
            "input_ids": (segments.ids, segments.pack_offsets),
            "labels": (segments.labels, segments.pack_offsets),
            "seq_lengths": (segments.lengths.astype(np.int32), segments.pack_segments),
        }
    )
