"""What is trained: the loss mask and its weights, on whole row groups at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packsvc.validation.geometry import Layout, check_count, fail_tokens
from packsvc.validation.report import Findings
from packsvc.validation.shard_file import Chunk


def check_mask(chunk: Chunk, layout: Layout, findings: Findings) -> NDArray[np.int64]:
    """Mask 0 on tails and on the first token of segments, a target in every segment, counts that agree.

    Returns:
        (Z,) int64 trained tokens of every segment, tails included.
    """
    mask = chunk.packs.loss_mask.reshape(-1)
    findings.saw("mask", int(layout.real.sum()), "segments")
    bounds = np.append(layout.starts, len(mask))
    targets = np.diff(np.searchsorted(np.flatnonzero(mask), bounds))

    def place(check: str, where: NDArray[np.bool_], message: str) -> None:
        hits = np.flatnonzero(where)
        findings.each(
            check,
            where[hits],
            lambda i: chunk.failure(check, message, int(layout.pack[hits[i]]), int(layout.number[hits[i]])),
        )

    place("mask", mask[layout.starts] & layout.real, "loss on the first token of a segment")
    place("mask", (targets > 0) & ~layout.real, "loss on the padding tail")
    place("mask", (targets == 0) & layout.real, "a segment without a trained token")
    found = np.bincount(layout.pack, targets, minlength=chunk.packs.num_packs).astype(np.int64)
    check_count("mask", chunk, "num_loss_tokens", found, findings)
    return targets


def check_weights(chunk: Chunk, layout: Layout, findings: Findings) -> None:
    """Weights finite, at most 1, 0 off target, above 0 on target."""
    if chunk.packs.loss_weight is None:
        return
    weight = chunk.packs.loss_weight.reshape(-1)
    mask = chunk.packs.loss_mask.reshape(-1)
    findings.saw("weights", chunk.packs.num_packs, "packs")
    right = ((weight > 0) == mask) & (weight >= 0) & (weight <= 1)
    if right.all():
        return
    fail_tokens(
        "weights",
        chunk,
        layout,
        ~right,
        lambda flat: f"loss_weight is {weight[flat]} where loss_mask is {int(mask[flat])}",
        findings,
    )
