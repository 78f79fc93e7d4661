"""Refuses packs whose boundaries, mask and counts contradict each other: they would train silently wrong.

Page checksums find bits that flipped on disk; this finds a shard that was written wrong, or by something else.
Vectorised over the packs of a batch; about a tenth of what decoding them costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards import PackPages


def check_packs(
    packs: Sequence[PackPages], counts: Mapping[str, NDArray[np.int64]], name: Callable[[int], str]
) -> None:
    """Check some packs against themselves and against their counts.

    Args:
        packs: What was read.
        counts: The count columns of these packs.
        name: What to call the i-th of them in an error.

    Raises:
        DamageError: Names the pack and what contradicts what.
    """
    seq_len = len(packs[0].loss_mask)
    num_tokens, num_segments = counts["num_tokens"], counts["num_segments"]
    sizes = np.array([len(pack.cu_seqlens) for pack in packs])
    cu = np.concatenate([pack.cu_seqlens for pack in packs])
    mask = np.concatenate([pack.loss_mask for pack in packs])
    ends = sizes.cumsum()
    starts, lasts = ends - sizes, ends - 1
    real_ends = starts + num_segments
    has_tail = num_tokens < seq_len

    def demand(holds: NDArray[np.bool_], otherwise: str) -> None:
        if not holds.all():
            pack = int(np.flatnonzero(~holds)[0])
            raise DamageError(f"{name(pack)}: {otherwise}; run `packsvc validate` and pack again")

    demand((num_segments > 0) & (sizes == num_segments + 1 + has_tail), "cu_seqlens and num_segments disagree")
    demand((cu[starts] == 0) & (cu[lasts] == seq_len), "cu_seqlens does not span the row")
    lengths = np.empty(len(cu), dtype=np.int64)
    np.subtract(cu[1:], cu[:-1], out=lengths[:-1])
    lengths[lasts] = 1
    if lengths.min() <= 0:
        demand(np.minimum.reduceat(lengths, starts) > 0, "cu_seqlens does not rise")
    demand(cu[real_ends] == num_tokens, "cu_seqlens and num_tokens disagree")

    # Boundaries as places in the flat mask. A row's last is the next one's first, which may have no loss either; the
    # very last is beyond the mask. Tails begin a segment too.
    places = cu + np.arange(len(packs)).repeat(sizes) * seq_len
    if mask[places[:-1]].any():
        has_loss = np.append(mask[places[:-1]], False)
        has_loss[lasts] = False
        demand(~np.logical_or.reduceat(has_loss, starts), "a segment's first token has loss")
    numbers = num_tokens.tolist()
    in_tails = [np.count_nonzero(pack.loss_mask[n:]) for pack, n in zip(packs, numbers, strict=True)]
    demand(np.array(in_tails) == 0, "the padding tail has loss")
    targets = np.array([np.count_nonzero(pack.loss_mask) for pack in packs])
    demand(targets == counts["num_loss_tokens"], "loss_mask and num_loss_tokens disagree")
    lengths[lasts] = 0
    lengths[real_ends[has_tail]] = 0
    squares = np.add.reduceat(lengths * lengths, starts)
    demand(squares == counts["sum_squared_lengths"], "cu_seqlens and sum_squared_lengths disagree")
