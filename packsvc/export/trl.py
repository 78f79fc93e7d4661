"""TRL's SFTTrainer: one row a pack, with `input_ids`, `labels` and `seq_lengths`.

    args = SFTConfig(padding_free=True, packing=False, max_length=None)

The collator of TRL 1.16 makes positions and boundaries from `seq_lengths` when `padding_free` is on. Without that
column, without `padding_free`, or packed once more, the same rows train with attention across examples, and the
loss looks normal. `packsvc.trainers` sets these and refuses the rest. Labels stand at their own token (the model
shifts), -100 off target and on each segment's first token. Padding tails are left out.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from packsvc.export.segments import Segments
from packsvc.export.tables import ListRows, list_table


class Trl(ListRows):
    """See the module."""

    def notes(self) -> list[str]:
        return [
            "SFTConfig: padding_free=True, packing=False, max_length=None, and keep the column seq_lengths; "
            "packsvc.trainers.sft_trainer sets and checks this. Unsloth's SFTTrainer takes the same"
        ]

    def table(self, segments: Segments) -> pa.Table:
        return list_table(
            {
                "input_ids": (segments.ids, segments.pack_offsets),
                "labels": (segments.labels, segments.pack_offsets),
                "seq_lengths": (segments.lengths.astype(np.int32), segments.pack_segments),
            }
        )
