"""The pack that is probed: random words, or a real one from a packed output, cut short."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice, pairwise

import torch

from packsvc.errors import ConfigError
from packsvc.stream import PackedBatch, PackStream

LENGTHS = (7, 12, 9)
"""Longer than the windows and chunks of a shrunk model, and unlike one another."""
KEPT_SEGMENTS = 4
KEPT_TOKENS = 512
LOOKED_AT = 64


def random_pack(*, vocabulary: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> PackedBatch:
    """A pack of random words; the latter half of each segment is trained.

    Args:
        vocabulary: Ids from 3 up to it are drawn.
        lengths: Of the segments, at least 2.
        seed: Of the words.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (sum(lengths),), generator=generator, dtype=torch.int32)
    trained = torch.cat([torch.arange(n) >= max(1, n // 2) for n in lengths])
    return pack_of(ids, trained, lengths)


def pack_of(ids: torch.Tensor, trained: torch.Tensor, lengths: Sequence[int]) -> PackedBatch:
    """A batch without padding from flat arrays: (T,) ids, (T,) bool, lengths that add up to T."""
    counts = torch.tensor(list(lengths))
    return PackedBatch(
        input_ids=ids.int(),
        position_ids=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
        labels=torch.where(trained, ids, -100).int(),
        cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
        cu_seqlens_logical=None,
        max_seqlen=max(lengths),
        seq_idx=torch.arange(len(counts)).repeat_interleave(counts).int(),
        padding_mask=torch.zeros(len(ids), dtype=torch.bool),
        loss_weights=None,
        num_loss_tokens=int(trained.sum()),
        num_loss_tokens_global=int(trained.sum()),
        num_segments=len(counts),
        num_tokens=len(ids),
        num_repeated_packs=0,
        pack_indices=(0,),
    )


def pack_from(out: str | os.PathLike[str], *, vocabulary: int, fold: bool) -> tuple[PackedBatch, list[str]]:
    """The shortest segments of the first pack of an output that has several, and findings about its positions.

    Args:
        out: A packed output.
        vocabulary: How many ids the model knows.
        fold: Whether ids beyond it are folded into it (a shrunk model) or are an error.

    Raises:
        ConfigError: The ids are another tokenizer's, or no pack has two segments.
    """
    with PackStream(out, rank=0, world_size=1, shuffle=False, threads=0) as stream:
        findings: list[str] = []
        chosen: PackedBatch | None = None
        for batch in islice(stream, LOOKED_AT):
            findings += [f"pack {batch.pack_indices[0]}: {finding}" for finding in position_findings(batch)]
            if chosen is None and int((batch.cu_seqlens.diff() > 1).sum()) > 1:
                chosen = batch
    if chosen is None:
        raise ConfigError(f"{os.fspath(out)}: none of the first packs has two segments: there is nothing to keep apart")
    pack = shortest(chosen)
    if int(pack.input_ids.max()) >= vocabulary:
        if not fold:
            raise ConfigError(
                f"{os.fspath(out)} holds id {int(pack.input_ids.max())}, the model knows {vocabulary}: it was packed "
                "with another tokenizer"
            )
        pack = pack_of(pack.input_ids % (vocabulary - 3) + 3, pack.labels >= 0, pack.cu_seqlens.diff().tolist())
    return pack, findings


def shortest(batch: PackedBatch, *, segments: int = KEPT_SEGMENTS, tokens: int = KEPT_TOKENS) -> PackedBatch:
    """A few segments of a batch, the shortest ones in their order, each cut at its end to so many tokens."""
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    several = [(stop - start, start) for start, stop in bounds if stop - start > 1]
    kept = sorted(start for _, start in sorted(several)[:segments])
    spans = [(start, min(stop, start + tokens)) for start, stop in bounds if start in kept]
    ids = torch.cat([batch.input_ids[a:b] for a, b in spans])
    trained = torch.cat([batch.labels[a:b] >= 0 for a, b in spans])
    return pack_of(ids, trained, [b - a for a, b in spans])


def position_findings(batch: PackedBatch) -> list[str]:
    """What is wrong with the positions, boundaries and labels of a batch; they are judged by themselves, since
    rotary embeddings hide wrong positions from every comparison of outputs."""
    found = []
    cu, total = batch.cu_seqlens, len(batch.input_ids)
    lengths = cu.diff()
    if cu.dtype != torch.int32 or int(cu[0]) != 0 or int(cu[-1]) != total or int(lengths.min()) < 1:
        return [f"cu_seqlens does not rise from 0 to {total} in int32"]
    starts = cu[:-1].long()
    expected = torch.arange(total, device=cu.device) - starts.repeat_interleave(lengths)
    if not torch.equal(batch.position_ids.long(), expected):
        at = int((batch.position_ids.long() != expected).nonzero()[0])
        found.append(
            f"position_ids has {int(batch.position_ids[at])} at token {at}, cu_seqlens says {int(expected[at])}"
        )
    if not torch.equal(batch.seq_idx.long(), torch.arange(len(lengths), device=cu.device).repeat_interleave(lengths)):
        found.append("seq_idx and cu_seqlens disagree")
    if batch.max_seqlen != int(lengths.max()):
        found.append(f"max_seqlen is {batch.max_seqlen}, the longest segment has {int(lengths.max())}")
    if bool((batch.labels[starts] != -100).any()):
        found.append("a segment's first token is a target: it would be predicted from another example")
    return found
