"""torchtune's packed rows: `tokens`, `labels`, `input_pos`, `seq_lens`, all of `seq_len` tokens.

What its `PackedDataset` holds in memory, so that its `padded_collate_packed` takes the rows as they are. Labels
are not shifted: its recipes do that, over the whole row, and a segment's first token is -100 here, so nothing is
learned across a boundary. The padding tail is one last entry of `seq_lens`; its positions count from 0 again.

    dataset:
      _component_: packsvc.trainers.torchtune_packs
      path: DEST
      packed: True
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from packsvc.assemble import position_ids
from packsvc.export.segments import IGNORED, Segments
from packsvc.export.tables import ListRows, list_table


class Torchtune(ListRows):
    """See the module."""

    def notes(self) -> list[str]:
        return [
            "dataset: {_component_: packsvc.trainers.torchtune_packs, path: DEST, packed: True}, and "
            f"tokenizer.max_seq_len {self._source.manifest.seq_len}"
        ]

    def table(self, segments: Segments) -> pa.Table:
        packs = segments.packs
        num_packs, seq_len = packs.input_ids.shape
        rows = np.arange(num_packs + 1, dtype=np.int64) * seq_len
        labels = np.where(packs.loss_mask, packs.input_ids, np.int32(IGNORED)).astype(np.int32)
        is_last = np.zeros(len(packs.cu_seqlens), dtype=np.bool_)
        is_last[packs.cu_offsets[1:] - 1] = True
        lengths = np.append(np.diff(packs.cu_seqlens), 0)[~is_last].astype(np.int32)
        positions = position_ids(packs.cu_seqlens, packs.cu_offsets, seq_len=seq_len)
        return list_table(
            {
                "tokens": (packs.input_ids.reshape(-1), rows),
                "labels": (labels.reshape(-1), rows),
                "input_pos": (positions.reshape(-1), rows),
                "seq_lens": (lengths, packs.cu_offsets - np.arange(num_packs + 1)),
            }
        )
