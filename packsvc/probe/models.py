"""A model to probe: real weights, or random ones from a config alone; with the attention that is asked for.

A config without weights is shrunk to a few layers, so that a model of any size is probed in seconds on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from packsvc.attention import NAME, register
from packsvc.errors import ConfigError
from packsvc.probe.flash_stand_in import flash_stand_in
from packsvc.probe.shrinking import shrunk, spread_weights

FLASH = "flash_attention_2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """A model, how it attends, and what one should know about it."""

    name: str
    model: torch.nn.Module
    attention: str
    stand_in: bool
    """flash-attn is not here: its place is taken by a stand-in."""
    config_only: bool
    notes: list[str] = field(default_factory=list)


def open_model(
    model: str | os.PathLike[str],
    *,
    attn: str | None = None,
    config_only: bool = False,
    device: str = "cpu",
    dtype: str | None = None,
) -> ProbedModel:
    """Load a model in train mode.

    Args:
        model: Folder or hub id.
        attn: Attention implementation; None: the model's own default.
        config_only: Read the config alone and give a small model of that architecture random weights.
        device: Where to probe.
        dtype: "float32", "bfloat16", ...; None: float32, and bfloat16 for flash attention on CUDA.

    Raises:
        ConfigError: The model cannot be read, or has no such attention.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    name = os.fspath(model)
    stand_in = attn == FLASH and not has_flash()
    if stand_in and not device.startswith("cpu"):
        raise ConfigError("flash-attn is not installed here; its stand-in is for --device cpu")
    wanted = dtype or ("bfloat16" if attn == FLASH and not stand_in else "float32")
    if not isinstance(getattr(torch, wanted, None), torch.dtype):
        raise ConfigError(f"dtype is {wanted!r}; it must be a torch dtype, e.g. float32 or bfloat16")
    if attn == NAME:
        register()
    chosen = "eager" if stand_in else attn
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{name}: no config of a model that transformers knows: {first_line(error)}") from error
    notes: list[str] = []
    if config_only:
        built, note = from_config(config, chosen, name)
        notes.append(note)
    else:
        try:
            built = AutoModelForCausalLM.from_pretrained(name, attn_implementation=chosen, dtype=getattr(torch, wanted))
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise ConfigError(
                f"{name}: the model cannot be loaded: {first_line(error)}. --config-only needs its config.json alone"
            ) from error
    if stand_in:
        if getattr(built, "_supports_flash_attn", True) is False:
            raise ConfigError(f"{type(built).__name__} does not support {FLASH}")
        switch(built, FLASH)
        notes.append("flash-attn is not installed here: a stand-in shows which arguments reach it, not the kernel")
    notes += context_notes(built.config)
    return ProbedModel(
        name=name,
        model=built.to(device=device, dtype=getattr(torch, wanted)).train(),
        attention=attn or str(getattr(built.config, "_attn_implementation", None) or "its own"),
        stand_in=stand_in,
        config_only=config_only,
        notes=notes,
    )


def from_config(config: Any, attn: str | None, name: str) -> tuple[Any, str]:
    """The smallest model that the architecture lets us make of the config, and what was made."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    text = config.get_text_config()
    kinds = [text] if text is not config else []
    failure: Exception | None = None
    for whole in [*kinds, config]:
        for smaller in shrunk(whole):
            if smaller is None:
                continue
            try:
                built = make(smaller, attn_implementation=attn)
                spread_weights(built)
                forward_once(built, needs_boundaries=attn == NAME)
            except Exception as error:  # whatever a class raises for values that do not fit together
                failure = error
                continue
            count = sum(parameter.numel() for parameter in built.parameters())
            return built, f"random weights: {type(built).__name__} with {count:,} parameters, made from the config"
    raise ConfigError(f"{name}: no model can be made from this config: {first_line(failure)}") from failure


def forward_once(model: Any, *, needs_boundaries: bool) -> None:
    """Raise what a model raises that does not fit together."""
    if not needs_boundaries:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 9)[None], use_cache=False)


def switch(model: torch.nn.Module, attn: str) -> None:
    """Change the attention of a model that exists, past transformers' look for installed packages."""
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in configs:
        config._attn_implementation = attn


def has_flash() -> bool:
    """Whether transformers would find flash-attn."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


@contextmanager
def ready(probed: ProbedModel) -> Iterator[None]:
    """What must hold while the model runs."""
    if probed.stand_in:
        with flash_stand_in():
            yield
    else:
        yield


def context_notes(config: Any) -> list[str]:
    """What no probe of short segments can show."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    parts = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = {str(part.get("rope_type") or part.get("type")) for part in parts}
    if kinds & {"dynamic", "longrope"}:
        limit = next(
            (p["original_max_position_embeddings"] for p in parts if p.get("original_max_position_embeddings")), None
        )
        limit = limit or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
        return [
            f"its RoPE ({', '.join(sorted(kinds))}) scales by the longest position of the whole row: a segment beyond "
            f"{limit:,} tokens changes what the others give; keep segments below"
        ]
    return []


def first_line(error: Exception | None) -> str:
    """An error in one line."""
    words = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {words[0][:300]}"
