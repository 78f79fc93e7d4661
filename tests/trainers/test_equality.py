"""One optimizer step on packs has the loss and the gradients of the same examples one by one, in every trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import trainers as table
from benchmarks.trainers import GOAL, TRAINERS, difference, one_by_one, without_boundaries
from packsvc.stream import PackStream


@pytest.fixture(scope="session")
def separate(eight: str):
    return one_by_one(eight)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_learns_what_examples_alone_teach(eight: str, separate, tmp_path: Path, name: str):
    """X1, X2, X17: with gradient accumulation; boundaries arrive, and the mean is that of tokens."""
    loss, gradients = TRAINERS[name][1](eight, tmp_path)
    assert loss == pytest.approx(separate[0], rel=1e-6)
    assert difference(gradients, separate[1]) < GOAL


@pytest.mark.slow
def test_x17_two_ranks_learn_the_token_mean_of_both(eight: str, tmp_path: Path):
    names = ["plain loop", "transformers Trainer"]
    rows = table.on_two_ranks(eight, tmp_path, names=names)
    assert [(row["trainer"], row["ranks"]) for row in rows] == [(name, 2) for name in names]
    for row in rows:
        assert row["loss_packed"] == pytest.approx(row["loss_separate"], rel=1e-6)
        assert row["value"] < GOAL


def test_the_comparison_sees_a_leak(eight: str, separate, tmp_path: Path):
    loss, gradients = without_boundaries(eight, tmp_path)
    assert difference(gradients, separate[1]) > 0.1
    assert abs(loss - separate[0]) / separate[0] < 0.01  # and the loss alone would not


def test_ranks_and_batches_have_unlike_numbers_of_targets(eight: str):
    """Else a mean of means would pass as the token mean."""
    with PackStream(eight, batch_packs=2, rank=0, world_size=1) as stream:
        counts = [batch.num_loss_tokens for batch in stream]
    assert len(counts) == 4
    assert max(counts) > 1.2 * min(counts)


@pytest.mark.parametrize("attention", ["sdpa"])
def test_x14_positions_with_boundaries_keep_examples_apart_on_other_attention_too(
    eight: str, separate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
):
    monkeypatch.setattr(table, "register", lambda: attention)
    for name in ("plain loop", "transformers Trainer"):
        loss, gradients = TRAINERS[name][1](eight, tmp_path / name)
        assert loss == pytest.approx(separate[0], rel=1e-6)
        assert difference(gradients, separate[1]) < GOAL
