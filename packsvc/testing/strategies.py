"""Hypothesis strategies for packs, as batches and as columns of a shard. Only making one imports hypothesis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from packsvc.assemble import assemble
from packsvc.plan import place
from packsvc.probe import pack_of
from packsvc.stream import PackedBatch
from packsvc.types import Counts, EncodedBatch, PackColumns

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

FIRST_WORD = 3
"""Ids below stand for pad, begin and end."""


def segment_lengths(
    *, max_tokens: int = 64, min_segments: int = 1, max_segments: int = 8, min_length: int = 2
) -> SearchStrategy[list[int]]:
    """Lengths of the segments of one pack, together at most `max_tokens`.

    Args:
        max_tokens: Capacity.
        min_segments: At least so many.
        max_segments: At most so many.
        min_length: Of each; a segment of one token has no target.
    """
    from hypothesis import strategies as st

    @st.composite
    def lengths(draw: DrawFn) -> list[int]:
        most = min(max_segments, max_tokens // min_length)
        count, spare = draw(st.integers(min_segments, most)), max_tokens
        made: list[int] = []
        for left in range(count - 1, -1, -1):
            made.append(draw(st.integers(min_length, spare - left * min_length)))
            spare -= made[-1]
        return made

    return lengths()


def packed_batches(
    *, vocab_size: int = 96, max_tokens: int = 64, min_segments: int = 1, max_segments: int = 8, min_length: int = 2
) -> SearchStrategy[PackedBatch]:
    """Batches of one pack as `PackStream` gives them, each segment with a target. Arguments as `segment_lengths`."""
    from hypothesis import strategies as st

    shapes = segment_lengths(
        max_tokens=max_tokens, min_segments=min_segments, max_segments=max_segments, min_length=max(2, min_length)
    )

    @st.composite
    def batches(draw: DrawFn) -> PackedBatch:
        lengths = draw(shapes)
        ids, mask = words(lengths, seed=draw(st.integers(0, 2**32 - 1)), vocab_size=vocab_size)
        return pack_of(torch.from_numpy(ids), torch.from_numpy(mask), lengths)

    return batches()


def packs(
    *, seq_len: int = 64, vocab_size: int = 96, max_examples: int = 24, strategy: str = "ffd"
) -> SearchStrategy[PackColumns]:
    """Packs as they stand in a shard, made of whole examples by the job's own packing, tails and all.

    Args:
        seq_len: Tokens of a pack.
        vocab_size: Ids from 3 up to it are drawn; the pad id is 0.
        max_examples: At most so many examples are packed.
        strategy: As `packing.strategy` of a job.
    """
    from hypothesis import strategies as st

    @st.composite
    def columns(draw: DrawFn) -> PackColumns:
        lengths = draw(st.lists(st.integers(2, seq_len), min_size=1, max_size=max_examples))
        seed = draw(st.integers(0, 2**31 - 1))
        ids, mask = words(lengths, seed=seed, vocab_size=vocab_size)
        placement = place(np.array(lengths), seq_len, strategy=strategy, seed=seed)
        encoded = EncodedBatch(
            input_ids=ids,
            loss_mask=mask,
            loss_weight=None,
            offsets=np.concatenate(([0], np.cumsum(lengths))),
            file=np.zeros(len(lengths), dtype=np.int32),
            row=np.arange(len(lengths)),
            part=np.zeros(len(lengths), dtype=np.int32),
            split=np.zeros(len(lengths), dtype=np.int16),
            rejects=[],
            counts=Counts(rows=len(lengths), packed=len(lengths), encoded_tokens=len(ids)),
        )
        return assemble(encoded, placement, start=0, stop=placement.num_packs, seq_len=seq_len, pad_id=0)

    return columns()


def words(lengths: list[int], *, seed: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeded ids (T,) int32 and a mask (T,) bool, with at least one target in every segment and none at its start."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(FIRST_WORD, vocab_size, sum(lengths), dtype=np.int32)
    mask = rng.random(len(ids)) < 0.5
    stops = np.cumsum(lengths)
    mask[stops - 1] = True
    mask[stops - np.array(lengths)] = False
    return ids, mask
