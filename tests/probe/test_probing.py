"""The probe by parts: figures, verdicts, packs of an output, models made small from a config, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from packsvc.cli import main
from packsvc.errors import ConfigError, FormatError
from packsvc.probe import (
    Call,
    Figures,
    Limits,
    Verdict,
    judge,
    open_model,
    position_findings,
    probe_call,
    probe_model,
    random_pack,
)
from packsvc.probe.measuring import replaced, without_dropout
from packsvc.probe.models import context_notes, from_config
from packsvc.probe.packs import shortest
from packsvc.probe.shrinking import shrunk
from tests.probe.families import BASE, FAMILIES, tiny
from tests.validation.outputs import make_output

GOOD = Figures(
    changed=0.0,
    seen=1.0,
    gradient=0.0,
    own_gradient=1.0,
    alone=1e-7,
    spread=1.0,
    loss=4.0,
    loss_alone=4.0,
    num_targets=9,
)
STRICT = Limits(changed=0.0, alone=1e-4, loss=1e-6)


@pytest.mark.parametrize(
    ("change", "verdict", "check"),
    [
        ({}, "clean", None),
        ({"changed": 1e-9}, "leak", "perturbation"),
        ({"changed": float("nan")}, "leak", "perturbation"),
        ({"gradient": 1e-12}, "leak", "gradient"),
        ({"alone": 0.2}, "wrong", "alone"),
        ({"loss": 4.1}, "wrong", "loss"),
        ({"loss": None}, "clean", None),
        ({"seen": 0.0}, "blind", "control"),
        ({"own_gradient": 0.0}, "blind", "control"),
        ({"alone": float("nan")}, "blind", "control"),
    ],
)
def test_each_check_decides(change, verdict, check):
    found, failed, why = judge(replace(GOOD, **change), STRICT)
    assert found == verdict
    assert failed == (() if check is None else (check,))
    assert bool(why) == (check is not None)


def test_where_kernels_round_a_small_change_is_let_pass_and_a_gradient_is_not():
    rounding = replace(STRICT, changed=1e-3)
    assert judge(replace(GOOD, changed=1e-4), rounding)[0] is Verdict.CLEAN
    assert judge(replace(GOOD, changed=1e-2), rounding)[0] is Verdict.LEAK
    assert judge(replace(GOOD, gradient=1e-9), rounding)[0] is Verdict.LEAK


def test_every_token_is_replaced_by_another_word():
    ids = torch.arange(96).repeat(2, 20)
    other = replaced(ids, 96, seed=0)
    assert not (ids == other).any()
    assert int(other.min()) >= 3
    assert int(other.max()) < 96
    assert torch.equal(other, replaced(ids, 96, seed=0))


def test_a_model_that_sees_nothing_is_blind():
    probed = tiny("llama")
    with torch.no_grad():
        probed.model.lm_head.weight.zero_()
    assert probe_call(probed, Call.HF_TRAINER, random_pack(vocabulary=96)).verdict is Verdict.BLIND


def test_dropout_is_off_meanwhile_and_back_afterwards():
    config = AutoConfig.for_model("gpt2", **BASE, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    ids = torch.arange(3, 20)[None]
    with without_dropout(model), torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_positions_are_judged_by_themselves():
    """Rotary positions that run on change no logit, so that only this check sees them."""
    pack = random_pack(vocabulary=96)
    assert position_findings(pack) == []
    wrong = replace(pack, position_ids=torch.arange(28, dtype=torch.int32))
    assert position_findings(wrong) == ["position_ids has 7 at token 7, cu_seqlens says 0"]
    result = probe_call(tiny("llama", "packsvc_varlen"), Call.HF_TRAINER, wrong)
    assert (result.verdict, result.failed) == (Verdict.WRONG, ("positions",))


def test_learned_positions_that_run_on_change_the_example():
    wrong = replace(random_pack(vocabulary=96), position_ids=torch.arange(28, dtype=torch.int32))
    assert "alone" in probe_call(tiny("gpt2", "packsvc_varlen"), Call.HF_TRAINER, wrong).failed


def test_the_shortest_segments_of_a_batch_are_kept_in_order():
    batch = random_pack(vocabulary=96, lengths=(9, 1, 600, 5, 700, 4, 8))
    small = shortest(batch)
    assert small.cu_seqlens.diff().tolist() == [9, 5, 4, 8]
    assert torch.equal(small.input_ids[:9], batch.input_ids[:9])
    assert shortest(random_pack(vocabulary=96, lengths=(600, 5))).cu_seqlens.diff().tolist() == [512, 5]


@pytest.mark.parametrize("family", ["mistral", "llama4", "gpt_oss", "qwen3_5", "deepseek_v3"])
def test_a_config_of_any_size_gives_a_small_model_with_all_its_kinds_of_layers(family):
    kind, changes = FAMILIES[family]
    big = {"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 4096, "vocab_size": 50_000}
    big |= {"sliding_window": 1024} if "sliding_window" in changes else {}
    big |= {"layer_types": changes["layer_types"] * 4} if "layer_types" in changes else {}
    big |= {"no_rope_layers": changes["no_rope_layers"] * 4} if "no_rope_layers" in changes else {}
    config = AutoConfig.for_model(kind, **{**BASE, **changes, **big})
    smallest = next(shrunk(config))
    assert smallest.num_hidden_layers == 2
    assert set(getattr(smallest, "layer_types", None) or []) == set(getattr(config, "layer_types", None) or [])
    model, note = from_config(config, "eager", family)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert type(model).__name__ in note


def test_a_rope_that_looks_at_the_whole_row_is_named():
    config = AutoConfig.for_model(
        "llama", **BASE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    assert "beyond 64 tokens" in context_notes(config)[0]
    assert context_notes(AutoConfig.for_model("llama", **BASE)) == []


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_output(tmp_path_factory.mktemp("packed"), rows=20)


def test_packs_of_an_output_are_probed(model_path, out):
    """Its ids are beyond this small vocabulary: an error for real weights, folded for a model from a config."""
    with pytest.raises(ConfigError, match="another tokenizer"):
        probe_model(model_path, dataset=out)
    report = probe_model(model_path, dataset=out, config_only=True, calls=["hf_trainer", "loop"])
    assert [result.verdict for result in report.results] == ["clean", "leak"]
    assert len(report.lengths) >= 2
    assert report.dataset == str(out)


def test_what_is_no_output_is_refused(model_path, tmp_path):
    with pytest.raises(FormatError):
        probe_model(model_path, dataset=tmp_path / "nothing")


def test_a_model_that_cannot_be_read_says_what_is_missing(model_path, tmp_path):
    with pytest.raises(ConfigError, match="no config"):
        open_model(tmp_path)
    with pytest.raises(ConfigError, match="it must be a torch dtype"):
        open_model(model_path, dtype="float99")
    (tmp_path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="cannot be loaded"):
        open_model(tmp_path)
    assert open_model(tmp_path, config_only=True).model.training


def run(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        main(["probe", *map(str, args)])
    return ended.value.code or 0, capsys.readouterr()


@pytest.fixture(autouse=True)
def _leave_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *rest: None)


def test_the_command_ends_with_1_on_a_leak_2_for_no_model_and_0_when_clean(capsys, model_path, tmp_path):
    code, shown = run(capsys, "--model", model_path)
    assert code == 1
    assert "does NOT keep examples apart: clean as hf_trainer, batch2; leak as loop, all_ones_mask" in shown.out
    assert "hand over use_cache=False" in shown.out
    assert run(capsys, "--model", model_path, "--call", "hf_trainer")[0] == 0
    assert run(capsys, "--model", model_path, "--attn", "packsvc_varlen")[0] == 0
    code, shown = run(capsys, "--model", tmp_path / "nothing")
    assert code == 2
    assert "no config of a model" in shown.err
    code, shown = run(capsys, "--model", model_path, "--call", "shout")
    assert code == 2
    assert "known are hf_trainer, loop" in shown.err


def test_json_has_every_call_with_its_figures(capsys, model_path):
    code, shown = run(capsys, "--model", model_path, "--config-only", "--call", "all", "--json")
    report = json.loads(shown.out)
    assert code == 1
    assert report["ok"] is False
    assert [line["call"] for line in report["calls"]] == list(Call)
    leak = next(line for line in report["calls"] if line["call"] == "loop")
    assert leak["verdict"] == "leak"
    assert leak["figures"]["changed"] > 0.1
    assert leak["failed"] == ["perturbation", "gradient"]
    clean = report["calls"][0]
    assert clean["figures"]["changed"] == clean["figures"]["gradient"] == 0


def test_flash_attention_that_is_not_installed_has_a_stand_in_that_is_named(model_path):
    report = probe_model(model_path, attn="flash_attention_2", calls=["hf_trainer", "batch2"])
    assert [result.verdict for result in report.results] == ["clean", "leak"]
    assert any("stand-in" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "jamba"])
def test_published_sizes_are_made_small(kind):
    """671 billion parameters as the config says them; the smallest model that works is made, never the whole one."""
    model, _ = from_config(AutoConfig.for_model(kind), "eager", kind)
    assert sum(p.numel() for p in model.parameters()) < 10_000_000
