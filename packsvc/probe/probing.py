"""The probe: one model, one attention, several ways of calling it, one verdict each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from packsvc.attention import NAME, register
from packsvc.errors import ConfigError
from packsvc.probe.advice import advice
from packsvc.probe.calls import DEFAULT_CALLS, Call, Inputs, alone_inputs, inputs_of
from packsvc.probe.measuring import Figures, measure, vocabulary
from packsvc.probe.models import ProbedModel, first_line, open_model, ready, switch
from packsvc.probe.packs import pack_from, position_findings, random_pack
from packsvc.probe.verdicts import (
    ALONE_EXACT,
    ALONE_HALF,
    LOSS_EXACT,
    LOSS_HALF,
    ROUNDING,
    CallResult,
    Limits,
    ProbeReport,
    Verdict,
    judge,
)
from packsvc.stream import PackedBatch


def probe_model(
    model: str | os.PathLike[str],
    *,
    attn: str | None = None,
    calls: Sequence[str] = DEFAULT_CALLS,
    dataset: str | os.PathLike[str] | None = None,
    config_only: bool = False,
    device: str = "cpu",
    dtype: str | None = None,
    seed: int = 0,
) -> ProbeReport:
    """Tell whether a model keeps the examples of a pack apart, for each way of calling it.

    Args:
        model: Folder or hub id.
        attn: Attention implementation, e.g. "sdpa", "flash_attention_2", "packsvc_varlen"; None: the model's default.
        calls: Names of ways of calling, see `Call`.
        dataset: A packed output; its own packs are probed instead of random words, and their positions checked.
        config_only: Random weights of a small model of the same architecture; needs no weights and takes seconds.
        device: Where to run.
        dtype: Default float32: noise of half precision hides small differences.
        seed: Of random words.

    Raises:
        ConfigError: The model cannot be read, has no such attention, or there is no such way of calling.
        FormatError: `dataset` is not a packed output.
    """
    wanted = [call_named(name) for name in calls]
    probed = open_model(model, attn=attn, config_only=config_only, device=device, dtype=dtype)
    size = vocabulary(probed.model)
    findings: list[str] = []
    if dataset is None:
        batch = random_pack(vocabulary=size, seed=seed)
    else:
        batch, findings = pack_from(dataset, vocabulary=size, fold=config_only)
    batch = batch.to(device)
    results = [probe_call(probed, call, batch, findings=findings, seed=seed) for call in wanted]
    return ProbeReport(
        model=probed.name,
        attention=probed.attention,
        dtype=str(dtype_of(probed.model)).removeprefix("torch."),
        device=device,
        dataset=None if dataset is None else os.fspath(dataset),
        lengths=tuple(batch.cu_seqlens.diff().tolist()),
        results=with_advice(probed, batch, results, seed=seed),
        notes=[*probed.notes, *window_notes(probed.model, batch)],
    )


def call_named(name: str) -> Call:
    """A way of calling by its name. Raises ConfigError."""
    try:
        return Call(name)
    except ValueError:
        raise ConfigError(f"there is no way of calling {name!r}; known are {', '.join(Call)}") from None


def probe_call(
    probed: ProbedModel, call: Call, batch: PackedBatch, *, findings: Sequence[str] = (), seed: int = 0
) -> CallResult:
    """The verdict on one way of calling; without advice.

    Args:
        probed: The model.
        call: How it is called.
        batch: The pack.
        findings: What is wrong with the positions of the data, if anything.
        seed: Of the replacement tokens.
    """
    inputs = inputs_of(call, batch, dtype=dtype_of(probed.model))
    try:
        with ready(probed):
            figures = figures_of(probed.model, inputs, attention=probed.attention, seed=seed)
    except Exception as error:  # whatever the model's code raises: it cannot be called this way
        return CallResult(
            call=call, verdict=Verdict.REFUSED, figures=None, failed=(), why=f"it raises {first_line(error)}", advice=""
        )
    verdict, failed, why = judge(figures, limits_for(probed.model))
    positions = [*findings, *position_findings(batch)]
    if positions:
        failed, why = (*failed, "positions"), "; ".join([*([why] if why else []), *positions[:3]])
        verdict = Verdict.WRONG if verdict is Verdict.CLEAN else verdict
    return CallResult(call=call, verdict=verdict, figures=figures, failed=failed, why=why, advice="")


def figures_of(model: torch.nn.Module, inputs: Inputs, *, attention: str, seed: int = 0) -> Figures:
    """Measure one call. With attention that refuses rows without boundaries, the lone segment gets its own."""
    alone = partial(alone_inputs, with_boundaries=attention == NAME)
    return measure(model, inputs, alone=alone, seed=seed)


def with_advice(
    probed: ProbedModel, batch: PackedBatch, results: Sequence[CallResult], *, seed: int
) -> list[CallResult]:
    """The results with what to change. What it says of another way of calling or attention was measured here."""
    from dataclasses import replace

    if all(result.verdict is Verdict.CLEAN for result in results):
        return list(results)
    trainer = next((r for r in results if r.call == Call.HF_TRAINER), None)
    trainer = trainer or probe_call(probed, Call.HF_TRAINER, batch, seed=seed)
    clean_with = None
    if trainer.verdict in (Verdict.LEAK, Verdict.WRONG) and probed.attention != NAME:
        clean_with = NAME if clean_with_ours(probed, batch, seed=seed) else None
    return [
        replace(
            result,
            advice=advice(
                Call(result.call),
                result.verdict,
                probed.model,
                attention=probed.attention,
                clean_with=clean_with,
                trainer_clean=trainer.verdict is Verdict.CLEAN,
            ),
        )
        for result in results
    ]


def clean_with_ours(probed: ProbedModel, batch: PackedBatch, *, seed: int) -> bool:
    """Whether `packsvc_varlen` isolates this model called as a trainer calls it."""
    from dataclasses import replace

    was = getattr(getattr(probed.model, "config", None), "_attn_implementation", None)
    switch(probed.model, register())
    try:
        ours = replace(probed, attention=NAME, stand_in=False)
        return probe_call(ours, Call.HF_TRAINER, batch, seed=seed).verdict is Verdict.CLEAN
    finally:
        if was is not None:
            switch(probed.model, was)


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Of its first floating weights."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def limits_for(model: torch.nn.Module) -> Limits:
    """What is let pass for this model where it runs."""
    half = dtype_of(model) in (torch.bfloat16, torch.float16)
    cuda = next(model.parameters()).is_cuda
    return Limits(
        changed=ROUNDING if cuda or has_experts(model) else 0.0,
        alone=ALONE_HALF if half else ALONE_EXACT * (10 if cuda else 1),
        loss=LOSS_HALF if half else LOSS_EXACT,
    )


def has_experts(model: torch.nn.Module) -> bool:
    """Whether tokens are sorted to experts, so that one token's neighbours in a product depend on the others."""
    return any("Experts" in type(module).__name__ or "MoE" in type(module).__name__ for module in model.modules())


def window_notes(model: torch.nn.Module, batch: PackedBatch) -> list[str]:
    """A window that no segment of the probe reaches cannot be seen to be lost."""
    config: Any = getattr(model, "config", None)
    text: Mapping[str, Any] = config.get_text_config().to_dict() if config is not None else {}
    windows = [v for n in ("sliding_window", "attention_chunk_size") if isinstance(v := text.get(n), int) and v > 0]
    if windows and max(windows) >= batch.max_seqlen and text.get("use_sliding_window", True):
        return [
            f"its window of {max(windows):,} is longer than the probe's segments: --config-only shortens it, and shows "
            "whether a mask loses it"
        ]
    return []
