"""Each assertion passes on what is right and is seen failing on every way to be wrong."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from transformers import AutoModelForCausalLM, LlamaConfig

import packsvc.testing
from packsvc.errors import ConfigError
from packsvc.probe import Call, inputs_of, random_pack
from packsvc.testing import (
    DAMAGES,
    assert_boundaries,
    assert_isolated,
    assert_mask,
    packed_batches,
    packs,
    segment_lengths,
)

ASSERTIONS = {"assert_boundaries": assert_boundaries, "assert_mask": assert_mask}


@pytest.fixture(scope="module")
def model() -> Iterator[torch.nn.Module]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    yield AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=96, **size), attn_implementation="sdpa").train()
    torch.set_num_threads(threads)


@given(packed_batches(min_segments=1))
def test_right_batches_pass(batch):
    assert_boundaries(batch)
    assert_mask(batch)
    assert_mask(batch.hf())


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_seen_by_its_assertion(name):
    damage, pack = DAMAGES[name], random_pack(vocabulary=96)
    before = {key: getattr(pack, key).clone() for key in ("labels", "cu_seqlens", "position_ids")}
    with pytest.raises(AssertionError):
        ASSERTIONS[damage.seen_by](damage.apply(pack))
    assert all(torch.equal(getattr(pack, key), value) for key, value in before.items())
    ASSERTIONS[damage.seen_by](pack)


@given(packed_batches(min_segments=2, max_tokens=24))
@settings(max_examples=5)
def test_an_isolated_model_passes(model, batch):
    assert_isolated(model, batch)
    assert_isolated(model, batch.hf())


@pytest.mark.parametrize("call", [Call.LOOP, Call.ALL_ONES_MASK, Call.BOUNDARIES])
def test_a_call_that_leaks_fails(model, call):
    leaking = inputs_of(call, random_pack(vocabulary=96), dtype=torch.float32).arguments
    with pytest.raises(AssertionError, match=r"leak .*replacing one example changes logits of others"):
        assert_isolated(model, leaking)


def test_two_rows_with_positions_are_judged_by_their_rows(model):
    rows = inputs_of(Call.BATCH2, random_pack(vocabulary=96), dtype=torch.float32).arguments
    assert_isolated(model, rows)
    with pytest.raises(AssertionError, match="leak"):
        assert_isolated(model, {**rows, "attention_mask": torch.ones_like(rows["input_ids"])})


def test_segments_may_be_said_outright_and_must_be_said_somehow(model):
    ids = inputs_of(Call.IDS_ONLY, random_pack(vocabulary=96), dtype=torch.float32).arguments
    with pytest.raises(AssertionError, match="leak"):
        assert_isolated(model, ids, lengths=[7, 12, 9])
    with pytest.raises(ConfigError, match="lengths"):
        assert_isolated(model, ids)
    with pytest.raises(ConfigError, match="2 x 28"):
        assert_isolated(model, {**ids, "input_ids": ids["input_ids"].repeat(2, 1)}, lengths=[7, 12, 9])
    with pytest.raises(ConfigError, match="nothing to keep apart"):
        assert_isolated(model, ids, lengths=[28])


def test_wrong_labels_show_in_the_loss(model):
    """Labels that are shifted already are shifted again by the model: silently another loss, unless it is compared."""
    batch = DAMAGES["labels_shifted"].apply(random_pack(vocabulary=96))
    with pytest.raises(AssertionError, match="the label is not the token itself"):
        assert_mask(batch.hf())


class Letters:
    """A tokenizer whose token 3 is "a", 4 is "b", ..."""

    def decode(self, ids):
        return "".join(chr(ord("a") + i - 3) for i in ids)


def test_the_trained_text_is_compared_word_by_word():
    pack = random_pack(vocabulary=29, lengths=(4, 6))
    words = [Letters().decode(pack.input_ids[a:b].tolist()) for a, b in ((2, 4), (7, 10))]
    assert_mask(pack, tokenizer=Letters(), trained=words)
    assert_mask(pack, tokenizer=Letters(), trained=[[word] for word in words])
    with pytest.raises(AssertionError, match=f"segment 1 trains '{words[1]}', expected 'other'"):
        assert_mask(pack, tokenizer=Letters(), trained=[words[0], "other"])
    with pytest.raises(AssertionError, match="2 segments, trained names 1"):
        assert_mask(pack, tokenizer=Letters(), trained=words[:1])
    with pytest.raises(ValueError, match="give the tokenizer too"):
        assert_mask(pack, trained=words)


@given(packs(seq_len=16, max_examples=8))
def test_packs_of_a_shard_obey_the_format(columns):
    assert columns.input_ids.shape == (columns.num_packs, 16)
    for i in range(columns.num_packs):
        cu = columns.cu_seqlens[columns.cu_offsets[i] : columns.cu_offsets[i + 1]]
        assert cu[0] == 0
        assert cu[-1] == 16
        assert (np.diff(cu) > 0).all()
        assert not columns.loss_mask[i][cu[:-1]].any()


@given(segment_lengths(max_tokens=20, min_segments=3, max_segments=5))
def test_lengths_fit(lengths):
    assert 3 <= len(lengths) <= 5
    assert sum(lengths) <= 20
    assert min(lengths) >= 2


def test_the_ten_lines_of_the_documentation_run(model):
    """The code in the room's docstring, as it stands there."""
    text = packsvc.testing.__doc__
    block = text[text.index("    from hypothesis") : text.index("`assert_mask(batch, tokenizer")]
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 10
    clean, leaking = {"collate": lambda batch: batch.hf()}, {"collate": with_ones}
    for scope in (clean, leaking):
        scope["model"] = model
        exec(textwrap.dedent(block), scope)
    settings(max_examples=3)(clean["test_my_batches_stay_apart"])()
    with pytest.raises(AssertionError, match="leak"):
        settings(max_examples=1, phases=[Phase.generate])(leaking["test_my_batches_stay_apart"])()


def with_ones(batch):
    return {**batch.hf(), "attention_mask": torch.ones(1, len(batch.input_ids))}


def test_only_strategies_need_hypothesis(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError):
        packs()
    files = list(Path(packsvc.testing.__file__).parent.glob("*.py"))
    assert len(files) == 5
    for file in files:
        top = [node for node in ast.parse(file.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not any("hypothesis" in ast.unparse(node) for node in top)
