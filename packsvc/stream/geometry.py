"""Refuses packs whose boundaries, mask and counts contradict each other: they would train silently wrong.

Page checksums find bits that flipped on disk; this finds a shard that was written wrong, or by something else.
Vectorised over the packs of a row group; about a tenth of what decoding them costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import DamageError
from packsvc.types import PackColumns


def check_geometry(packs: PackColumns, *, where: str, first_pack: int) -> None:
    """Check packs read with `input_ids`, `loss_mask`, `cu_seqlens` and the counts.

    Args:
        packs: What was read.
        where: The shard, for errors.
        first_pack: Number of the first of these packs inside it.

    Raises:
        DamageError: Names the shard, the pack and what contradicts what.
    """
    num_packs, seq_len = packs.input_ids.shape
    cu, starts, lasts = packs.cu_seqlens, packs.cu_offsets[:-1], packs.cu_offsets[1:] - 1
    has_tail = np.less(packs.num_tokens, seq_len)

    def demand(holds: NDArray[np.bool_], otherwise: str) -> None:
        wrong = np.flatnonzero(~holds)
        if len(wrong):
            pack = first_pack + int(wrong[0])
            raise DamageError(f"{where}, pack {pack} of the shard: {otherwise}; run `packsvc validate` and pack again")

    demand(np.greater(packs.num_segments, 0), "there is no segment")
    demand(np.equal(lasts - starts, packs.num_segments + has_tail), "cu_seqlens and num_segments disagree")
    demand(np.equal(cu[starts], 0) & np.equal(cu[lasts], seq_len), "cu_seqlens does not span the row")
    rising = np.diff(cu, append=0) > 0
    rising[lasts] = True
    demand(np.bitwise_and.reduceat(rising, starts), "cu_seqlens does not rise")
    demand(np.equal(cu[starts + packs.num_segments], packs.num_tokens), "cu_seqlens and num_tokens disagree")

    # The first token of every segment, tails included, as an index into the flat mask.
    pack_of = np.repeat(np.arange(num_packs, dtype=np.int64), lasts - starts + 1)
    firsts = np.delete(pack_of * seq_len + cu, lasts)
    untrained = ~packs.loss_mask.reshape(-1)[firsts]
    demand(np.bitwise_and.reduceat(untrained, starts - np.arange(num_packs)), "a segment's first token has loss")
    beyond = packs.loss_mask & np.greater_equal(np.arange(seq_len), packs.num_tokens[:, None])
    demand(~np.any(beyond, axis=1), "the padding tail has loss")
    targets = np.count_nonzero(packs.loss_mask, axis=1)
    demand(np.equal(targets, packs.num_loss_tokens), "loss_mask and num_loss_tokens disagree")
