"""The CUDA kernels against the segment loop in float32; `test_varlen` holds that loop against the written-out mask."""

from __future__ import annotations

import pytest
import torch

from packsvc.attention import varlen_attention
from packsvc.attention.varlen import segment_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [513, 1, 130, 900, 64]


def inputs(heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(heads, 64), (kv_heads, 64), (kv_heads, 64)]
    return [
        torch.randn(sum(LENGTHS), *shape, device="cuda", generator=generator).to(dtype).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_forward_and_backward_are_as_near_to_float32_as_the_loop_in_the_same_dtype(dtype, heads, window):
    """The tolerance is twice the error of the same computation, in the same dtype, by the slow twin."""
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    boundaries, scale = offsets.tolist(), 64**-0.5
    tensors = inputs(*heads, dtype)
    wide = [t.detach().float().requires_grad_() for t in tensors]
    upstream = torch.randn(sum(LENGTHS), heads[0], 64, device="cuda")

    def results(out: torch.Tensor, of: list[torch.Tensor]) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad(out, of, upstream.to(out.dtype))]

    exact = results(segment_attention(*wide, boundaries, window, scale=scale), wide)
    slow = results(segment_attention(*tensors, boundaries, window, scale=scale), tensors)
    fast = results(varlen_attention(*tensors, offsets, max(LENGTHS), window), tensors)
    for reference, twin, found in zip(exact, slow, fast, strict=True):
        allowed = 2 * (twin.float() - reference).abs().max() + 1e-5
        assert (found.float() - reference).abs().max() <= allowed


def test_another_segment_changes_nothing():
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    q, k, v = inputs(4, 2, torch.bfloat16)
    before = varlen_attention(q, k, v, offsets, max(LENGTHS))
    changed = [t.detach().clone() for t in (q, k, v)]
    for t in changed:
        t[:513] += 1
    after = varlen_attention(*changed, offsets, max(LENGTHS))
    spread = float(before.float().std())
    assert float((before[513:] - after[513:]).abs().max()) <= 1e-3 * spread
    assert float((before[:513] - after[:513]).abs().max()) > 0.1 * spread


def test_a_call_does_not_make_the_host_wait():
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    q, k, v = inputs(4, 2, torch.bfloat16)
    varlen_attention(q, k, v, offsets, max(LENGTHS), 100)
    torch.cuda.set_sync_debug_mode("error")
    try:
        varlen_attention(q, k, v, offsets, max(LENGTHS), 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
