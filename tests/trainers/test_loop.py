"""The plain step: sums divided once, weights applied, empty steps harmless."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.trainers import VOCABULARY, Recorder, difference, one_by_one, tiny_llama
from packsvc.attention import register
from packsvc.errors import ConfigError
from packsvc.plan import place
from packsvc.stream import PackStream
from packsvc.trainers import accumulate, backward, evaluate, loss_sum
from tests.stream.outputs import encoded, write_packs


def weighted_output(folder: Path) -> str:
    lengths = [20, 9, 30, 14, 25, 40, 7, 33]
    batch = encoded(lengths, weights=True)
    batch.input_ids[:] = batch.input_ids % VOCABULARY
    placement = place(lengths, 64)
    return write_packs(folder, batch, placement, [placement.num_packs], seq_len=64).path


def test_accumulate_deals_out_runs_and_keeps_the_rest():
    assert list(accumulate(iter("abcde"), 2)) == [["a", "b"], ["c", "d"], ["e"]]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        next(accumulate([], 0))


def test_weights_are_applied_and_targets_counted_fully(tmp_path: Path):
    """A target of weight 0.25 counts a quarter in the sum and one in the number."""
    out = weighted_output(tmp_path / "out")
    wanted_loss, wanted = one_by_one(out, weighted=True)
    assert wanted_loss != pytest.approx(one_by_one(out)[0], rel=1e-3)
    model = tiny_llama(register())
    recorder = Recorder(model.parameters())
    with PackStream(out, rank=0, world_size=1) as stream:
        step = backward(model, list(stream))
    recorder.step()
    assert step.mean() == pytest.approx(wanted_loss, rel=1e-6)
    assert difference(recorder.seen, wanted) < 1e-5


def test_evaluation_is_the_token_mean(eight: str):
    model = tiny_llama(register())
    with PackStream(eight, batch_packs=3, remainder="pad", rank=0, world_size=1) as stream:
        assert evaluate(model, stream) == pytest.approx(one_by_one(eight)[0], rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_without_targets_is_a_loss_of_zero(eight: str):
    """`remainder="pad"` repeats packs without loss."""
    with PackStream(eight, batch_packs=5, remainder="pad", rank=1, world_size=2) as stream:
        batch = list(stream)[-1]
    assert batch.num_loss_tokens < batch.num_loss_tokens_global
    model = tiny_llama(register())
    alone = torch.full_like(batch.labels, -100)
    from dataclasses import replace

    step = backward(model, [replace(batch, labels=alone, num_loss_tokens=0, num_loss_tokens_global=0)])
    assert step.mean() == 0.0
    assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)
    with pytest.raises(ConfigError, match="at least one batch"):
        backward(model, [])
    with pytest.raises(ConfigError, match="no batch has a target"):
        evaluate(model, [replace(batch, labels=alone, num_loss_tokens=0)])


def test_the_sum_is_that_of_the_models_own_loss(eight: str):
    model = tiny_llama(register())
    with PackStream(eight, rank=0, world_size=1) as stream:
        batch = next(iter(stream))
    own = model(**batch.hf()).loss * batch.num_loss_tokens
    assert float(loss_sum(model, batch).detach()) == pytest.approx(float(own.detach()), rel=1e-6)


def test_accelerate_refuses_what_steps_by_itself():
    from types import SimpleNamespace

    from packsvc.trainers import accelerated_backward

    deepspeed = SimpleNamespace(distributed_type=SimpleNamespace(value="DEEPSPEED"))
    with pytest.raises(ConfigError, match="DEEPSPEED"):
        accelerated_backward(deepspeed, None, [])
