"""One row an example: `input_ids`, `labels`, `attention_mask`, for trainers that pack by themselves.

Labels are -100 off target and on the first token, so that an example that another packer puts behind another one
is never learned from it. Where the output has loss weights they go along as `loss_weight`; none of these trainers
reads that column by itself.

    # Axolotl (read by its 0.19): rows that have these three columns are taken as they are
    datasets:
      - path: DEST
        ds_type: parquet
        type:
    sample_packing: true
    train_on_inputs: true          # the labels are already masked
    # Unsloth: SFTTrainer(train_dataset=load_dataset("parquet", ...), args=SFTConfig(max_length=None)); its TRL can pack
    # them anew (packing=True, max_length=SEQ_LEN), but rows packed here (--to trl) are the better choice
    # LLaMA-Factory (by its source): tokenized_path: DISK, after load_dataset("parquet", ...).save_to_disk(DISK); it
    # packs only while it tokenizes, so these rows are then trained unpacked
    # ms-swift (by its source): --cached_dataset DISK, with a column lengths added
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from packsvc.export.layout import Source
from packsvc.export.segments import Segments
from packsvc.export.tables import Column, ListRows, list_table


class Examples(ListRows):
    """See the module."""

    rows_per_group = 10_000

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._weighted = False

    def notes(self) -> list[str]:
        notes = [
            "Axolotl: `path: DEST`, `ds_type: parquet`, `type:` empty, `sequence_len` at least "
            f"{self._source.manifest.seq_len}; labels are masked already, do not mask or truncate again"
        ]
        if self._weighted:
            notes.append(
                "the column loss_weight holds the weights of targets; a trainer that ignores it learns all fully"
            )
        return notes

    def table(self, segments: Segments) -> pa.Table:
        columns: dict[str, Column] = {
            "input_ids": (segments.ids, segments.offsets),
            "labels": (segments.labels, segments.offsets),
            "attention_mask": (np.ones(len(segments.ids), dtype=np.int8), segments.offsets),
        }
        if segments.weights is not None:
            self._weighted = True
            columns["loss_weight"] = (segments.weights, segments.offsets)
        return list_table(columns)
