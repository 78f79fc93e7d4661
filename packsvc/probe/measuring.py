"""The figures: what one forward and backward pass tell about who sees whom.

`changed` replaces all tokens of each row's first segment and looks at the logits of all others: not the last one,
which a causal model hides from the others anyway. `gradient` is the same through the backward pass, with the loss of
the other segments. `alone` is what each segment gives in a row of its own, which sees what isolation does not:
positions that run on, a window that got lost. `seen` is the control: a model whose first segment does not even change
itself cannot show anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from packsvc.errors import ConfigError
from packsvc.probe.calls import Inputs, Segment

FIRST_WORD = 3
"""Ids below are left alone: pad, begin and end stand there in most vocabularies, and models may mask them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All are largest absolute values over segments that were not touched, if not said otherwise."""

    changed: float
    """Of logits, when all tokens of the first segments are replaced."""
    seen: float
    """The same inside the first segments: the control."""
    gradient: float
    """Of the others' loss with respect to the embeddings of the first segments."""
    own_gradient: float
    """The same with respect to their own embeddings: the control."""
    alone: float
    """Of logits in the pack less logits of the segment alone, over all segments."""
    spread: float
    """Standard deviation of the logits: the scale of the above."""
    loss: float | None
    """Token mean that the model gives for the pack; None when it gave none."""
    loss_alone: float | None
    """Token mean over the segments alone; None when there is no target."""
    num_targets: int

    @property
    def loss_gap(self) -> float | None:
        """Packed loss less the loss of the segments alone, without sign."""
        return None if self.loss is None or self.loss_alone is None else abs(self.loss - self.loss_alone)


def measure(
    model: torch.nn.Module, inputs: Inputs, *, alone: Callable[[torch.Tensor], Mapping[str, Any]], seed: int = 0
) -> Figures:
    """Call the model as it is going to be called, and look. The model's mode is left as it is; dropout is off.

    Args:
        model: A causal language model of transformers, or one that is called like it.
        inputs: The call.
        alone: Makes the arguments for one segment's (n,) ids alone.
        seed: Of the replacement tokens.
    """
    arguments, ids = inputs.arguments, inputs.arguments["input_ids"]
    touched = torch.zeros_like(ids, dtype=torch.bool)
    for row in range(len(ids)):
        first = next(segment for segment in inputs.segments if segment.row == row)
        touched[row, first.start : first.stop] = True
    if touched.all():
        raise ConfigError("the batch has one segment a row: there is nothing to keep apart; probe a pack of several")
    other = torch.where(touched, replaced(ids, vocabulary(model), seed), ids)
    with without_dropout(model):
        with torch.no_grad():
            before = model(**arguments)
            after = model(**{**arguments, "input_ids": other}).logits
            pieces = [model(**alone(ids[s.row, s.start : s.stop])).logits[0] for s in inputs.segments]
        difference = (before.logits - after).abs().amax(dim=-1)
        gradient = embedding_gradient(model, arguments, inputs.segments, touched)
        gradient = gradient.reshape(*touched.shape, -1).abs().amax(dim=-1)
    gaps = [
        (before.logits[s.row, s.start : s.stop] - piece).abs().max()
        for s, piece in zip(inputs.segments, pieces, strict=True)
    ]
    labels = arguments.get("labels")
    loss_alone, num_targets = (None, 0) if labels is None else sum_alone(pieces, inputs.segments, labels)
    # With the balance loss of experts in it, it is not the token mean.
    loss = None if getattr(before, "aux_loss", None) is not None else getattr(before, "loss", None)
    return Figures(
        changed=float(difference[~touched].max()),
        seen=float(difference[touched].max()),
        gradient=float(gradient[touched].max()),
        own_gradient=float(gradient[~touched].max()),
        alone=float(torch.stack(gaps).max()),
        spread=float(torch.cat(pieces).float().std()),
        loss=None if loss is None else float(loss),
        loss_alone=loss_alone,
        num_targets=num_targets,
    )


def vocabulary(model: torch.nn.Module) -> int:
    """How many ids the model knows."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    return len(embedding.weight)


def replaced(ids: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """Other ids in every place, drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(1, size - FIRST_WORD, ids.shape, generator=generator).to(ids.device)
    # An id below FIRST_WORD moves too: no step brings it back to where it was.
    moved: torch.Tensor = (ids.clamp(min=FIRST_WORD) - FIRST_WORD + step) % (size - FIRST_WORD) + FIRST_WORD
    return moved


def embedding_gradient(
    model: torch.nn.Module, arguments: Mapping[str, Any], segments: Sequence[Segment], touched: torch.Tensor
) -> torch.Tensor:
    """(rows, T, hidden), or as the model lays it out: of the summed loss of the untouched segments, all of whose tokens
    are taken as targets."""
    kept: list[torch.Tensor] = []

    def cut(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        kept.append(out.detach().requires_grad_())
        return kept[-1]

    handle = model.get_input_embeddings().register_forward_hook(cut)  # type: ignore[operator]
    try:
        with torch.enable_grad():
            logits = model(**arguments).logits
    finally:
        handle.remove()
    ids = arguments["input_ids"]
    losses = [
        cross_entropy(
            logits[s.row, s.start : s.stop - 1].float(), ids[s.row, s.start + 1 : s.stop].long(), reduction="sum"
        )
        for s in segments
        if not touched[s.row, s.start]
    ]
    (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), [kept[0]])
    return gradient


def sum_alone(
    pieces: Sequence[torch.Tensor], segments: Sequence[Segment], labels: torch.Tensor
) -> tuple[float | None, int]:
    """Token mean of the segments' losses by themselves, and its denominator."""
    total, targets = 0.0, 0
    for segment, logits in zip(segments, pieces, strict=True):
        wanted = labels[segment.row, segment.start + 1 : segment.stop].long()
        total += float(cross_entropy(logits[:-1].double(), wanted, ignore_index=-100, reduction="sum"))
        targets += int((wanted != -100).sum())
    return (total / targets if targets else None), targets


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Set every dropout probability of the modules to 0 meanwhile: train mode takes other paths than eval mode, and
    they are to be probed without chance."""
    was = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]
    for module, name, _ in was:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in was:
            setattr(module, name, value)
