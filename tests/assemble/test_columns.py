"""Assembled packs against a loop over packs, segments and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.assemble import assemble
from packsvc.plan import STRATEGIES, place
from packsvc.types import Counts, EncodedBatch, PackColumns, Placement

PAD = 99


def make_batch(lengths: list[int], *, ids: list[int] | None = None, weights: bool = False) -> EncodedBatch:
    rng = np.random.default_rng(sum(lengths))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    total = int(offsets[-1])
    mask = rng.random(total) < 0.5
    mask[offsets[:-1][np.array(lengths) > 0]] = False
    return EncodedBatch(
        input_ids=np.array(ids if ids is not None else range(1000, 1000 + total), dtype=np.int32),
        loss_mask=mask,
        loss_weight=np.where(mask, rng.random(total), 0).astype(np.float32) if weights else None,
        offsets=offsets,
        file=rng.integers(0, 5, len(lengths)).astype(np.int32),
        row=rng.integers(0, 2**40, len(lengths)),
        part=rng.integers(0, 3, len(lengths)).astype(np.int32),
        split=np.zeros(len(lengths), dtype=np.int16),
        rejects=[],
        counts=Counts(),
    )


def by_hand(batch: EncodedBatch, placement: Placement, start: int, stop: int, seq_len: int) -> list[dict[str, Any]]:
    """Each pack as lists, token by token."""
    packs = []
    for number in range(start, stop):
        segments = placement.order[placement.pack_offsets[number] : placement.pack_offsets[number + 1]].tolist()
        pack: dict[str, Any] = {"input_ids": [], "position_ids": [], "loss_mask": [], "loss_weight": []}
        pack["cu_seqlens"], squares = [0], 0
        for segment in segments:
            first, last = batch.offsets[segment], batch.offsets[segment + 1]
            for position, token in enumerate(range(first, last)):
                pack["input_ids"].append(int(batch.input_ids[token]))
                pack["position_ids"].append(position)
                pack["loss_mask"].append(bool(batch.loss_mask[token]))
                pack["loss_weight"].append(0.0 if batch.loss_weight is None else float(batch.loss_weight[token]))
            pack["cu_seqlens"].append(len(pack["input_ids"]))
            squares += int(last - first) ** 2
        tokens = len(pack["input_ids"])
        pack["num_tokens"], pack["num_segments"] = tokens, len(segments)
        pack["num_loss_tokens"], pack["sum_squared_lengths"] = sum(pack["loss_mask"]), squares
        for position in range(seq_len - tokens):
            pack["input_ids"].append(PAD)
            pack["position_ids"].append(position)
            pack["loss_mask"].append(False)
            pack["loss_weight"].append(0.0)
        if tokens < seq_len:
            pack["cu_seqlens"].append(seq_len)
        for name in ("file", "row", "part"):
            pack[f"segment_{name}"] = [int(getattr(batch, name)[s]) for s in segments]
        packs.append(pack)
    return packs


def as_lists(packs: PackColumns) -> list[dict[str, Any]]:
    out = []
    for i in range(packs.num_packs):
        cu = slice(packs.cu_offsets[i], packs.cu_offsets[i + 1])
        origin = slice(packs.segment_offsets[i], packs.segment_offsets[i + 1])
        weight = packs.loss_weight
        out.append(
            {
                "input_ids": packs.input_ids[i].tolist(),
                "position_ids": packs.position_ids[i].tolist(),
                "loss_mask": packs.loss_mask[i].tolist(),
                "loss_weight": weight[i].tolist() if weight is not None else [0.0] * packs.input_ids.shape[1],
                "cu_seqlens": packs.cu_seqlens[cu].tolist(),
                "segment_file": packs.segment_file[origin].tolist(),
                "segment_row": packs.segment_row[origin].tolist(),
                "segment_part": packs.segment_part[origin].tolist(),
                **{
                    name: int(getattr(packs, name)[i])
                    for name in ("num_segments", "num_tokens", "num_loss_tokens", "sum_squared_lengths")
                },
            }
        )
    return out


@given(
    st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=40))),
    st.sampled_from(STRATEGIES),
    st.booleans(),
    st.data(),
)
def test_packs_are_those_of_the_loop(
    case: tuple[int, list[int]], strategy: str, weights: bool, data: st.DataObject
) -> None:
    seq_len, lengths = case
    batch, placement = make_batch(lengths, weights=weights), place(lengths, seq_len, strategy=strategy)
    start = data.draw(st.integers(0, placement.num_packs))
    stop = data.draw(st.integers(start, placement.num_packs))
    packs = assemble(batch, placement, start=start, stop=stop, seq_len=seq_len, pad_id=PAD)
    assert as_lists(packs) == by_hand(batch, placement, start, stop, seq_len)
    assert packs.input_ids.shape == (stop - start, seq_len)


def test_arrays_have_the_types_of_the_format() -> None:
    lengths = [3, 2, 5]
    packs = assemble(make_batch(lengths, weights=True), place(lengths, 8), start=0, stop=2, seq_len=8, pad_id=PAD)
    kinds = {name: getattr(packs, name).dtype.name for name in PackColumns.__slots__}
    assert kinds == {
        "input_ids": "int32",
        "position_ids": "int32",
        "loss_mask": "bool",
        "loss_weight": "float32",
        "cu_seqlens": "int32",
        "cu_offsets": "int64",
        "segment_file": "int32",
        "segment_row": "int64",
        "segment_part": "int32",
        "segment_offsets": "int64",
        "num_segments": "int32",
        "num_tokens": "int32",
        "num_loss_tokens": "int32",
        "sum_squared_lengths": "int64",
    }


def one_pack(lengths: list[int], seq_len: int, **arguments: Any) -> PackColumns:
    placement = Placement(order=np.arange(len(lengths)), pack_offsets=np.array([0, len(lengths)]))
    return assemble(make_batch(lengths, **arguments), placement, start=0, stop=1, seq_len=seq_len, pad_id=PAD)


def test_p15_a_full_pack_has_no_tail_segment() -> None:
    assert one_pack([512, 512], 1024).cu_seqlens.tolist() == [0, 512, 1024]


def test_p16_an_empty_segment_or_pack_is_never_made() -> None:
    with pytest.raises(ValueError, match="segment 1 is empty"):
        one_pack([3, 0, 2], 8)
    empty = Placement(order=np.arange(1), pack_offsets=np.array([0, 1, 1]))
    with pytest.raises(ValueError, match="pack 1 is empty"):
        assemble(make_batch([3]), empty, start=0, stop=2, seq_len=8, pad_id=PAD)


def test_p18_the_last_boundary_is_the_length_of_the_row_and_the_tail_has_no_loss() -> None:
    packs = one_pack([1000], 1024)
    assert packs.cu_seqlens.tolist() == [0, 1000, 1024]
    assert packs.input_ids[0, 1000:].tolist() == [PAD] * 24
    assert packs.position_ids[0, 1000:].tolist() == list(range(24))
    assert not packs.loss_mask[0, 1000:].any()
    assert packs.num_tokens.tolist() == [1000]
    assert packs.num_segments.tolist() == [1]


def test_p19_boundaries_come_from_segments_never_from_token_values() -> None:
    """An end token in the middle of a chat, or the pad id as content, ends nothing."""
    eos = 2
    packs = one_pack([6, 3], 12, ids=[1, 5, eos, PAD, 6, eos, 1, eos, eos])
    assert packs.cu_seqlens.tolist() == [0, 6, 9, 12]
    assert packs.num_segments.tolist() == [2]
    assert packs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2]]


def test_p21_a_mask_of_another_length_than_the_ids_stops_the_job() -> None:
    batch = make_batch([3, 4])
    short = EncodedBatch(
        **{name: getattr(batch, name) for name in EncodedBatch.__slots__ if name != "loss_mask"},
        loss_mask=batch.loss_mask[:-1],
    )
    with pytest.raises(ValueError, match="loss_mask has 6 values, input_ids 7"):
        assemble(short, place([3, 4], 8), start=0, stop=1, seq_len=8, pad_id=PAD)


def test_a_pack_over_its_length_is_refused() -> None:
    with pytest.raises(ValueError, match="pack 0 has 9 tokens, seq_len is 8"):
        one_pack([5, 4], 8)


def test_packs_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="packs 0 to 2 of 1"):
        assemble(make_batch([3]), place([3], 8), start=0, stop=2, seq_len=8, pad_id=PAD)
