"""Assertions for a team's own tests: is a model isolated, is a mask right, do the boundaries agree?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch

from packsvc.probe import Verdict, figures_of, judge, limits_for, position_findings
from packsvc.stream import PackedBatch
from packsvc.testing.reading import Batch, Flat, flat, inputs_from


class Decoder(Protocol):
    """What `assert_mask` needs of a tokenizer."""

    decode: Callable[..., Any]


def assert_isolated(
    model: torch.nn.Module, batch: Batch, *, lengths: Sequence[int] | None = None, seed: int = 0
) -> None:
    """Fail unless the model, called with this batch, keeps its examples apart, and each gives what it gives alone.

    The model is called as it is, in the mode it is in, with dropout off. All tokens of the first example are replaced:
    no logit of another may change, no gradient reach it; logits and the loss must be those of each example alone.

    Args:
        model: A causal language model that is called like those of transformers.
        batch: What `PackStream` gives, which is called as `model(**batch.hf())`, or the keyword arguments themselves,
            from one's own collate.
        lengths: Of the segments over all rows, if neither `cu_seq_lens_q` nor `position_ids` that restart say so.
        seed: Of the replacement tokens.

    Raises:
        AssertionError: What leaks, with figures.
        ConfigError: The batch has one segment a row, or nothing says where segments end.
    """
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    figures = figures_of(model, inputs_from(batch, lengths), attention=attention, seed=seed)
    verdict, failed, why = judge(figures, limits_for(model))
    if verdict is not Verdict.CLEAN:
        raise AssertionError(
            f"{type(model).__name__} with attention {attention}: {verdict} ({', '.join(failed)}): {why}"
        )


def assert_boundaries(batch: PackedBatch) -> None:
    """Fail unless offsets, positions, segment numbers and the longest length of a batch say the same.

    Raises:
        AssertionError: What contradicts what, and where.
    """
    found = position_findings(batch)
    if found:
        raise AssertionError("; ".join(found))


def assert_mask(
    batch: Batch,
    *,
    tokenizer: Decoder | None = None,
    trained: Sequence[str | Sequence[str]] | None = None,
    lengths: Sequence[int] | None = None,
    allow_empty: bool = False,
) -> None:
    """Fail unless the labels of a batch are a right mask, and train the text that is expected.

    Labels stand at their own token and are not shifted; the first token of a segment and padding are no targets; every
    segment has one; the stated count is theirs.

    Args:
        batch: What `PackStream` gives, or keyword arguments with `input_ids`, `labels` and segments.
        tokenizer: For `trained`.
        trained: For each segment with real tokens the text that must be trained, exactly: one string, or one for each
            unbroken run of targets.
        lengths: Of the segments, as in `assert_isolated`.
        allow_empty: Let segments without a target pass, as after `overlong: split` or in repeated packs.

    Raises:
        AssertionError: The first thing that is wrong, and where.
        ValueError: `trained` without a tokenizer.
    """
    if trained is not None and tokenizer is None:
        raise ValueError("trained is text: give the tokenizer too")
    row = flat(batch, lengths)
    on = row.labels != -100
    _none(on & row.padding, "padding is a target at token")
    _none(on & (row.labels != row.input_ids), "the label is not the token itself (shifted twice?) at token")
    real = [(start, stop) for start, stop in row.spans if not bool(row.padding[start:stop].all())]
    for number, (start, stop) in enumerate(real):
        if on[start]:
            raise AssertionError(
                f"segment {number}: its first token ({start}) is a target, predicted from another example"
            )
        if not allow_empty and not on[start:stop].any():
            raise AssertionError(f"segment {number}: no token of [{start}, {stop}) is a target")
    stated = batch.num_loss_tokens if isinstance(batch, PackedBatch) else None
    if stated is not None and stated != int(on.sum()):
        raise AssertionError(f"num_loss_tokens is {stated}, labels have {int(on.sum())} targets")
    if trained is not None and tokenizer is not None:
        _compare_text(row, real, tokenizer, trained)


def _none(where: torch.Tensor, what: str) -> None:
    if bool(where.any()):
        raise AssertionError(f"{what} {int(where.nonzero()[0])}, {int(where.sum())} in all")


def _compare_text(
    row: Flat, real: Sequence[tuple[int, int]], tokenizer: Decoder, trained: Sequence[str | Sequence[str]]
) -> None:
    if len(trained) != len(real):
        raise AssertionError(f"the batch has {len(real)} segments, trained names {len(trained)}")
    for number, ((start, stop), expected) in enumerate(zip(real, trained, strict=True)):
        runs = [
            tokenizer.decode([int(row.input_ids[i]) for i in run])
            for on, run in groupby(range(start, stop), lambda i: bool(row.labels[i] != -100))
            if on
        ]
        found: Any = "".join(runs) if isinstance(expected, str) else runs
        if found != (expected if isinstance(expected, str) else list(expected)):
            raise AssertionError(f"segment {number} trains {found!r}, expected {expected!r}")
