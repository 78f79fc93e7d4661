"""A small model of the same architecture from a config: few layers, few words, few experts, short windows.

Isolation is a matter of which arguments reach which layer, so one layer of each kind with random weights shows it as
a trained model does, in seconds. Windows and chunks become shorter than the probe's segments, so that a window that
gets lost shows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch

VOCABULARY = 256
WINDOW = 4
CHUNK = 8
EXPERTS = 4
HEADS = 4
HEAD_WIDTH = 16
WIDTH = 256
"""Of feed-forward layers."""

LARGEST = 1 << 25
"""Layers times the square of the width: up to here a model is made as its config says, if no smaller one can be."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
SMALLER = {
    "sliding_window": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": CHUNK,
    "chunk_size": CHUNK,
    "mamba_chunk_size": CHUNK,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "intermediate_size_mlp": WIDTH,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SPREAD = 1.2
"""Standard deviation of weights, times the square root of the width that they sum over. Fresh models attend almost
evenly; wider weights make a leak as visible as in a trained one."""


def shrunk(config: Any) -> Iterator[Any]:
    """Ever larger configs of the same kind, the smallest first; the last is the config as it is, unless it is large."""
    tree = config.to_dict()
    small = {
        name: min(value, tree[name])
        for name, value in SMALLER.items()
        if isinstance(tree.get(name), int) and not isinstance(tree[name], bool)
    }
    small |= {
        name: None
        for name, value in tree.items()
        if name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY
    }
    cut = layers(config, tree)
    # A class that ties its widths together in other ways refuses the narrow one, or its first call fails.
    yield rebuilt(config, {**tree, **small, **cut, **narrow(tree)})
    yield rebuilt(config, {**tree, **small, **cut})
    depth = max([tree[name] for name in LAYER_COUNTS if isinstance(tree.get(name), int)] or [1])
    if depth * int(tree.get("hidden_size") or 1024) ** 2 <= LARGEST:
        yield rebuilt(config, {**tree, **small})
        yield config


def narrow(tree: dict[str, Any]) -> dict[str, Any]:
    """Fields of an attention with four small heads, grouped if the model's are."""
    heads = tree.get("num_attention_heads")
    if not isinstance(heads, int) or not isinstance(tree.get("hidden_size"), int):
        return {}
    fields = {"hidden_size": HEADS * HEAD_WIDTH, "num_attention_heads": HEADS}
    if isinstance(groups := tree.get("num_key_value_heads"), int):
        fields["num_key_value_heads"] = HEADS if groups == heads else HEADS // 2
    # With latent attention (DeepSeek) `head_dim` is the rotary part of the heads, which have widths of their own.
    if isinstance(tree.get("head_dim"), int) and "qk_rope_head_dim" not in tree:
        fields["head_dim"] = HEAD_WIDTH
    return fields


def layers(config: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Fields that keep the first layers only, up to where each kind has been seen, and at least two."""
    counts = {name: tree[name] for name in LAYER_COUNTS if isinstance(tree.get(name), int)}
    if not counts:
        return {}
    total = max(counts.values())
    kinds: list[Any] = next((list(k) for name in LAYER_KINDS if (k := getattr(config, name, None))), [])
    kept = min(total, max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    lists = {name: value[:kept] for name, value in tree.items() if isinstance(value, list) and len(value) == total}
    return {**dict.fromkeys(counts, kept), **lists}


def rebuilt(config: Any, tree: dict[str, Any]) -> Any:
    """A config of the same class; None where the class refuses the values."""
    try:
        return type(config).from_dict(tree)
    except Exception:  # each class has checks and errors of its own
        return None


def spread_weights(model: torch.nn.Module) -> None:
    """Give every matrix seeded random weights under which attention looks somewhere, by its name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "A_log" not in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.normal_(0, SPREAD / math.sqrt(parameter.shape[-1]), generator=generator)
