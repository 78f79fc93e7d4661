"""Tiny configs of many families of transformers: 2 layers, hidden 32, one layer of each kind that the family has."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from packsvc.attention import NAME, register
from packsvc.probe import ProbedModel
from packsvc.probe.models import switch
from packsvc.probe.shrinking import spread_weights

BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
WINDOW: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "mamba_expand": 2, "mamba_d_conv": 4,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "glm4": ("glm4", {}),
    "gpt_neox": ("gpt_neox", {}),
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {}),
    "gpt2": ("gpt2", GPT2),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "olmo3": ("olmo3", WINDOW),
    "gemma2": ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**WINDOW, "query_pre_attn_scalar": 8}),
    "gemma4": (
        "gemma4_text",
        {**WINDOW, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
    ),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0],
         "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "gpt_oss": ("gpt_oss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "deepseek_v3": (
        "deepseek_v3",
        {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
         "moe_intermediate_size": 32, "num_key_value_heads": 4},
    ),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    "jamba": (
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
         "use_mamba_kernels": False},
    ),
    "bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1], "layer_types": None}),
    "falcon_h1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 48, "position_embedding_type": "rope"},
    ),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_dim": 32, "block_ff_dim": 48,
         "block_auto_adjust_ff_dim": False},
    ),
    "qwen3_next": ("qwen3_next", {**DELTA, **MOE, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", DELTA),
}  # fmt: skip


def tiny(family: str, attn: str = "eager") -> ProbedModel:
    """A tiny random model in train mode, its attention switched past the look for installed packages."""
    kind, changes = FAMILIES[family]
    values = {name: value for name, value in {**BASE, **changes}.items() if value is not None}
    torch.manual_seed(0)
    chosen = "sdpa" if attn == "sdpa" else "eager"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), attn_implementation=chosen)
    spread_weights(model)
    if attn == NAME:
        register()
    if attn != chosen:
        switch(model, attn)
    return ProbedModel(
        name=family, model=model.train(), attention=attn, stand_in=attn == "flash_attention_2", config_only=True
    )
