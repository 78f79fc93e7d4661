"""Several outputs as one stream."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from packsvc.errors import ConfigError, FormatError, StateError
from packsvc.stream import PackStream
from tests.stream.oracle import global_steps, ranks_of, slow_batch, steps_of
from tests.stream.outputs import Written, write_output


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """40 packs with many targets."""
    return write_output(tmp_path_factory.mktemp("rich"), [24, 16], trained=0.9, seed=1)


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """60 packs with few targets."""
    return write_output(tmp_path_factory.mktemp("poor"), [30, 30], trained=0.1, seed=2)


def amounts(out: Written, unit: str) -> list[int]:
    return [1 if unit == "packs" else int(getattr(pack, f"num_{unit}")[0]) for pack in out.packs]


@pytest.mark.parametrize("unit", ["loss_tokens", "tokens", "packs"])
@pytest.mark.parametrize("shares", [(0.7, 0.3), (1, 1)])
def test_d10_shares_are_of_the_unit_asked_for_and_the_achieved_ones_are_reported(rich, poor, unit, shares):
    stream = PackStream(list(zip([rich.path, poor.path], shares, strict=True)), unit=unit, shuffle=False)
    assert set(stream.shares().values()) == {0.0}
    counted = [0, 0]
    tables = [amounts(rich, unit), amounts(poor, unit)]
    for batch in stream:
        for output, pack in batch.pack_indices:
            counted[output] += tables[output][pack]
    achieved = stream.shares()
    assert list(achieved) == [rich.path, poor.path]
    assert achieved[rich.path] == pytest.approx(counted[0] / sum(counted))
    assert achieved[rich.path] == pytest.approx(shares[0] / sum(shares), abs=0.06)


def test_an_epoch_ends_when_any_output_is_used_up_and_len_says_so(rich, poor):
    stream = PackStream([(rich.path, 0.5), (poor.path, 0.5)], unit="packs")
    steps = steps_of(stream)
    assert len(steps) == len(stream)
    taken = Counter(output for step in steps for output, _ in step)
    assert taken[0] == 40
    assert abs(taken[1] - 40) <= 1
    assert set(Counter(pack for step in steps for pack in step).values()) == {1}


def test_batches_hold_the_packs_they_name(rich, poor):
    outs = [rich, poor]
    for batch in PackStream([(rich.path, 1), (poor.path, 2)], batch_packs=3, align=2):
        expected = slow_batch([outs[output].packs[pack] for output, pack in batch.pack_indices], align=2)
        assert batch.input_ids.tolist() == expected["input_ids"]
        assert batch.labels.tolist() == expected["labels"]


def test_ranks_share_the_mixture(rich, poor):
    mix = [(rich.path, 0.4), (poor.path, 0.6)]
    assert global_steps(ranks_of(mix, 4, batch_packs=2)) == global_steps(ranks_of(mix, 2, batch_packs=4))


@pytest.mark.parametrize("step", [0, 1, 7, 20])
def test_resume_is_exact_and_keeps_the_achieved_shares(rich, poor, step):
    mix = [(rich.path, 0.4), (poor.path, 0.6)]
    whole = PackStream(mix, batch_packs=2)
    expected = steps_of(whole)
    stopped = PackStream(mix, batch_packs=2)
    assert steps_of(islice(stopped, step)) == expected[:step]
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = ranks_of(mix, 2, threads=0)
    for stream in resumed:
        stream.load_state_dict(state)
    assert global_steps(resumed) == expected[step:]
    assert resumed[0].shares() == whole.shares() == resumed[1].shares()


def test_epochs_differ_and_outputs_are_shuffled_apart(rich, poor):
    mix = [(rich.path, 0.5), (poor.path, 0.5)]
    stream = PackStream(mix, unit="packs")
    first, second = steps_of(stream), steps_of(stream)
    assert first != second
    assert [step[0][0] for step in first] == [step[0][0] for step in second]


def test_other_shares_refuse_the_state(rich, poor):
    state = PackStream([(rich.path, 0.5), (poor.path, 0.5)]).state_dict()
    with pytest.raises(StateError, match=r"shares \[0.5, 0.5\], this stream \[0.4, 0.6\]"):
        PackStream([(rich.path, 0.4), (poor.path, 0.6)]).load_state_dict(state)
    with pytest.raises(StateError):
        PackStream(rich.path).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"fingerprint": "b" * 64}, "tokenizer"), ({"seq_len": 32}, "seq_len"), ({"align": 4}, "align")],
)
def test_outputs_that_differ_cannot_be_mixed(rich, tmp_path, options, what):
    other = write_output(tmp_path / "o", [4], **options)
    with pytest.raises(FormatError, match=f"cannot be mixed: {what}"):
        PackStream([(rich.path, 1), (other.path, 1)])


def test_mixtures_that_make_no_sense_are_refused(rich, poor, tmp_path):
    with pytest.raises(ConfigError, match="above 0"):
        PackStream([(rich.path, 1), (poor.path, 0)])
    with pytest.raises(ConfigError, match="given twice"):
        PackStream([(rich.path, 1), (rich.path, 2)])
    with pytest.raises(ConfigError, match="empty"):
        PackStream([])
    with pytest.raises(ConfigError, match="pairs"):
        PackStream([rich.path, poor.path])


def test_one_output_with_a_share_is_a_mixture_of_one(rich):
    stream = PackStream([(rich.path, 2.0)])
    steps = steps_of(stream)
    assert len(steps) == 40
    assert sorted(pack for step in steps for pack in step) == [(0, i) for i in range(40)]
    assert stream.shares() == {rich.path: 1.0}
