"""The loss of a batch as a sum over its targets, so that whoever sums over batches and ranks can divide once.

A mean of means is not the token mean: a rank with 1 target would weigh as much as one with 5,000. Labels stand at
their own token, so logits at t meet the label at t + 1; a segment's first label is off, so nothing crosses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from packsvc.stream import PackedBatch


def loss_sum(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Cross entropy summed over a batch's targets, each times its weight where the batch has weights.

    Divide by `num_loss_tokens` (or its global sum) for the token mean: a target of weight 0.25 counts a quarter in
    the sum and fully in the number, as a message does that is learned a quarter as much.

    Args:
        model: A causal language model of transformers, wrapped (DDP, FSDP) or not.
        batch: On the model's device.

    Returns:
        A float32 scalar with gradient. What a model adds to its loss itself (a router's balance loss) is not in it.
    """
    row = model_inputs(batch)
    logits = model(**row).logits
    weights = batch.loss_weights if batch.fractional_weights else None
    return weighted_sum(logits, batch.labels.long().unsqueeze(0), None if weights is None else weights.unsqueeze(0))


def model_inputs(batch: PackedBatch) -> dict[str, Any]:
    """`batch.hf()` without labels, for a loss that is computed outside the model; weights are no obstacle then."""
    row = replace(batch, fractional_weights=False).hf()
    for name in ("labels", "num_items_in_batch"):
        row.pop(name, None)
    return row


def weighted_sum(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Cross entropy over targets, summed.

    Args:
        logits: (1, T, vocabulary).
        labels: (1, T) int64, aligned with the tokens, -100 off target.
        weights: (1, T) float32 or None.
    """
    predictions, targets = logits[0, :-1].float(), labels[0, 1:]
    if weights is None:
        return cross_entropy(predictions, targets, reduction="sum")
    return (cross_entropy(predictions, targets, reduction="none") * weights[0, 1:]).sum()
