"""Ways of calling a model on a pack, each as people do it: from one packed batch to keyword arguments.

All are variations of `batch.hf()`. What differs is what makes the difference between isolation and a silent leak:
a cache object, a mask of ones, a second row, arguments that get lost on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from packsvc.stream import PackedBatch


class Call(StrEnum):
    """A way of calling. The names are what `packsvc probe --call` takes."""

    HF_TRAINER = "hf_trainer"
    LOOP = "loop"
    BATCH2 = "batch2"
    ALL_ONES_MASK = "all_ones_mask"
    NO_SEQ_IDX = "no_seq_idx"
    POSITIONS = "positions"
    BOUNDARIES = "boundaries"
    MASK_4D = "mask_4d"
    IDS_ONLY = "ids_only"


WHAT: dict[Call, str] = {
    Call.HF_TRAINER: "model(**batch.hf()), as HF Trainer calls it",
    Call.LOOP: "a loop of one's own: the same batch without use_cache=False",
    Call.BATCH2: "two packs as two rows, with position_ids",
    Call.ALL_ONES_MASK: "the same batch with an attention_mask of ones",
    Call.NO_SEQ_IDX: "the same batch without seq_idx",
    Call.POSITIONS: "only ids and position_ids that restart",
    Call.BOUNDARIES: "ids and cu_seq_lens, without position_ids",
    Call.MASK_4D: "ids, position_ids and a ready block-diagonal mask",
    Call.IDS_ONLY: "ids alone: packing without telling the model",
}
DEFAULT_CALLS = (Call.HF_TRAINER, Call.LOOP, Call.BATCH2, Call.ALL_ONES_MASK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where a segment stands in the rows that are handed over."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a model is called with, and what stands where in it."""

    arguments: dict[str, Any]
    segments: list[Segment]
    """In the order of the rows."""


def inputs_of(call: Call, batch: PackedBatch, *, dtype: torch.dtype) -> Inputs:
    """The arguments of one way of calling.

    Args:
        call: Which.
        batch: The pack.
        dtype: Of the model, for a mask that is added to scores.
    """
    full = batch.hf()
    ids = {"input_ids": full["input_ids"], "labels": full["labels"], "use_cache": False}
    positions = {"position_ids": full["position_ids"]}
    boundaries = {name: full[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
    segments = segments_of(batch.cu_seqlens)
    match call:
        case Call.HF_TRAINER:
            arguments = full
        case Call.LOOP:
            arguments = {name: value for name, value in full.items() if name != "use_cache"}
        case Call.ALL_ONES_MASK:
            arguments = {**full, "attention_mask": torch.ones_like(full["input_ids"])}
        case Call.NO_SEQ_IDX:
            arguments = {**ids, **positions, **boundaries}
        case Call.POSITIONS:
            arguments = {**ids, **positions}
        case Call.BOUNDARIES:
            arguments = {**ids, **boundaries}
        case Call.IDS_ONLY:
            arguments = ids
        case Call.MASK_4D:
            arguments = {**ids, **positions, "attention_mask": block_mask(batch.seq_idx, dtype)}
        case Call.BATCH2:
            return two_rows({**ids, **positions}, segments)
    return Inputs(arguments=arguments, segments=segments)


def two_rows(arguments: dict[str, Any], segments: list[Segment]) -> Inputs:
    """The pack, and below it the same segments in another order: the first goes last."""
    first = segments[0]
    turned = {
        name: torch.cat([value, torch.cat([value[:, first.stop :], value[:, : first.stop]], dim=1)])
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }
    below, at = [], 0
    for segment in [*segments[1:], first]:
        length = segment.stop - segment.start
        below.append(Segment(row=1, start=at, stop=at + length))
        at += length
    return Inputs(arguments=turned, segments=[*segments, *below])


def segments_of(cu_seqlens: torch.Tensor) -> list[Segment]:
    """[0, 3, 5] gives the segments 0-3 and 3-5 of row 0."""
    return [Segment(row=0, start=start, stop=stop) for start, stop in pairwise(cu_seqlens.tolist())]


def block_mask(seq_idx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, T, T): 0 where a token sees another of its own segment up to itself, else the lowest number."""
    same = seq_idx[:, None] == seq_idx[None]
    mask = torch.zeros(same.shape, dtype=dtype, device=seq_idx.device)
    return mask.masked_fill(~same.tril(), torch.finfo(dtype).min)[None, None]


def alone_inputs(ids: torch.Tensor, *, with_boundaries: bool) -> dict[str, Any]:
    """One segment as a row of its own, as one would call a model that has never heard of packing.

    Args:
        ids: (n,) int64.
        with_boundaries: For attention that refuses rows without any.
    """
    arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
    if with_boundaries:
        offsets = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
        arguments |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        arguments |= {"max_length_q": len(ids), "max_length_k": len(ids)}
    return arguments
