"""`packsvc_varlen` in real model classes: packed equals alone, and what would leak is refused."""

from __future__ import annotations

import pytest
import torch

from packsvc.attention import register
from packsvc.errors import ConfigError

transformers = pytest.importorskip("transformers")

LENGTHS = [7, 12, 9]
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def build(name: str, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    return model.train()


def row(ids: torch.Tensor, lengths: list[int]) -> dict[str, object]:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": ids[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [{}, {"use_cache": False}, {"attention_mask": torch.ones(1, 28, dtype=torch.long)}])
def test_x2_x14_x22_packed_equals_alone_whatever_comes_along(family, extra):
    """A cache, a mask of ones or a window changes nothing; boundaries do the isolating."""
    model = build(family, **FAMILIES[family])
    ids = torch.randint(1, 97, (28,), generator=torch.Generator().manual_seed(1))
    packed = model(**row(ids, LENGTHS), **extra).logits[0]
    for start, length in zip([0, 7, 19], LENGTHS, strict=True):
        piece = ids[start : start + length]
        alone = model(**row(piece, [length])).logits[0]
        torch.testing.assert_close(packed[start : start + length], alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_our_attention_alone_equals_eager_alone(family):
    """One unpacked example: window, softcap and sinks mean what transformers' own attention means by them."""
    mine = build(family, **FAMILIES[family])
    ids = torch.randint(1, 97, (20,), generator=torch.Generator().manual_seed(2))
    theirs = transformers.AutoModelForCausalLM.from_config(mine.config, attn_implementation="eager")
    theirs.load_state_dict(mine.state_dict())
    expected = theirs.eval()(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(mine.eval()(**row(ids, [20])).logits[0], expected, rtol=0, atol=2e-5)


def test_replacing_one_example_changes_no_other_and_no_gradient_reaches_it():
    model = build("llama")
    ids = torch.randint(1, 97, (28,), generator=torch.Generator().manual_seed(3))
    other = ids.clone()
    other[:7] = (other[:7] + 1) % 96 + 1
    before, after = (model(**row(x, LENGTHS)).logits[0] for x in (ids, other))
    assert torch.equal(before[7:], after[7:])
    assert not torch.equal(before[:7], after[:7])
    inputs = row(ids, LENGTHS)
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    model(**inputs, inputs_embeds=embedded).logits[0, 7:].square().sum().backward()
    assert not embedded.grad[0, :7].any()
    assert embedded.grad[0, 7:].any()


def test_x1_a_batch_whose_boundaries_were_dropped_is_refused():
    model = build("llama")
    batch = row(torch.arange(1, 29), LENGTHS)
    for name in ("cu_seq_lens_q", "max_length_q"):
        missing = {key: value for key, value in batch.items() if key != name}
        with pytest.raises(ConfigError, match="no cu_seq_lens_q and max_length_q"):
            model(**missing)


def test_x14_positions_alone_are_no_boundaries():
    """Positions that restart isolate nothing by themselves: without offsets the batch is refused."""
    model = build("llama")
    batch = row(torch.arange(1, 29), LENGTHS)
    with pytest.raises(ConfigError):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    model(**batch)


def test_x4_boundaries_never_come_from_positions():
    """Positions that count on give the same isolation as positions that restart, in a model that ignores them."""
    model = build("gpt2", n_positions=64, n_embd=32, n_layer=2, n_head=4)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    batch = row(torch.arange(1, 29), LENGTHS)
    running = {**batch, "position_ids": torch.arange(28)[None]}
    assert torch.equal(model.eval()(**batch).logits, model(**running).logits)


def test_a_mask_with_zeros_is_refused():
    model = build("llama")
    mask = torch.ones(1, 28, dtype=torch.long)
    mask[0, -3:] = 0
    with pytest.raises(ConfigError, match="hides 3 tokens"):
        model(**row(torch.arange(1, 29), LENGTHS), attention_mask=mask)


def test_chunked_attention_is_refused_and_not_widened():
    text = {**SMALL, "attention_chunk_size": 4, "num_local_experts": 1, "intermediate_size_mlp": 48}
    model = build("llama4_text", **text)
    with pytest.raises(ConfigError, match="chunked"):
        model(**row(torch.arange(1, 29), LENGTHS))


def test_offsets_of_another_batch_are_refused():
    model = build("llama")
    batch = row(torch.arange(1, 29), LENGTHS)
    batch["cu_seq_lens_q"] = torch.tensor([0, 7, 19], dtype=torch.int32)
    with pytest.raises(ConfigError, match="rise from 0 to 28"):
        model(**batch)


def test_two_rows_with_offsets_over_both_stay_apart():
    model = build("llama")
    ids = torch.randint(1, 97, (28,), generator=torch.Generator().manual_seed(4))
    lengths = [7, 7, 9, 5]
    one = model(**row(ids, lengths)).logits[0]
    batch = row(ids, lengths)
    two = {key: value.view(2, 14) if key.endswith("_ids") else value for key, value in batch.items()}
    torch.testing.assert_close(model(**two).logits.flatten(0, 1), one, rtol=0, atol=2e-5)
