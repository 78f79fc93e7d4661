"""`packsvc_varlen` for transformers: attention that raises where other ways of calling leak.

A model built with `attn_implementation="packsvc_varlen"` attends by the batch's own boundaries, whatever cache,
mask of ones or batch shape comes with it. A batch without boundaries is refused: the other implementations then
attend across examples, and the loss looks normal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from packsvc.attention.varlen import varlen_attention
from packsvc.errors import ConfigError

NAME = "packsvc_varlen"


def register() -> str:
    """Make `packsvc_varlen` known to transformers; doing so again does nothing. Gives its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    return NAME


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: (B, heads, n, dim) in, (B, n, heads, dim) out.

    Raises:
        ConfigError: The batch has no boundaries, or something comes along that would be ignored.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ConfigError(
            f"{type(module).__name__} got no cu_seq_lens_q and max_length_q, so examples would attend to each other. "
            "Call the model with all of batch.hf(). If it was, this model does not pass them on to its attention and "
            "cannot be trained on packs this way"
        )
    if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise ConfigError(f"{type(module).__name__} is not causal; {NAME} is")
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{query.shape[2]} queries on {key.shape[2]} keys: the model runs on a filled cache; {NAME} is for training"
        )
    if attention_mask is not None:
        raise ConfigError(f"an attention mask of shape {tuple(attention_mask.shape)} came along, which {NAME} ignores")
    if bias := [name for name in ("position_bias", "attention_bias", "alibi") if others.get(name) is not None]:
        raise ConfigError(f"{type(module).__name__} adds {bias[0]} to its scores, which {NAME} would ignore")
    batch, _, length, _ = query.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = varlen_attention(
        q,
        k,
        v,
        cu_seq_lens_q,
        max_length_q,
        sliding_window,
        scale=scaling,
        dropout=dropout if module.training else 0.0,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.reshape(batch, length, *out.shape[1:]).contiguous(), None


def make_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    mask_function: Callable[..., Any] | None = None,
    **others: Any,
) -> None:
    """transformers' mask function: there is none to make. A mask of ones says nothing and is let pass.

    Raises:
        ConfigError: The mask hides something, or the model asks for a pattern of its own.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError(
            f"the attention_mask hides {int((~attention_mask.bool()).sum())} tokens; {NAME} takes flattened batches "
            "without padding: call the model with batch.hf(), which has no attention_mask"
        )
    if use_vmap:
        raise ConfigError(f"the model adds a pattern of its own to the causal mask, which {NAME} would ignore")
    if foreign := [word for word in ("chunked", "blockwise") if any(word in name for name in _names(mask_function))]:
        raise ConfigError(f"the model has {foreign[0]} attention, which {NAME} does not know")


def _names(function: Any) -> Iterator[str]:
    """Names of a mask function and of those it was put together from, which it holds in its closure."""
    yield getattr(function, "__qualname__", "")
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            if callable(part):
                yield from _names(part)
