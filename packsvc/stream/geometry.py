"""Refuses packs whose boundaries, mask and counts contradict each other: they would train silently wrong.

Page checksums find bits that flipped on disk; this finds a shard that was written wrong, or by something else.
Vectorised over the packs of a batch; about a tenth of what decoding them costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.shards import PackPages


def check_packs(
    packs: Sequence[PackPages], counts: Mapping[str, NDArray[np.int64]], *, where: str, numbers: NDArray[np.int64]
) -> None:
    """Check some packs against themselves and against their counts.

    Args:
        packs: What was read.
        counts: The count columns of these packs.
        where: The shard, for errors.
        numbers: Of these packs inside it.

    Raises:
        DamageError: Names the shard, the pack and what contradicts what.
    """
    seq_len = len(packs[0].loss_mask)
    mask = np.concatenate([pack.loss_mask for pack in packs])
    cu = np.concatenate([pack.cu_seqlens for pack in packs])
    sizes = np.array([len(pack.cu_seqlens) for pack in packs])
    ends = np.cumsum(sizes)
    starts = ends - sizes
    num_tokens, num_segments = counts["num_tokens"], counts["num_segments"]
    real_ends = starts + num_segments

    def demand(holds: NDArray[np.bool_], otherwise: str) -> None:
        if not holds.all():
            pack = int(numbers[int(np.flatnonzero(~holds)[0])])
            raise DamageError(f"{where}, pack {pack} of the shard: {otherwise}; run `packsvc validate` and pack again")

    demand(num_segments > 0, "there is no segment")
    demand(sizes == num_segments + 1 + (num_tokens < seq_len), "cu_seqlens and num_segments disagree")
    demand((cu[starts] == 0) & (cu[ends - 1] == seq_len), "cu_seqlens does not span the row")
    lengths = np.diff(cu, append=0)
    lengths[ends - 1] = 1
    demand(np.minimum.reduceat(lengths, starts) > 0, "cu_seqlens does not rise")
    demand(cu[real_ends] == num_tokens, "cu_seqlens and num_tokens disagree")

    # From here on as indices into the flat mask; the first tokens are those of all segments, tails included.
    row_starts = np.arange(len(packs)) * seq_len
    places = cu + np.repeat(row_starts, sizes)
    firsts = np.delete(places, ends - 1)
    demand(~np.logical_or.reduceat(mask[firsts], starts - np.arange(len(packs))), "a segment's first token has loss")
    targets = np.array([np.count_nonzero(pack.loss_mask) for pack in packs])
    tails = [np.count_nonzero(pack.loss_mask[n:]) for pack, n in zip(packs, num_tokens.tolist(), strict=True)]
    demand(np.array(tails) == 0, "the padding tail has loss")
    demand(targets == counts["num_loss_tokens"], "loss_mask and num_loss_tokens disagree")
    lengths[real_ends[num_tokens < seq_len]] = 0
    lengths[ends - 1] = 0
    squares = np.add.reduceat(lengths.astype(np.int64) ** 2, starts)
    demand(squares == counts["sum_squared_lengths"], "cu_seqlens and sum_squared_lengths disagree")
