"""Position ids from segment boundaries: 0, 1, 2, ... in every segment, the padding tail included.

Rebuilding them is faster than reading the stored column, so readers do; `validate` compares the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import FormatError


def position_ids_from_cu_seqlens(cu_seqlens: NDArray[np.int32], *, seq_len: int) -> NDArray[np.int32]:
    """Number each token within its own segment.

    Args:
        cu_seqlens: (num_segments + 1,) int32, first 0, strictly increasing, in tokens.
        seq_len: Tokens per pack, padding included.

    Returns:
        (seq_len,) int32, 0 at every boundary. The padding tail also counts from 0.
        [0, 3, 5] with seq_len 8 gives [0 1 2 0 1 0 1 2].

    Raises:
        FormatError: The last boundary lies beyond `seq_len`, the first is not 0, or they do not increase.
    """
    bounds = np.asarray(cu_seqlens)
    if len(bounds) == 0 or bounds[0] != 0:
        raise FormatError(f"cu_seqlens must start at 0, not {bounds[:1].tolist()}")
    if bounds[-1] > seq_len:
        raise FormatError(f"the last boundary of cu_seqlens is {int(bounds[-1])}, beyond seq_len {seq_len}")
    if (falling := np.flatnonzero(bounds[1:] <= bounds[:-1])).size:
        at = int(falling[0])
        raise FormatError(f"cu_seqlens must increase, but boundary {at + 1} is {bounds[at + 1]} after {bounds[at]}")
    if bounds[-1] < seq_len:
        bounds = np.append(bounds, seq_len)
    offsets = np.array([0, len(bounds)], dtype=np.int64)
    return position_ids(bounds.astype(np.int32), offsets, seq_len=seq_len).reshape(-1)


def position_ids(cu_seqlens: NDArray[np.int32], cu_offsets: NDArray[np.int64], *, seq_len: int) -> NDArray[np.int32]:
    """The same for many packs at once; nothing is checked.

    Args:
        cu_seqlens: Boundaries of all packs back to back; per pack 0 first, `seq_len` last, strictly increasing.
        cu_offsets: (num_packs + 1,) where each pack's boundaries start.
        seq_len: Tokens per pack, padding included.

    Returns:
        (num_packs, seq_len) int32.
    """
    num_packs = len(cu_offsets) - 1
    sizes = np.diff(cu_seqlens)
    inside = np.ones(len(sizes), dtype=np.bool_)
    inside[cu_offsets[1:-1] - 1] = False  # from the end of one pack to the start of the next
    sizes = sizes[inside]
    # Starts count over all packs; 32 bits hold them up to 2^31 tokens a call, and halve the work.
    dtype = np.int32 if num_packs * seq_len < 2**31 else np.int64
    starts = np.cumsum(sizes, dtype=dtype) - sizes.astype(dtype)
    positions: NDArray[Any] = np.arange(num_packs * seq_len, dtype=dtype)
    positions -= np.repeat(starts, sizes)
    return positions.astype(np.int32, copy=False).reshape(num_packs, seq_len)
