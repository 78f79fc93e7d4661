"""A batch is what its packs say, token by token, in every layout; and what models take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.errors import ConfigError
from packsvc.stream import PackedBatch, PackStream
from packsvc.stream.collate import RowShape, boundaries, collate, position_ids
from packsvc.stream.options import Layout
from packsvc.stream.rows import Rows
from packsvc.types import PackColumns
from tests.stream.oracle import fields_of, slow_batch
from tests.stream.outputs import PAD, Written, encoded, write_output, write_packs

from packsvc.assemble import assemble  # isort: skip
from packsvc.plan import place  # isort: skip


def rows_of(packs: list[PackColumns]) -> Rows:
    """The real tokens of packs of one row each."""
    num_tokens = [int(pack.num_tokens[0]) for pack in packs]
    num_segments = [int(pack.num_segments[0]) for pack in packs]
    pairs = list(zip(packs, num_tokens, strict=True))
    weights = [pack.loss_weight[0, :n] for pack, n in pairs if pack.loss_weight is not None]
    return Rows(
        input_ids=np.concatenate([pack.input_ids[0, :n] for pack, n in pairs]),
        loss_mask=np.concatenate([pack.loss_mask[0, :n] for pack, n in pairs]),
        loss_weight=np.concatenate(weights) if weights else None,
        lengths=np.concatenate(
            [np.diff(pack.cu_seqlens[: n + 1]) for pack, n in zip(packs, num_segments, strict=True)]
        ),
        num_segments=num_segments,
        num_tokens=num_tokens,
    )


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 16), min_size=1, max_size=14),
    layout=st.sampled_from(["trimmed", "padded"]),
    align=st.sampled_from([1, 2, 4]),
    weights=st.booleans(),
    repeated=st.integers(0, 2),
)
def test_equals_the_slow_twin(lengths, layout, align, weights, repeated):
    batch = encoded(lengths, seed=len(lengths), weights=weights)
    placement = place(lengths, 16, align=align)
    packs = [
        assemble(batch, placement, start=i, stop=i + 1, seq_len=16, pad_id=PAD) for i in range(placement.num_packs)
    ]
    repeated = min(repeated, len(packs))
    found = collate(
        rows_of(packs),
        shape=RowShape(layout=Layout(layout), align=align, seq_len=16, pad_id=PAD),
        pack_indices=range(len(packs)),
        num_repeated_packs=repeated,
        num_loss_tokens_global=99,
    )
    expected = slow_batch(packs, layout=layout, align=align, repeated=repeated)
    got = fields_of(found)
    logical = expected.pop("cu_seqlens_logical")
    assert got["cu_seqlens_logical"] == (None if logical == expected["cu_seqlens"] else logical)
    assert got["loss_weights"] == (expected.pop("loss_weights") if weights else expected.pop("loss_weights") and None)
    for name, values in expected.items():
        assert got[name] == values, name
    assert found.num_loss_tokens == sum(label != -100 for label in expected["labels"])
    assert found.num_segments == len(lengths)
    assert found.num_tokens == sum(lengths)
    assert found.max_seqlen == max(b - a for a, b in zip(got["cu_seqlens"], got["cu_seqlens"][1:], strict=False))
    if layout == "padded":
        assert len(got["input_ids"]) == 16 * len(packs)


def test_fields_have_the_contracts_dtypes(small: Written):
    batch = next(iter(PackStream(small.path, batch_packs=2)))
    total, segments = len(batch.input_ids), batch.num_segments
    for name in ("input_ids", "position_ids", "labels", "seq_idx"):
        assert getattr(batch, name).dtype == torch.int32
        assert getattr(batch, name).shape == (total,)
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.shape == (segments + 1,)
    assert batch.cu_seqlens_logical is None
    assert batch.loss_weights is None
    assert batch.padding_mask.dtype == torch.bool
    assert [type(v) for v in (batch.max_seqlen, batch.num_loss_tokens, batch.num_segments)] == [int] * 3
    assert type(batch.num_loss_tokens_global) is int


def test_positions_written_out():
    cu = boundaries(np.array([3, 2]))
    assert cu.tolist() == [0, 3, 5]
    assert position_ids(cu).tolist() == [0, 1, 2, 0, 1]


def test_hf_is_what_transformers_takes(small: Written):
    batch = next(iter(PackStream(small.path, batch_packs=2)))
    row = batch.hf()
    assert set(row) == {
        "input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
        "seq_idx", "use_cache",
    }  # fmt: skip
    for name in ("input_ids", "labels", "position_ids"):
        assert row[name].dtype == torch.int64
        assert row[name].shape == (1, len(batch.input_ids))
        assert torch.equal(row[name][0].int(), getattr(batch, name))
    assert row["seq_idx"].shape == (1, len(batch.input_ids))
    assert row["seq_idx"].dtype == row["cu_seq_lens_q"].dtype == torch.int32
    assert row["use_cache"] is False
    assert type(row["max_length_q"]) is type(row["max_length_k"]) is int


def test_x2_no_batch_carries_an_attention_mask(small: Written):
    batch = next(iter(PackStream(small.path, layout="padded")))
    assert not [name for name in PackedBatch.__slots__ if "attention" in name]
    assert "attention_mask" not in batch.hf()


def test_x4_positions_have_one_dimension_and_boundaries_are_always_there(small: Written):
    for batch in PackStream(small.path):
        assert batch.position_ids.ndim == 1
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == len(batch.input_ids)
        assert (batch.cu_seqlens.diff() > 0).all()
        assert (batch.position_ids[batch.cu_seqlens[:-1].long()] == 0).all()


def test_x16_both_offsets_are_there_and_named_when_segments_are_padded(small: Written):
    batch = next(iter(PackStream(small.path, align=4)))
    logical, physical = batch.cu_seqlens_logical, batch.cu_seqlens
    assert logical is not None
    assert logical.shape == physical.shape
    assert physical[-1] == len(batch.input_ids)
    assert logical[-1] == batch.num_tokens
    assert (physical % 4 == 0).all()
    assert (logical.diff() <= physical.diff()).all()


def test_x20_max_seqlen_is_a_python_int(small: Written):
    for batch in PackStream(small.path):
        assert type(batch.max_seqlen) is int
        assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())


def test_x21_padding_is_marked_in_every_batch(small: Written):
    trimmed = next(iter(PackStream(small.path)))
    padded = next(iter(PackStream(small.path, layout="padded", batch_packs=4)))
    assert not trimmed.padding_mask.any()
    assert int(padded.padding_mask.sum()) == 4 * 24 - padded.num_tokens > 0
    assert (padded.labels[padded.padding_mask] == -100).all()


def test_labels_stand_at_their_own_token_and_never_on_a_first_one(small: Written):
    for batch in PackStream(small.path, batch_packs=3):
        on = batch.labels != -100
        assert on.any()
        assert torch.equal(batch.labels[on], batch.input_ids[on])
        assert not on[batch.cu_seqlens[:-1].long()].any()


def test_a_batch_without_targets_has_loss_zero_and_not_nan(tmp_path):
    transformers = pytest.importorskip("transformers")
    out = write_output(tmp_path / "o", [3], trained=0.0, seq_len=8)
    batch = next(iter(PackStream(out.path, remainder="pad", batch_packs=2, rank=1, world_size=2)))
    assert batch.num_repeated_packs == 1
    batch = next(iter(PackStream(out.path, remainder="pad", batch_packs=1, rank=3, world_size=4)))
    assert batch.num_loss_tokens == 0
    assert batch.num_loss_tokens_global > 0
    assert batch.hf()["num_items_in_batch"] == 1
    from packsvc.attention import register

    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register())
    assert float(model(**batch.hf()).loss.detach()) == 0.0


def test_fractional_weights_are_refused_by_hf(tmp_path):
    out = write_output(tmp_path / "o", [4], weights=True)
    batch = next(iter(PackStream(out.path, batch_packs=4)))
    assert batch.loss_weights is not None
    assert batch.loss_weights.dtype == torch.float32
    assert (batch.loss_weights[batch.labels == -100] == 0).all()
    with pytest.raises(ConfigError, match="weights other than 0 and 1"):
        batch.hf()


def test_weights_of_one_are_no_obstacle(tmp_path):
    lengths = [6, 5, 4]
    batch = encoded(lengths, weights=True)
    batch.loss_weight[:] = batch.loss_mask
    out = write_packs(tmp_path / "o", batch, place(lengths, 16), [1], seq_len=16)
    found = next(iter(PackStream(out.path)))
    assert "labels" in found.hf()
    assert torch.equal(found.loss_weights != 0, found.labels != -100)


def test_tensors_belong_to_the_caller(small: Written):
    stream = PackStream(small.path, shuffle=False)
    kept = [(batch, fields_of(batch)) for batch in stream]
    for batch, before in kept:
        assert fields_of(batch) == before
    first = kept[0][0]
    first.input_ids.zero_()
    first.labels.zero_()
    again = next(iter(PackStream(small.path, shuffle=False)))
    assert fields_of(again) == kept[0][1]
    assert fields_of(kept[1][0]) == kept[1][1]


def test_padded_with_an_align_that_was_not_reserved_is_refused(small: Written, tmp_path):
    with pytest.raises(ConfigError, match="reserved room for align 1 only"):
        PackStream(small.path, layout="padded", align=4)
    reserved = write_output(tmp_path / "o", [4], align=4)
    for align in (1, 2, 4):
        for batch in PackStream(reserved.path, layout="padded", align=align):
            assert len(batch.input_ids) == 24
    with pytest.raises(ConfigError, match="align=8"):
        PackStream(reserved.path, layout="padded", align=8)
