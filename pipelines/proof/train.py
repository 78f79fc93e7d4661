"""Trains a small model on packs in which one example's answer stands in another, with the leak and without.

    python pipelines/proof/train.py [--steps 300] [--seeds 3] [--plot pipelines/proof/training.svg]

Each pack holds a pair: two examples with prompts of their own and the same random answer. Alone, an answer cannot be
known: its loss cannot fall below ln 32 = 3.47. Whoever sees the other example can copy it. Three runs, the same packs:

    leak          packs as rows with restarting positions and an attention_mask of ones, as a plain collate makes them
    packsvc       model(**batch.hf()) with packsvc_varlen; prompts are masked
    all_trained   the same, with loss on prompts too

Prompts are counting words (p, p+1, p+2, ...), which are easy to learn, so a mask that does not hold shows as a prompt
loss that falls. Prints one JSON line a figure.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from figures import emit
from plot import Panel, draw
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig

import packsvc
from packsvc.attention import register

TOKENIZER = Path(__file__).resolve().parent.parent / "quickstart" / "tokenizers" / "qwen3"
BEGIN, SEPARATOR, ANSWERS, PROMPTS = 3, 4, range(8, 40), range(40, 64)
PROMPT_WORDS, ANSWER_WORDS = 4, 6
LENGTH = 1 + PROMPT_WORDS + 1 + ANSWER_WORDS
BATCH_PACKS = 16
FLOOR = math.log(len(ANSWERS))
RUNS = ("leak", "packsvc", "all_trained")


def make_packs(folder: Path, *, num_pairs: int, seed: int, all_trained: bool, tokenizer: Path = TOKENIZER) -> str:
    """Write pairs of examples, neighbours in their file, and pack each pair into one pack.

    The ids are made here; any tokenizer that knows 64 of them will do.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "pairs.jsonl", "w") as file:
        for _ in range(num_pairs):
            answer = rng.choice(ANSWERS, ANSWER_WORDS).tolist()
            for _ in range(2):
                start = int(rng.integers(len(PROMPTS)))
                prompt = [PROMPTS[(start + i) % len(PROMPTS)] for i in range(PROMPT_WORDS)]
                ids = [BEGIN, *prompt, SEPARATOR, *answer]
                trained = 1 if all_trained else LENGTH - ANSWER_WORDS
                file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * trained + [1] * (LENGTH - trained)}) + "\n")
    job = packsvc.PackJob(
        name="pairs",
        tokenizer=str(tokenizer),
        sources=[{"path": str(folder / "pairs.jsonl"), "format": "pretokenized"}],
        seq_len=2 * LENGTH,
        packing={"strategy": "next_fit"},  # neighbours stay together: a pair is a pack
        output=str(folder / "out"),
    )
    packsvc.pack(job, workers=0)
    return str(folder / "out")


def new_model(*, seed: int, leak: bool) -> torch.nn.Module:
    torch.manual_seed(seed)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, **size)
    attention = "sdpa" if leak else register()
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def arguments_of(batch: packsvc.PackedBatch, *, leak: bool) -> dict[str, object]:
    """What the model is called with: our batch, or the same packs as rows with a mask of ones."""
    row = batch.hf()
    if not leak:
        return row
    rows = {name: row[name].view(-1, 2 * LENGTH) for name in ("input_ids", "labels", "position_ids")}
    return {**rows, "attention_mask": torch.ones_like(rows["input_ids"]), "use_cache": False}


@dataclass
class Curves:
    """Held-out figures over the steps."""

    steps: list[int] = field(default_factory=list)
    second_answer: list[float] = field(default_factory=list)
    """Loss on the answer whose twin stands before it in the pack."""
    copied: list[float] = field(default_factory=list)
    """Share of its words that the model gets right."""
    first_answer: list[float] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    """Loss on the prompts' words that follow from the one before."""


@torch.no_grad()
def look(model: torch.nn.Module, batch: packsvc.PackedBatch, *, leak: bool) -> dict[str, float]:
    """Losses by the place in the example, on packs that were not trained on."""
    logits = model(**arguments_of(batch, leak=leak)).logits.reshape(-1, 2, LENGTH, 64)
    ids = batch.input_ids.long().view(-1, 2, LENGTH)
    losses = cross_entropy(logits[:, :, :-1].transpose(1, -1).transpose(2, -1), ids[:, :, 1:], reduction="none")
    right = logits[:, :, :-1].argmax(-1) == ids[:, :, 1:]
    # What predicts the answer's words, counted from the example's second token.
    answer, prompt = slice(LENGTH - ANSWER_WORDS - 1, None), slice(1, PROMPT_WORDS)
    return {
        "first_answer": losses[:, 0, answer].mean().item(),
        "second_answer": losses[:, 1, answer].mean().item(),
        "copied": right[:, 1, answer].float().mean().item(),
        "prompt": losses[:, :, prompt].mean().item(),
    }


def train(out: str, *, run: str, steps: int, seed: int, every: int = 10) -> Curves:
    """One run, looked at every so many steps."""
    leak = run == "leak"
    stream = packsvc.PackStream(out, rank=0, world_size=1, batch_packs=BATCH_PACKS, seed=seed)
    held_out, *_ = islice(stream, 1)
    model, curves = new_model(seed=seed, leak=leak), Curves()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if len(stream) < steps + 2:
        raise ValueError(f"{len(stream)} batches are not enough for {steps} steps on packs that were never seen")
    for step, batch in enumerate(islice(after_first(stream), steps + 1)):
        if step % every == 0:
            curves.steps.append(step)
            for name, value in look(model.eval(), held_out, leak=leak).items():
                getattr(curves, name).append(value)
        model.train()(**arguments_of(batch, leak=leak)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return curves


def after_first(stream: packsvc.PackStream) -> Iterator[packsvc.PackedBatch]:
    """The epoch without its first batch, which is held out."""
    stream.set_epoch(0)
    yield from islice(stream, 1, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Curves]] = {run: [] for run in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for run in RUNS:
                pairs = (options.steps + 2) * BATCH_PACKS
                where = Path(folder) / f"{run == 'all_trained'}-{seed}"
                known = where / "out"
                out = (
                    str(known)
                    if known.exists()
                    else make_packs(where, num_pairs=pairs, seed=seed, all_trained=run == "all_trained")
                )
                found[run].append(train(out, run=run, steps=options.steps, seed=seed))
    report(found, options.steps)
    if options.plot is not None:
        options.plot.write_text(picture(found))


def report(found: dict[str, list[Curves]], steps: int) -> None:
    """Print the figures after the last step. Those of the leak have goals too: a proof that cannot fail is none."""
    known = f"an answer that cannot be known has loss ln {len(ANSWERS)} = {FLOOR:.3f}; {steps} steps"
    chance = f"chance is {1 / len(ANSWERS):.3f}; {steps} steps"
    before = f"the same model before its {steps} steps"

    def last(run: str, name: str) -> list[float]:
        return [getattr(curves, name)[-1] for curves in found[run]]

    def change(run: str) -> list[float]:
        return [curves.prompt[-1] - curves.prompt[0] for curves in found[run]]

    emit("leak_answer_loss", last("leak", "second_answer"), goal=1, better="lower", unit="nats", against=known)
    emit("leak_words_copied", last("leak", "copied"), goal=0.9, better="higher", unit="ratio", against=chance)
    emit("packsvc_answer_loss", last("packsvc", "second_answer"), goal=3.4, better="higher", unit="nats", against=known)
    emit("packsvc_words_copied", last("packsvc", "copied"), goal=0.1, better="lower", unit="ratio", against=chance)
    emit("prompts_masked_loss_change", change("packsvc"), goal=0, better="higher", unit="nats", against=before)
    emit("prompts_trained_loss_change", change("all_trained"), goal=-1, better="lower", unit="nats", against=before)


def picture(found: dict[str, list[Curves]]) -> str:
    def mean(run: str, name: str) -> list[tuple[float, float]]:
        values = np.mean([getattr(curves, name) for curves in found[run]], axis=0)
        return list(zip(found[run][0].steps, values.tolist(), strict=True))

    copying = Panel(
        title="Loss on an answer that stands in another example of its pack",
        lines={
            "with the leak: copied across": mean("leak", "second_answer"),
            "packsvc: it cannot": mean("packsvc", "second_answer"),
        },
        mark=("cannot be known: ln 32", FLOOR),
    )
    masking = Panel(
        title="Loss on prompt words",
        lines={"prompts masked": mean("packsvc", "prompt"), "prompts trained": mean("all_trained", "prompt")},
        mark=None,
    )
    return draw([copying, masking])


if __name__ == "__main__":
    main()
