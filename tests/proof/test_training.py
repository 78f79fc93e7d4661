"""The training proof in short: with the leak a model copies across examples, with packsvc it stays at chance."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from tests.encode.toys import english, save

FOLDER = Path(__file__).resolve().parents[2] / "pipelines" / "proof"
STEPS = 160
NUM_PAIRS = 16 * (STEPS + 2)
CURVES = ([0, 10], [4.0, 1.0], [0.0, 1.0], [4.0, 3.5], [4.0, 5.0])


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """pipelines/proof/train.py, as it runs: beside its neighbours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(FOLDER))
    import train

    yield train
    sys.path.remove(str(FOLDER))
    for name in ("train", "figures", "plot"):
        sys.modules.pop(name, None)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def out(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pairs")
    toy = Path(save(english(), folder / "toy"))
    return script.make_packs(folder, num_pairs=NUM_PAIRS, seed=0, all_trained=False, tokenizer=toy)


def test_each_pack_holds_a_pair_with_one_answer(script, out):
    seen = 0
    for batch in script.packsvc.PackStream(out, rank=0, world_size=1):
        pair = batch.input_ids.view(2, script.LENGTH)
        assert torch.equal(pair[0, -script.ANSWER_WORDS :], pair[1, -script.ANSWER_WORDS :])
        assert batch.num_loss_tokens == 2 * script.ANSWER_WORDS
        seen += 1
    assert seen == NUM_PAIRS


def test_steps_without_fresh_packs_are_refused(script, out):
    with pytest.raises(ValueError, match="not enough"):
        script.train(out, run="leak", steps=STEPS + 1, seed=0)


@pytest.mark.slow
def test_the_leak_copies_and_packsvc_cannot(script, out):
    leak, ours = (script.train(out, run=run, steps=STEPS, seed=0, every=STEPS) for run in ("leak", "packsvc"))
    assert leak.second_answer[-1] < 2.5
    assert leak.copied[-1] > 0.5
    assert leak.first_answer[-1] > script.FLOOR - 0.2
    assert ours.second_answer[-1] > script.FLOOR - 0.2
    assert ours.copied[-1] < 0.15
    assert ours.prompt[-1] >= ours.prompt[0]


def test_the_plot_is_well_formed(script):
    tree = ElementTree.fromstring(script.picture({run: [script.Curves(*CURVES)] for run in script.RUNS}))
    assert tree.tag.endswith("svg")
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}path"))) >= 4


def test_the_figures_are_lines_of_the_benchmarks(script, capsys):
    script.report({run: [script.Curves(*CURVES)] for run in script.RUNS}, 10)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    keys = {
        "benchmark",
        "figure",
        "value",
        "goal",
        "better",
        "spread",
        "unit",
        "against",
        "version",
        "hardware",
        "date",
    }
    assert len(lines) == 6
    assert all(set(line) == keys and line["benchmark"] == "proof" for line in lines)
