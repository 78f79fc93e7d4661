"""A batch as the assertions see it: flat arrays and where its segments stand, from whatever a trainer makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packsvc.errors import ConfigError
from packsvc.probe import Inputs, Segment, segments_of
from packsvc.stream import PackedBatch

Batch = PackedBatch | Mapping[str, Any]
"""What `PackStream` gives, or the keyword arguments that a trainer calls its model with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """All rows of a batch back to back."""

    input_ids: torch.Tensor
    """(T,)"""
    labels: torch.Tensor
    """(T,)"""
    padding: torch.Tensor
    """(T,) bool"""
    spans: list[tuple[int, int]]
    """Of segments, tails among them."""


def inputs_from(batch: Batch, lengths: Sequence[int] | None) -> Inputs:
    """What the model is called with, and its segments.

    Raises:
        ConfigError: Nothing in the batch says where segments end.
    """
    if isinstance(batch, PackedBatch):
        return Inputs(arguments=batch.hf(), segments=segments_of(batch.cu_seqlens))
    return Inputs(arguments=dict(batch), segments=segments_in(batch, lengths))


def segments_in(arguments: Mapping[str, Any], lengths: Sequence[int] | None) -> list[Segment]:
    """Segments of keyword arguments: by `lengths`, else by their boundaries, else by positions that restart."""
    rows, width = arguments["input_ids"].shape
    if lengths is not None:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
    elif arguments.get("cu_seq_lens_q") is not None:
        offsets = arguments["cu_seq_lens_q"]
    elif arguments.get("position_ids") is not None:
        starts = (arguments["position_ids"].flatten() == 0).nonzero()[:, 0]
        offsets = torch.cat([starts, starts.new_tensor([rows * width])])
    else:
        raise ConfigError("nothing in the batch says where its examples end: give lengths=[...], over all rows")
    if int(offsets[0]) != 0 or int(offsets[-1]) != rows * width:
        raise ConfigError(f"segments end at {int(offsets[-1])}; the batch has {rows} x {width} tokens")
    found = []
    for segment in segments_of(offsets):
        row, start = divmod(segment.start, width)
        if start + segment.stop - segment.start > width:
            raise ConfigError(f"a segment reaches from token {segment.start} to {segment.stop} over the end of a row")
        found.append(Segment(row=row, start=start, stop=start + segment.stop - segment.start))
    return found


def flat(batch: Batch, lengths: Sequence[int] | None = None) -> Flat:
    """Ids, labels, padding and segments of a batch."""
    if isinstance(batch, PackedBatch):
        ids, labels, padding = batch.input_ids, batch.labels, batch.padding_mask
    else:
        ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
        mask = batch.get("padding_mask")
        padding = torch.zeros_like(ids, dtype=torch.bool) if mask is None else mask.flatten().bool()
    width = len(batch.input_ids) if isinstance(batch, PackedBatch) else batch["input_ids"].shape[1]
    segments = (
        inputs_from(batch, lengths).segments if not isinstance(batch, PackedBatch) else segments_of(batch.cu_seqlens)
    )
    spans = [(s.row * width + s.start, s.row * width + s.stop) for s in segments]
    return Flat(input_ids=ids.long().cpu(), labels=labels.long().cpu(), padding=padding.cpu(), spans=spans)
