"""Refuses packs whose boundaries, mask and counts contradict each other: they would train silently wrong.

Page checksums find bits that flipped on disk; this finds a shard that was written wrong, or by something else. It costs
about a tenth of what decoding does. What it computes on the way, segments and tokens without the padding tails, is what
a batch is made of. `lay_row` of the compiled code makes the same checks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards import PackPages
from packsvc.stream.rows import Rows


def check_packs(packs: Sequence[PackPages], counts: NDArray[np.int64], name: Callable[[int], str]) -> Rows:
    """Check some packs against themselves and against their counts, and leave out their padding tails.

    Args:
        packs: What was read.
        counts: (packs, 4) their count columns, in the order of `COUNT_COLUMNS`.
        name: What to call the i-th of them in an error.

    Raises:
        DamageError: Names the pack and what contradicts what.
    """

    def refuse(pack: int, otherwise: str) -> NoReturn:
        raise DamageError(f"{name(pack)}: {otherwise}; run `packsvc validate` and pack again")

    cu, masks = np.concatenate([pack.cu_seqlens for pack in packs]), [pack.loss_mask for pack in packs]
    sizes, seq_len = [len(pack.cu_seqlens) for pack in packs], len(masks[0])
    num_segments, num_tokens, num_targets, squares = counts.T.tolist()
    # A few Python steps a pack are cheaper than numpy's price per call, which is paid for what has many values.
    starts = list(accumulate(sizes, initial=0))
    for pack, (start, size, real, tokens) in enumerate(zip(starts, sizes, num_segments, num_tokens, strict=False)):
        if real < 1 or size != real + 1 + (tokens < seq_len):
            refuse(pack, "cu_seqlens and num_segments disagree")
        if cu.item(start) != 0 or cu.item(start + size - 1) != seq_len:
            refuse(pack, "cu_seqlens does not span the row")
    steps = cu[1:] - cu[:-1]
    # From one pack's last boundary to the next one's first they fall, by seq_len; everywhere else they must rise.
    if np.count_nonzero(steps > 0) != len(steps) - (len(sizes) - 1):
        steps[np.array(starts[1:-1], dtype=np.int64) - 1] = 1
        refuse(bisect_right(starts, int((steps <= 0).argmax())) - 1, "cu_seqlens does not rise")
    for pack, (start, real, tokens) in enumerate(zip(starts, num_segments, num_tokens, strict=False)):
        if cu.item(start + real) != tokens:
            refuse(pack, "cu_seqlens and num_tokens disagree")

    lengths = np.concatenate([steps[a : a + n] for a, n in zip(starts, num_segments, strict=False)])
    on = np.concatenate([row[:n] for row, n in zip(masks, num_tokens, strict=True)])
    begins_with_loss = on[lengths.cumsum() - lengths]
    first = list(accumulate(num_segments, initial=0))
    if np.count_nonzero(begins_with_loss):
        refuse(bisect_right(first, int(begins_with_loss.argmax())) - 1, "a segment's first token has loss")
    targets = [int(np.count_nonzero(row)) for row in masks]
    if np.count_nonzero(on) != sum(targets):
        tails = [bool(row[n:].any()) for row, n in zip(masks, num_tokens, strict=True)]
        refuse(tails.index(True), "the padding tail has loss")
    if targets != num_targets:
        refuse(_first_other(targets, num_targets), "loss_mask and num_loss_tokens disagree")
    found = np.add.reduceat(np.multiply(lengths, lengths, dtype=np.int64), first[:-1]).tolist()
    if found != squares:
        refuse(_first_other(found, squares), "cu_seqlens and sum_squared_lengths disagree")
    return Rows(
        input_ids=np.concatenate([pack.input_ids[:n] for pack, n in zip(packs, num_tokens, strict=True)]),
        loss_mask=on,
        loss_weight=_weights(packs, num_tokens),
        lengths=lengths,
        num_segments=num_segments,
        num_tokens=num_tokens,
    )


def _weights(packs: Sequence[PackPages], num_tokens: list[int]) -> NDArray[np.float32] | None:
    """Of the real tokens; a pack without weights, in a mixture with others, has loss in full."""
    if all(pack.loss_weight is None for pack in packs):
        return None
    weights = [pack.loss_mask.astype(np.float32) if pack.loss_weight is None else pack.loss_weight for pack in packs]
    return np.concatenate([row[:n] for row, n in zip(weights, num_tokens, strict=True)])


def _first_other(found: list[int], expected: list[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
