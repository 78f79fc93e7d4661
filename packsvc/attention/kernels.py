"""The CUDA kernels, looked up once. Each takes (q, k, v, cu_seqlens, max_seqlen, window, scale, dropout, softcap)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Kernel = Callable[..., torch.Tensor]


@cache
def flash_kernel() -> Kernel | None:
    """flash-attn 2's varlen function; None where it is not installed or does not load."""
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError):
        return None

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int | None,
        scale: float,
        dropout: float,
        softcap: float | None,
    ) -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            dropout_p=dropout,
            softmax_scale=scale,
            causal=True,  # the default is not
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return out

    return attend


@cache
def torch_kernel() -> Kernel | None:
    """PyTorch's varlen attention; None in a PyTorch that has none, or none that takes a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"window_size", "scale"} <= set(known):
        return None
    grouped = "enable_gqa" in known

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int | None,
        scale: float,
        dropout: float,
        softcap: float | None,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
        if q.shape[1] != k.shape[1]:
            if grouped:
                options["enable_gqa"] = True
            else:
                group = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
        assert isinstance(out, torch.Tensor)
        return out

    return attend
