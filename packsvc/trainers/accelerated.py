"""The same step under Accelerate.

    model, optimizer = accelerator.prepare(model, optimizer)     # not the stream: it shares itself out over ranks
    stream = PackStream(out, rank=accelerator.process_index, world_size=accelerator.num_processes)
    for batches in accumulate(stream, 4):
        step = accelerated_backward(accelerator, model, batches)
        optimizer.step()
        optimizer.zero_grad()

A stream handed to `prepare` would be dealt out a second time, or its batches concatenated over ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from packsvc.errors import ConfigError
from packsvc.stream import PackedBatch
from packsvc.trainers.loop import LossSum, Step, step_of, targets_of
from packsvc.trainers.loss import loss_sum

OWN_STEPS = ("DEEPSPEED", "MEGATRON_LM")


def accelerated_backward(
    accelerator: Any, model: Any, batches: Sequence[PackedBatch], *, loss: LossSum = loss_sum
) -> Step:
    """Forward and backward of one optimizer step: gradients of the token mean over these batches of all ranks.

    Args:
        accelerator: Any `gradient_accumulation_steps`; what it divides by is undone, since batches are given here.
        model: Prepared by the accelerator.
        batches: This rank's; moved to the accelerator's device.
        loss: As for `backward`.

    Raises:
        ConfigError: DeepSpeed or Megatron, which scale and step by themselves.
    """
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind in OWN_STEPS:
        raise ConfigError(
            f"Accelerate runs {kind} here, which scales losses and steps by itself; use DDP or FSDP, or transformers' "
            "Trainer through packsvc.trainers.hf_trainer"
        )
    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / targets_of(batches)
    total: torch.Tensor | None = None
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            found = loss(model, batch.to(accelerator.device))
            accelerator.backward(found * scale)
        total = found.detach() if total is None else total + found.detach()
    assert total is not None
    return step_of(total, batches)
