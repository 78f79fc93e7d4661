"""Failures of other tools that the probe must name, each in its smallest form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from packsvc.attention import varlen_attention
from packsvc.probe import Call, ProbedModel, Verdict, inputs_of, probe_call, random_pack
from packsvc.probe.shrinking import spread_weights
from packsvc.testing import assert_isolated
from tests.probe.families import BASE

PACK = random_pack(vocabulary=96)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class OneLayer(torch.nn.Module):
    """A model of one's own: attention by boundaries, which a subclass reads or loses in its own way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(96, 16), torch.nn.Linear(16, 96)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def boundaries(self, arguments: dict[str, Any], total: int) -> torch.Tensor:
        return arguments.get("cu_seq_lens_q", torch.tensor([0, total], dtype=torch.int32))

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Output:
        x = self.embedding(input_ids[0])[:, None]
        cu = self.boundaries(arguments, len(x))
        x = x + varlen_attention(x, x, x, cu, int(cu.diff().max()))
        return Output(logits=self.head(x[:, 0])[None])


class MaskOverwrites(OneLayer):
    """A mask that a trainer adds by default takes the place of the caller's boundaries."""

    def boundaries(self, arguments, total):
        return super().boundaries({} if "attention_mask" in arguments else arguments, total)


class Nested(OneLayer):
    """Boundaries are looked for inside an argument of another name."""

    def boundaries(self, arguments, total):
        return super().boundaries(arguments.get("packing", {}), total)


class TwoStages(OneLayer):
    """A pipeline of two stages, of which the second gets the boundaries or does not."""

    def __init__(self, *, handed_on: bool) -> None:
        super().__init__()
        self.handed_on = handed_on

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Output:
        x = self.embedding(input_ids[0])[:, None]
        for stage in range(2):
            cu = self.boundaries(arguments if stage == 0 or self.handed_on else {}, len(x))
            x = x + varlen_attention(x, x, x, cu, int(cu.diff().max()))
        return Output(logits=self.head(x[:, 0])[None])


def probed(model: torch.nn.Module, attention: str = "its own") -> ProbedModel:
    return ProbedModel(name="mine", model=model, attention=attention, stand_in=False, config_only=True)


def test_a_model_of_ones_own_can_be_probed():
    model = OneLayer()
    assert_isolated(model, PACK)
    verdicts = [
        probe_call(probed(model), call, PACK).verdict for call in (Call.HF_TRAINER, Call.ALL_ONES_MASK, Call.POSITIONS)
    ]
    assert verdicts == ["clean", "clean", "leak"]


def test_x7_a_default_mask_that_overwrites_the_boundaries_is_a_leak():
    assert_isolated(MaskOverwrites(), PACK)
    assert probe_call(probed(MaskOverwrites()), Call.ALL_ONES_MASK, PACK).verdict is Verdict.LEAK


def test_x12_a_later_stage_without_the_boundaries_is_a_leak():
    assert_isolated(TwoStages(handed_on=True), PACK)
    with pytest.raises(AssertionError, match="leak"):
        assert_isolated(TwoStages(handed_on=False), PACK)


def test_x13_boundaries_that_the_model_does_not_read_are_a_leak():
    with pytest.raises(AssertionError, match="leak"):
        assert_isolated(Nested(), PACK)
    row = inputs_of(Call.HF_TRAINER, PACK, dtype=torch.float32).arguments
    assert_isolated(Nested(), {**row, "packing": {"cu_seq_lens_q": PACK.cu_seqlens}})


def test_x16_boundaries_one_token_off_leak():
    cu = PACK.cu_seqlens.clone()
    cu[1] += 1
    row = {**PACK.hf(), "cu_seq_lens_q": cu}
    with pytest.raises(AssertionError, match="leak"):
        assert_isolated(OneLayer(), row, lengths=PACK.cu_seqlens.diff().tolist())


def test_x6_a_family_that_counts_positions_from_2_is_named():
    config = AutoConfig.for_model("roberta", **{**BASE, "is_decoder": True, "pad_token_id": 1, "hidden_act": "gelu"})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    spread_weights(model)
    result = probe_call(probed(model, "sdpa"), Call.MASK_4D, PACK)
    assert result.verdict is Verdict.WRONG
    assert "differ by" in result.why
    assert "alone" in result.failed


def test_x25_the_proof_is_one_line_of_figures():
    """Changed by exactly nothing, and the control did see."""
    figures = probe_call(probed(OneLayer()), Call.HF_TRAINER, PACK).figures
    assert figures is not None
    assert (figures.changed, figures.gradient) == (0, 0)
    assert figures.seen > 0.1


def test_a_single_segment_shows_nothing_and_is_not_passed_off_as_clean():
    alone = random_pack(vocabulary=96, lengths=(9,))
    result = probe_call(probed(OneLayer()), Call.HF_TRAINER, replace(alone))
    assert result.verdict is Verdict.REFUSED
    assert "nothing to keep apart" in result.why
