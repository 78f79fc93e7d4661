"""A stand-in for flash-attn where it is not installed: the same signature over the segment loop of `attention`.

With it the probe tells on any machine which arguments a model hands to the kernel and which boundaries transformers
infers where they are missing. It is not the kernel, and the report says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from packsvc.attention import varlen_attention
from packsvc.errors import ConfigError


@contextmanager
def flash_stand_in() -> Iterator[None]:
    """Let transformers find this module's functions where it looks for flash-attn's."""
    import transformers.modeling_flash_attention_utils as flash

    inner: Any = flash
    load = inner._lazy_imports
    functions: tuple[Any, ...] = (attend_rows, attend_varlen, None, inner._pad_input, inner._unpad_input)
    if len(inspect.signature(load).parameters) < 3:  # before paged kernels came
        functions = (*functions[:2], *functions[3:])
    before = dict(vars(inner))
    inner._lazy_imports = lambda *args, **options: functions
    inner._loaded_implementation = None
    try:
        yield
    finally:
        # It keeps what it loaded in names of its own, which differ between versions.
        vars(inner).update(before)


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn's varlen function for causal self-attention; rows past the last boundary stay unwritten (NaN)."""
    if not causal or alibi_slopes is not None or not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ConfigError("the stand-in for flash-attn knows causal self-attention without alibi only")
    end = int(cu_seqlens_q[-1])
    out = varlen_attention(
        q[:end],
        k[:end],
        v[:end],
        cu_seqlens_q,
        int(max_seqlen_q),
        (window_size[0], 0),
        scale=softmax_scale,
        dropout=dropout_p,
        softcap=softcap or None,
        sinks=s_aux,
    )
    return torch.cat([out, torch.full_like(out[:1], float("nan")).expand(len(q) - end, *out.shape[1:])])


def attend_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """flash-attn's plain function: (B, n, heads, dim), each row one segment."""
    rows, length = q.shape[:2]
    offsets = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    out = attend_varlen(flat[0], flat[1], flat[2], offsets, offsets, length, length, **options)
    return out.view(rows, length, *out.shape[1:])
