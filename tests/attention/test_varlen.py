"""`varlen_attention` against attention with the whole mask written out, in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.attention import varlen_attention
from packsvc.errors import ConfigError


def block_mask(lengths: list[int], window: int | None) -> torch.Tensor:
    """Which keys each query sees, cell by cell."""
    total = sum(lengths)
    segment = [s for s, n in enumerate(lengths) for _ in range(n)]
    seen = torch.zeros(total, total, dtype=torch.bool)
    for i in range(total):
        for j in range(i + 1):
            if segment[i] == segment[j] and (window is None or i - j < window):
                seen[i, j] = True
    return seen


def dense(q, k, v, seen, scale=None, softcap=None, sinks=None):
    """The obvious attention of one row with a mask."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        q.transpose(0, 1),
        k.repeat_interleave(group, 1).transpose(0, 1),
        v.repeat_interleave(group, 1).transpose(0, 1),
    )
    scores = q @ k.transpose(1, 2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores) * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks).view(-1, 1, 1)
    return ((weights / total) @ v).transpose(0, 1)


def tensors(lengths, heads=4, kv_heads=2, dim=8, value_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim)]
    return [
        torch.randn(sum(lengths), *shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes
    ]


def cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_the_oracles_mask_written_out():
    assert block_mask([3, 2], 2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.one_of(st.none(), st.integers(1, 10)),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
def test_equals_dense_attention_forward_and_backward(lengths, window, heads, softcap, with_sinks, scale):
    q, k, v = tensors(lengths, *heads)
    sinks = torch.randn(heads[0], dtype=torch.float64).requires_grad_() if with_sinks else None
    out = varlen_attention(q, k, v, cu(lengths), max(lengths), window, scale=scale, softcap=softcap, sinks=sinks)
    expected = dense(q, k, v, block_mask(lengths, window), scale, softcap, sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    inputs = [q, k, v] + [sinks] * with_sinks
    upstream = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_values_may_be_of_another_width():
    q, k, v = tensors([4, 3], value_dim=5)
    out = varlen_attention(q, k, v, cu([4, 3]), 4)
    torch.testing.assert_close(out, dense(q, k, v, block_mask([4, 3], None)), rtol=0, atol=1e-12)


def test_another_segment_changes_nothing_and_gets_no_gradient():
    q, k, v = tensors([5, 7, 3])
    before = varlen_attention(q, k, v, cu([5, 7, 3]), 7)
    changed = [t.detach().clone() for t in (q, k, v)]
    for t in changed:
        t[:5] = 100.0
    after = varlen_attention(*changed, cu([5, 7, 3]), 7)
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])
    before[5:].sum().backward()
    assert not k.grad[:5].any()
    assert k.grad[5:].any()


@pytest.mark.parametrize(("pair", "size"), [((-1, 0), None), ((0, 0), 1), ((3, 0), 4)])
def test_a_window_as_flash_attn_writes_it(pair, size):
    q, k, v = tensors([9])
    assert torch.equal(varlen_attention(q, k, v, cu([9]), 9, pair), varlen_attention(q, k, v, cu([9]), 9, size))


@pytest.mark.parametrize("window", [0, -1, (-1, -1), (2, 1), (-2, 0)])
def test_a_window_that_is_not_causal_is_refused(window):
    q, k, v = tensors([4])
    with pytest.raises(ConfigError, match="window is"):
        varlen_attention(q, k, v, cu([4]), 4, window)


@pytest.mark.parametrize("offsets", [[0, 3], [0, 2, 5], [0, 0, 4], [1, 4], [0, 3, 2, 4], [0]])
def test_offsets_that_do_not_cover_the_row_are_refused(offsets):
    """P16, P18: rows past the last offset stay uninitialised in a kernel, and empty segments break it."""
    q, k, v = tensors([4])
    with pytest.raises(ConfigError, match="cu_seqlens is"):
        varlen_attention(q, k, v, torch.tensor(offsets, dtype=torch.int32), 5)


def test_int64_offsets_are_refused_and_not_cast():
    q, k, v = tensors([4])
    with pytest.raises(ConfigError, match="int32"):
        varlen_attention(q, k, v, cu([4]).long(), 4)


def test_x20_max_seqlen_as_a_tensor_is_refused():
    q, k, v = tensors([4])
    with pytest.raises(ConfigError, match="Python int"):
        varlen_attention(q, k, v, cu([4]), torch.tensor(4))


def test_a_max_seqlen_below_a_segment_is_refused():
    q, k, v = tensors([4, 2])
    with pytest.raises(ConfigError, match="a segment has 4 tokens"):
        varlen_attention(q, k, v, cu([4, 2]), 3)


def test_dropout_drops_weights_and_keeps_the_scale():
    q, k, v = tensors([50])
    torch.manual_seed(0)
    ones = torch.ones_like(v)
    out = varlen_attention(q, k, ones, cu([50]), 50, dropout=0.5)
    assert not torch.allclose(out, torch.ones_like(out))
    assert abs(float(out.detach()[10:].mean()) - 1) < 0.2
