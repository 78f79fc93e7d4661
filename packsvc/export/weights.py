"""Refuses loss weights that a format cannot say: a trainer that never sees them would learn everything fully."""

from __future__ import annotations

import numpy as np

from packsvc.errors import FormatError
from packsvc.shards import ShardReader


def refuse_fractional_weights(reader: ShardReader, *, to: str) -> None:
    """Go through the weights of a shard, a row group at a time; nothing to do where it has none.

    Raises:
        FormatError: A target has a weight other than 1.
        DamageError: The shard is damaged.
    """
    if not reader.loss_weights:
        return
    first = 0
    for packs in reader.chunks(["loss_mask", "loss_weight"]):
        assert packs.loss_weight is not None
        wrong = (packs.loss_mask & (packs.loss_weight != 1)).any(axis=1)
        if wrong.any():
            pack = first + int(np.flatnonzero(wrong)[0])
            raise FormatError(
                f"{reader.where}, pack {pack}: targets have loss weights other than 1, which {to} has no place for and "
                "its trainer would ignore. Export --to examples, which keeps them in the column loss_weight, train "
                "with packsvc.PackStream and packsvc.trainers, or pack with loss_weights: false"
            )
        first += packs.num_packs
