"""Causal attention inside each segment of a flattened row, and nowhere else.

On CUDA by flash-attn where it can be imported, else by PyTorch's own varlen kernel; elsewhere, and for what those
kernels cannot do, by one call of scaled dot product attention for each segment. All are the same function, so one
set of tests on the CPU speaks for all.

Query i of a segment sees the segment's keys up to i, the last `window` of them where there is a window:

    segments 3 + 2      1 . . . .        window 2      1 . . . .
                        1 1 . . .                      1 1 . . .
                        1 1 1 . .                      . 1 1 . .
                        . . . 1 .                      . . . 1 .
                        . . . 1 1                      . . . 1 1
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from packsvc.attention.kernels import flash_kernel, torch_kernel
from packsvc.errors import ConfigError


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    window: int | tuple[int, int] | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over packed segments.

    Args:
        q: (T, heads, head_dim), all segments back to back.
        k: (T, kv_heads, head_dim); `kv_heads` divides `heads` (grouped queries).
        v: (T, kv_heads, value_dim).
        cu_seqlens: (S + 1,) int32 on the tensors' device, 0 first, T last, strictly increasing.
        max_seqlen: Longest segment, a Python int.
        window: None: all earlier tokens of the segment. W: the last W, the token itself included. Also taken as
            flash-attn's (left, right): (-1, 0) is no window, (W - 1, 0) is W; `right` must be 0, since packs are
            trained causally.
        scale: Of the scores; default 1 / sqrt(head_dim).
        dropout: Probability of dropping an attention weight.
        softcap: Scores become softcap * tanh(scores / softcap) (Gemma 2).
        sinks: (heads,) a learned score that takes part in each softmax and gives nothing (gpt-oss).

    Returns:
        (T, heads, value_dim).

    Raises:
        ConfigError: Shapes, dtypes or offsets that do not fit together.
    """
    size = window_size(window)
    _check(q, k, v, cu_seqlens, max_seqlen)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and v.shape[-1] == q.shape[-1] and sinks is None:
        kernel = flash_kernel() or (torch_kernel() if softcap is None and not dropout else None)
        if kernel is not None:
            return kernel(q, k, v, cu_seqlens, max_seqlen, size, scale, dropout, softcap)
    return segment_attention(
        q, k, v, cu_seqlens.tolist(), size, scale=scale, dropout=dropout, softcap=softcap, sinks=sinks
    )


def window_size(window: int | tuple[int, int] | None) -> int | None:
    """How many tokens a query sees, itself included; None: all. Raises ConfigError."""
    if window is None:
        return None
    if isinstance(window, int):
        if window >= 1 and window is not True:
            return window
        raise ConfigError(
            f"window is {window}; it counts the tokens a query sees, itself included: at least 1, or None"
        )
    left, right = window
    if right != 0 or left < -1:
        raise ConfigError(f"window is {window}; packs are trained causally: (left, 0), with left -1 for no window")
    return None if left == -1 else left + 1


def segment_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    boundaries: list[int],
    window: int | None,
    *,
    scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same, segment by segment: what a segment sees cannot be another, since it is never handed another."""
    pieces = []
    for start, stop in pairwise(boundaries):
        # (heads, n, dim), with a batch of one in front.
        parts = [tensor[start:stop].transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
        if softcap is None and sinks is None:
            out = _sdpa(*parts, window=window, scale=scale, dropout=dropout)
        else:
            out = _spelled_out(*parts, window=window, scale=scale, dropout=dropout, softcap=softcap, sinks=sinks)
        pieces.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(pieces)


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int | None, scale: float, dropout: float
) -> torch.Tensor:
    length = q.shape[-2]
    grouped = q.shape[1] != k.shape[1]
    if window is None or window >= length:
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = _visible(length, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped)


def _spelled_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with the scores in hand, for what no fused call offers. Softmax in float32 or wider."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_visible(q.shape[-2], window, q.device), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, scores.shape[-2], 1)
        scores = torch.cat([scores, column], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)[..., : k.shape[-2]]
    return torch.nn.functional.dropout(weights, p=dropout, training=dropout > 0) @ v


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(length, length) bool: which keys (columns) a query (row) sees."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
    if not (q.ndim == k.ndim == v.ndim == 3 and len(q) == len(k) == len(v)):
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ConfigError(f"q, k, v have shapes {shapes}; they must be (T, heads, head_dim) with one T")
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ConfigError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; it must be int32 (segments + 1,)"
        )
    if not isinstance(max_seqlen, int):
        raise ConfigError(
            f"max_seqlen is a {type(max_seqlen).__name__}; it must be a Python int, since a device tensor makes "
            "kernels recompile or wait at every step"
        )
    if cu_seqlens.is_cuda:
        return  # to look at the values would make the device wait, in every layer
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != len(q) or int(lengths.min()) < 1:
        raise ConfigError(f"cu_seqlens is {cu_seqlens.tolist()}; it must rise from 0 to {len(q)}, the number of tokens")
    if int(lengths.max()) > max_seqlen:
        raise ConfigError(f"max_seqlen is {max_seqlen}, but a segment has {int(lengths.max())} tokens")
