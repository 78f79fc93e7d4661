"""A plain PyTorch loop: one optimizer step over several batches and all ranks, with the exact token mean.

    stream = PackStream(out, batch_packs=2)              # rank and world size from torch.distributed
    for batches in accumulate(stream, 4):
        step = backward(model, batches)                  # forward and backward; gradients are those of the mean
        optimizer.step()
        optimizer.zero_grad()
        print(step.mean())

The number of targets of the global batch is known beforehand, from the shards' counts, so no rank has to ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from packsvc.errors import ConfigError
from packsvc.stream import PackedBatch
from packsvc.trainers.loss import loss_sum

LossSum = Callable[[Any, PackedBatch], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step learned from."""

    loss_sum: torch.Tensor
    """This rank's, without gradient, on the model's device."""
    num_loss_tokens: int
    """This rank's targets."""
    num_loss_tokens_global: int
    """Targets of all ranks."""

    def mean(self) -> float:
        """The token mean over the global batch. With several ranks all must call it: it adds up their sums."""
        total = self.loss_sum.clone()
        if world_size() > 1:
            dist.all_reduce(total)
        return float(total) / max(1, self.num_loss_tokens_global)


def accumulate(batches: Iterable[PackedBatch], n: int) -> Iterator[list[PackedBatch]]:
    """Runs of n batches, one for each optimizer step; the last may be shorter, on all ranks alike."""
    if n < 1:
        raise ConfigError(f"cannot accumulate {n} batches; at least 1 makes a step")
    run: list[PackedBatch] = []
    for batch in batches:
        run.append(batch)
        if len(run) == n:
            yield run
            run = []
    if run:
        yield run


def backward(model: Any, batches: Sequence[PackedBatch], *, loss: LossSum = loss_sum) -> Step:
    """Forward and backward of one optimizer step.

    Afterwards the gradients are those of the token mean over these batches of all ranks. DDP and FSDP average over
    ranks, which is undone here; they synchronise at the last batch only.

    Args:
        model: As for `loss_sum`; wrapped in DDP or FSDP where there are several ranks.
        batches: This rank's, from a stream of as many ranks as the process group has.
        loss: Another sum over targets, such as a fused one.
    """
    count = targets_of(batches)
    scale = world_size() / count
    total: torch.Tensor | None = None
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        defer = contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
        with defer:
            found = loss(model, batch)
            torch.autograd.backward(found * scale)
        total = found.detach() if total is None else total + found.detach()
    assert total is not None
    return step_of(total, batches)


@torch.no_grad()
def evaluate(model: Any, batches: Iterable[PackedBatch], *, loss: LossSum = loss_sum) -> float:
    """The token mean over all batches of all ranks; transformers' own evaluation takes a mean of batch means."""
    total, count = 0.0, 0
    for batch in batches:
        total += float(loss(model, batch))
        count += batch.num_loss_tokens
    if world_size() > 1:
        sums = torch.tensor([total, count], dtype=torch.float64)
        if dist.get_backend() == "nccl":
            sums = sums.cuda()
        dist.all_reduce(sums)
        total, count = float(sums[0]), int(sums[1])
    if count == 0:
        raise ConfigError("no batch has a target, so there is no loss to speak of")
    return total / count


def targets_of(batches: Sequence[PackedBatch]) -> int:
    """Targets of all ranks in these batches; 1 where there are none, so that a sum of 0 stays 0."""
    if not batches:
        raise ConfigError("an optimizer step needs at least one batch")
    return max(1, sum(batch.num_loss_tokens_global for batch in batches))


def step_of(total: torch.Tensor, batches: Sequence[PackedBatch]) -> Step:
    """The record of a step, from its summed loss."""
    return Step(
        loss_sum=total,
        num_loss_tokens=sum(batch.num_loss_tokens for batch in batches),
        num_loss_tokens_global=sum(batch.num_loss_tokens_global for batch in batches),
    )


def world_size() -> int:
    """Ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
