"""The probe's verdicts on tiny random models of many families, for each way of calling.

One letter a way of calling, in the order of `Call`: hf_trainer, loop, batch2, all_ones_mask; no_seq_idx, positions,
boundaries; mask_4d, ids_only. c: clean, L: leak, w: wrong, r: refused (raises).
"""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from packsvc.attention import NAME
from packsvc.probe import Call, Verdict, inputs_of, probe_call, random_pack
from packsvc.probe.probing import dtype_of, figures_of, limits_for, with_advice
from packsvc.probe.verdicts import judge
from tests.probe import kernels
from tests.probe.families import FAMILIES, tiny

LETTERS = {Verdict.CLEAN: "c", Verdict.LEAK: "L", Verdict.WRONG: "w", Verdict.REFUSED: "r", Verdict.BLIND: "b"}

PLAIN = "cLcL ccL cL"
"""Isolated by positions, as long as neither a cache nor a mask of ones comes along."""
WINDOWED = "cLcL ccL wL"
"""The same; a ready mask takes the window away."""
ALWAYS = "LLLL LLL LL"
STATE_SPACE = "rrLr LLL LL"
"""Mamba-2 layers and short convolutions: without their kernels transformers refuses boundaries, and leaks without."""
DELTA_RULE = "rrLr rLr LL"

EAGER = {
    **dict.fromkeys(["llama", "qwen2", "qwen3", "phi3", "glm4", "gpt_neox", "nemotron", "stablelm", "gpt2"], PLAIN),
    **dict.fromkeys(["qwen3_moe", "mixtral", "deepseek_v3"], PLAIN),
    **dict.fromkeys(["mistral", "olmo3", "gemma2", "gemma3", "gemma4", "llama4"], WINDOWED),
    "gpt_oss": "LLLL LLL wL",
    "opt": "LLLL LLL cL",
    "bloom": "LLLL LLL rL",
    "mamba": "LLLL LLL rL",
    "mamba2": ALWAYS,
    "jamba": ALWAYS,
    **dict.fromkeys(["bamba", "falcon_h1", "granitemoehybrid", "lfm2"], STATE_SPACE),
    **dict.fromkeys(["qwen3_next", "qwen3_5"], DELTA_RULE),
}
SDPA = {"llama": PLAIN, "mistral": WINDOWED, "llama4": WINDOWED, "opt": "LLLL LLL cL"}
FLASH = {
    **dict.fromkeys(["llama", "gemma2", "gpt_oss", "deepseek_v3"], "ccLc ccc rL"),
    "nemotron": "ccLc ccL rL",
    "opt": "ccLc ccw rL",
    "llama4": "rrrr rrr rr",
    "qwen3_5": "rrLr rLr rL",
}
OURS = {
    **dict.fromkeys(["llama", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3"], "ccrc crc rr"),
    "opt": "ccrc crw rr",
    "nemotron": "rrrr rrr rr",
    "llama4": "rrrr rrr rr",
    "bloom": "LLLL LLL rL",
    "mamba": "LLLL LLL rL",
}
CASES = [
    (attn, family, expected)
    for attn, table in (("eager", EAGER), ("sdpa", SDPA), ("flash_attention_2", FLASH), (NAME, OURS))
    for family, expected in table.items()
]
GUARDED = Version(transformers.__version__) >= Version("5.23")
"""Before, hybrids without their kernels took boundaries and leaked."""


@pytest.mark.parametrize(("attn", "family", "expected"), CASES, ids=[f"{f}-{a}" for a, f, _ in CASES])
def test_every_way_of_calling_gets_its_verdict(attn, family, expected):
    """X2, X9, X14, X22."""
    if "r" in expected and not GUARDED:
        pytest.skip(f"transformers {transformers.__version__} does not refuse yet")
    probed, pack = tiny(family, attn), random_pack(vocabulary=96)
    found = "".join(LETTERS[probe_call(probed, call, pack).verdict] for call in Call)
    assert found == expected.replace(" ", "")


def test_the_table_covers_every_kind_of_family():
    assert len(EAGER) >= 20
    assert set(EAGER) <= set(FAMILIES)


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "bamba", "qwen3_5"])
def test_x9_with_kernels_hybrids_are_clean_when_all_boundaries_are_handed_over(family, monkeypatch):
    probed, pack = tiny(family), random_pack(vocabulary=96)
    installed = kernels.install(probed.model, monkeypatch)
    assert installed
    verdicts = [probe_call(probed, call, pack).verdict for call in (Call.HF_TRAINER, Call.NO_SEQ_IDX, Call.POSITIONS)]
    assert verdicts == ["clean", "leak", "leak"]


def test_kernels_do_not_help_where_the_attention_beside_them_leaks(monkeypatch):
    """Granite's hybrid makes its eager masks without positions; its flash path takes the boundaries."""
    pack = random_pack(vocabulary=96)
    for attn, expected in (("eager", "leak"), ("flash_attention_2", "clean")):
        probed = tiny("granitemoehybrid", attn)
        kernels.install(probed.model, monkeypatch)
        assert probe_call(probed, Call.HF_TRAINER, pack).verdict == expected


def test_a_hybrid_needs_both_kinds_of_boundaries(monkeypatch):
    """Gated DeltaNet takes cu_seq_lens for its rule and seq_idx for its convolution; one of them still leaks."""
    probed, pack = tiny("qwen3_5"), random_pack(vocabulary=96)
    kernels.install(probed.model, monkeypatch)
    inputs = inputs_of(Call.HF_TRAINER, pack, dtype=dtype_of(probed.model))
    for lost in ("seq_idx", "cu_seq_lens_q"):
        without = {name: value for name, value in inputs.arguments.items() if name != lost}
        figures = figures_of(probed.model, type(inputs)(arguments=without, segments=inputs.segments), attention="eager")
        assert judge(figures, limits_for(probed.model))[0] is Verdict.LEAK


def advice_on(family, call, attn="eager"):
    probed, pack = tiny(family, attn), random_pack(vocabulary=96)
    (result,) = with_advice(probed, pack, [probe_call(probed, call, pack)], seed=0)
    return result.advice


def test_advice_names_what_was_seen_to_help():
    """gpt-oss builds its eager masks without positions; with boundaries handed to its attention it is clean."""
    assert 'attn_implementation="packsvc_varlen"' in advice_on("gpt_oss", Call.HF_TRAINER)
    assert "use_cache=False" in advice_on("llama", Call.LOOP)
    assert "leave attention_mask out" in advice_on("llama", Call.ALL_ONES_MASK)
    assert "one row" in advice_on("llama", Call.BATCH2, "flash_attention_2")
    assert "carries state over boundaries" in advice_on("mamba", Call.HF_TRAINER)
    assert "train one example a row" in advice_on("bloom", Call.HF_TRAINER)
