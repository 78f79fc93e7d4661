"""The slow, obvious twin of a batch, and readings of a stream that tests compare."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from packsvc.stream import PackedBatch, PackStream
from packsvc.types import PackColumns
from tests.stream.outputs import PAD


def slow_batch(
    packs: list[PackColumns], *, layout: str = "trimmed", align: int = 1, repeated: int = 0
) -> dict[str, list[Any]]:
    """Token by token what a batch of some packs must be."""
    out: dict[str, list[Any]] = {
        name: [] for name in ("input_ids", "position_ids", "labels", "seq_idx", "padding_mask", "loss_weights")
    }
    cu, logical, segments = [0], [0], 0
    for number, pack in enumerate(packs):
        ids, mask = pack.input_ids[0].tolist(), pack.loss_mask[0].tolist()
        weight = [0.0] * len(ids) if pack.loss_weight is None else pack.loss_weight[0].tolist()
        taken = 0
        real = pack.cu_seqlens[: int(pack.num_segments[0]) + 1].tolist()
        for start, stop in pairwise(real):
            padding = -(stop - start) % align
            for i in range(stop - start + padding):
                inside = i < stop - start
                target = inside and mask[start + i] and number < len(packs) - repeated
                out["input_ids"].append(ids[start + i] if inside else PAD)
                out["position_ids"].append(i)
                out["labels"].append(ids[start + i] if target else -100)
                out["seq_idx"].append(segments)
                out["padding_mask"].append(not inside)
                out["loss_weights"].append(weight[start + i] if target else 0.0)
            cu.append(cu[-1] + stop - start + padding)
            logical.append(logical[-1] + stop - start)
            taken += stop - start + padding
            segments += 1
        if layout == "padded" and taken < len(ids):
            for i in range(len(ids) - taken):
                out["input_ids"].append(PAD)
                out["position_ids"].append(i)
                out["labels"].append(-100)
                out["seq_idx"].append(segments)
                out["padding_mask"].append(True)
                out["loss_weights"].append(0.0)
            cu.append(cu[-1] + len(ids) - taken)
            logical.append(logical[-1] + len(ids) - taken)
            segments += 1
    out["cu_seqlens"], out["cu_seqlens_logical"] = cu, logical
    return out


def fields_of(batch: PackedBatch) -> dict[str, Any]:
    """A batch as plain values, for comparisons."""
    return {name: _plain(getattr(batch, name)) for name in PackedBatch.__slots__}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def steps_of(batches: Iterable[PackedBatch]) -> list[tuple[Any, ...]]:
    """What each step handed out, by pack number."""
    return [batch.pack_indices for batch in batches]


def global_steps(streams: list[PackStream]) -> list[tuple[Any, ...]]:
    """The global batches that ranks read together: their packs rank after rank; all ranks have equal steps."""
    ranks = [steps_of(stream) for stream in streams]
    assert len({len(steps) for steps in ranks}) == 1
    return [tuple(pack for part in parts for pack in part) for parts in zip(*ranks, strict=True)]


def ranks_of(path: Any, world_size: int, **options: Any) -> list[PackStream]:
    """One stream for each rank."""
    return [PackStream(path, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
