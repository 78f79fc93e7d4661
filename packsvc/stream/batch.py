"""One batch as a trainer takes it: all packs flattened into one row, with its boundaries said outright.

There is never an attention mask in it: a mask of ones, which looks harmless, makes several attention paths forget
the boundaries. Labels stand at their own token and are not shifted, since the model's loss shifts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from packsvc.errors import ConfigError

PackIndex = int | tuple[int, int]
"""A pack's number as `show --pack` counts, or (output, pack) when several outputs are mixed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """T tokens of S segments. Tensors belong to the caller: nothing writes into them again."""

    input_ids: torch.Tensor
    """int32 (T,)"""
    position_ids: torch.Tensor
    """int32 (T,), from 0 in every segment, running on through a segment's own padding."""
    labels: torch.Tensor
    """int32 (T,), aligned with `input_ids`; -100 off target and on each segment's first token."""
    cu_seqlens: torch.Tensor
    """int32 (S + 1,), 0 first, T last, strictly increasing: where segments stand in memory, padding included."""
    cu_seqlens_logical: torch.Tensor | None
    """int32 (S + 1,): the same without the padding of segments (`align`); None when equal."""
    max_seqlen: int
    """Longest segment by `cu_seqlens`. A Python int: a device tensor makes kernels recompile or wait."""
    seq_idx: torch.Tensor
    """int32 (T,) segment number, for Mamba, convolutions and document masks."""
    padding_mask: torch.Tensor
    """bool (T,), True on padding: what a mixture of experts leaves out of its balance loss."""
    loss_weights: torch.Tensor | None
    """float32 (T,), 0 off target; None unless the job wrote weights."""
    num_loss_tokens: int
    """Targets in this batch: the denominator of its token mean."""
    num_loss_tokens_global: int
    """Targets in the global batch, all ranks together. The mean over ranks of their own means is not the token mean:
    with several ranks take each rank's sum over this."""
    num_segments: int
    """Real segments, tails not counted."""
    num_tokens: int
    """Real tokens, padding not counted."""
    num_repeated_packs: int
    """Packs at the end that fill an incomplete global batch (`remainder="pad"`); they have no targets."""
    pack_indices: tuple[PackIndex, ...]
    """Which packs these are, in their order in the row."""
    fractional_weights: bool = False
    """Whether any target has a weight other than 1."""

    def hf(self) -> dict[str, Any]:
        """What a transformers model takes, as one row: `model(**batch.hf()).loss`.

        Raises:
            ConfigError: The batch has fractional weights, which the models would ignore.
        """
        if self.fractional_weights:
            raise ConfigError(
                "this batch has loss weights other than 0 and 1, which transformers' loss would ignore; take the "
                "logits and weigh the token losses by batch.loss_weights, or pack the job with loss_weights: false"
            )
        row: dict[str, Any] = {
            "input_ids": self.input_ids.long().unsqueeze(0),
            "labels": self.labels.long().unsqueeze(0),
            "position_ids": self.position_ids.long().unsqueeze(0),
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "seq_idx": self.seq_idx.unsqueeze(0),
            "use_cache": False,
        }
        if self.num_loss_tokens == 0:
            # A mean over no targets is 0/0; the sum over 1 is the 0 that this batch adds to the step.
            row["num_items_in_batch"] = 1
        return row

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The same batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory; DataLoader calls this for `pin_memory=True`."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **changed)
