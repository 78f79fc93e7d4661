"""The dataset component for torchtune's recipes, on rows that `packsvc export --to torchtune` wrote.

    dataset:
      _component_: packsvc.trainers.torchtune_packs
      path: out-torchtune
      packed: True
    tokenizer:
      max_seq_len: 4096          # the seq_len of the packs
    batch_size: 1                # packs

Its recipes hand rows of a dataset with `packed: True` to `padded_collate_packed`, which makes the block mask from
`seq_lens`, and shift the labels themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from packsvc.errors import ConfigError
from packsvc.trainers.sft import exported_rows

COLUMNS = ("tokens", "labels", "input_pos", "seq_lens")


class TorchtunePacks(Dataset[dict[str, torch.Tensor]]):
    """Packed rows of int64 tensors, read from memory-mapped files."""

    packed = True

    def __init__(self, rows: Any) -> None:
        self._rows = rows.with_format("torch")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        return {name: row[name] for name in COLUMNS}


def torchtune_packs(tokenizer: Any = None, *, path: str, split: str = "train", packed: bool = True) -> TorchtunePacks:
    """The packs of an export.

    Args:
        tokenizer: What torchtune hands to every dataset; only its `max_seq_len` is looked at.
        path: Folder or URL of the export.
        split: Which split of it.
        packed: Must be on, in the config too: the recipe picks its collator by it.

    Raises:
        ConfigError: The export is something else, or the recipe would cut or mix its rows.
    """
    if not packed:
        raise ConfigError("packed: False makes the recipe pad and mask these rows as single examples; set packed: True")
    rows = exported_rows(path, split=split)
    if missing := [name for name in COLUMNS if name not in rows.column_names]:
        raise ConfigError(
            f"{path}: has no column {missing[0]}; write it with `packsvc export OUT {path} --to torchtune`"
        )
    seq_len, limit = len(rows[0]["tokens"]), getattr(tokenizer, "max_seq_len", None)
    if limit is not None and limit < seq_len:
        raise ConfigError(
            f"the tokenizer's max_seq_len is {limit}, the packs have {seq_len} tokens; set it to {seq_len}"
        )
    return TorchtunePacks(rows)
