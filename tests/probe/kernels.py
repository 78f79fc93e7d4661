"""Stand-ins for the convolution and scan kernels (causal-conv1d, mamba-ssm, flash-linear-attention) in a test.

Where boundaries arrive, the reference function runs segment by segment: that is what those kernels promise. So a test
shows whether a model hands the boundaries to every mixer, without the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

BOUNDED = {
    "causal_conv1d_fn": (2, "seq_idx"),
    "mamba2_chunk_scan": (1, "seq_idx"),
    "mamba2_split_conv1d_scan_combined": (1, "seq_idx"),
    "torch_chunk_gated_delta_rule": (1, "cu_seqlens"),
}
"""Function of a modeling file: the dimension of the row, and the argument that carries boundaries."""


def install(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace what the model's file has of them; gives their names."""
    module = sys.modules[type(model).__module__]
    found = [name for name in BOUNDED if hasattr(module, name)]
    for name in found:
        monkeypatch.setattr(module, name, by_segments(getattr(module, name), *BOUNDED[name]))
    return found


def by_segments(reference: Callable[..., Any], dim: int, key: str) -> Callable[..., Any]:
    """The reference function on each segment apart, if it is told where they are."""

    def call(*args: Any, **options: Any) -> Any:
        told = options.pop(key, None)
        for other in ("seq_idx", "cu_seqlens"):
            options.pop(other, None)
        total = args[0].shape[dim]
        if told is None:
            return reference(*args, **options)
        if key == "seq_idx":
            told = torch.cat([torch.tensor([0]), (told[0].diff() != 0).nonzero()[:, 0] + 1, torch.tensor([total])])
        bounds = told.tolist()

        def part(value: Any, start: int, stop: int) -> Any:
            whole = isinstance(value, torch.Tensor) and value.ndim > dim and value.shape[dim] == total
            return value.narrow(dim, start, stop - start) if whole else value

        outs = [
            reference(*(part(a, *span) for a in args), **{n: part(v, *span) for n, v in options.items()})
            for span in pairwise(bounds)
        ]
        if outs[0] is None:  # a fused kernel that has no reference: the model goes on with the single ones
            return None
        if isinstance(outs[0], tuple):
            return torch.cat([out[0] for out in outs], dim), outs[-1][1]
        return torch.cat(outs, dim)

    return call
