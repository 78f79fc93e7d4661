"""Does training on packs equal training on the same examples one by one? One JSON line for each trainer.

    python benchmarks/trainers.py [--folder DIR]

A tiny random Llama takes one optimizer step on eight packs: each trainer as its adapter sets it up, with gradient
accumulation, in one process and as two ranks under gloo. Beside it the same examples go through the model one by
one, each in a forward pass of its own, their losses summed and divided by the number of targets. float32 on the CPU.
`value` is the largest difference of any gradient, relative to the largest gradient; the losses stand beside it.
The control is the same packs handed over without their boundaries: it must differ, or the check would be blind.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from packsvc import Manifest, PackStream
from packsvc.attention import register
from packsvc.export import export_dataset

PACKS, SEQ_LEN, VOCABULARY = 8, 64, 200
GOAL = 1e-5
Gradients = list[torch.Tensor]


# --- the data, the model, the examples one by one ---------------------------------------------------------------------


def write_packs(folder: Path) -> str:
    """An output of eight packs of random segments of unlike lengths, some with few targets and some with many."""
    from packsvc.assemble import assemble
    from packsvc.plan import place
    from packsvc.shards import PACK_KEYS, TOTAL_KEYS, ShardEntry, ShardMeta, shard_file_name, shard_name, write_shard
    from packsvc.types import Counts, EncodedBatch, TokenizerFacts

    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 40, 60)
    placement = place(lengths, SEQ_LEN, seed=0)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    trained = rng.random(int(offsets[-1])) < np.repeat(rng.choice([0.1, 0.9], len(lengths)), lengths)
    trained[offsets[1:] - 1] = True
    trained[offsets[:-1]] = False
    zeros = np.zeros(len(lengths), dtype=np.int32)
    batch = EncodedBatch(
        input_ids=rng.integers(5, VOCABULARY, int(offsets[-1]), dtype=np.int32),
        loss_mask=trained,
        loss_weight=None,
        offsets=offsets,
        file=zeros,
        row=np.arange(len(lengths), dtype=np.int64),
        part=zeros,
        split=zeros.astype(np.int16),
        rejects=[],
        counts=Counts(),
    )
    packs = assemble(batch, placement, start=0, stop=PACKS, seq_len=SEQ_LEN, pad_id=0)
    name = shard_name("train", 0, 0)
    meta = ShardMeta(plan_id="0" * 64, seq_len=SEQ_LEN, shard=name)
    data = write_shard([packs], meta=meta, compression="zstd:1", loss_weights=False)
    digest = hashlib.sha256(data).hexdigest()
    counts = {
        "packs": PACKS,
        "segments": int(packs.num_segments.sum()),
        "tokens": int(packs.num_tokens.sum()),
        "loss_tokens": int(packs.num_loss_tokens.sum()),
    }
    shard = ShardEntry(
        path=shard_file_name(name, digest),
        split="train",
        size_bytes=len(data),
        sha256=digest,
        **{f"num_{key}": n for key, n in counts.items()},
    )
    split = dict.fromkeys(PACK_KEYS, 0) | counts
    manifest = Manifest(
        name="trainers",
        packsvc_version="0",
        plan_id="0" * 64,
        seq_len=SEQ_LEN,
        align=1,
        seed=0,
        config={},
        versions={},
        tokenizer=TokenizerFacts(
            id="none",
            revision=None,
            fingerprint="0" * 64,
            files_sha256={},
            template_sha256="",
            vocab_size=VOCABULARY,
            pad_id=0,
            stop_ids=[2],
            backend="none",
        ),
        inputs=(),
        shards=(shard,),
        rejects=(),
        totals=dict.fromkeys(TOTAL_KEYS, 0) | {"rejected_by_reason": {}} | counts,
        splits={"train": split},
        sources={},
    )
    (folder / "shards").mkdir(parents=True)
    (folder / shard.path).write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps(manifest.to_json()))
    return str(folder)


def tiny_llama(attention: str) -> Any:
    """The same weights every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        initializer_range=0.1,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def one_by_one(out: str, *, weighted: bool = False) -> tuple[float, Gradients]:
    """Loss and gradients of every example in a forward pass of its own, no packing anywhere near."""
    model = tiny_llama("eager")
    with PackStream(out, shuffle=False, rank=0, world_size=1) as stream:
        batches = list(stream)
    count = sum(batch.num_loss_tokens for batch in batches)
    total = 0.0
    for batch in batches:
        ids, labels = batch.input_ids.long(), batch.labels.long()
        for start, stop in pairwise(batch.cu_seqlens.tolist()):
            logits = model(input_ids=ids[None, start:stop], use_cache=False).logits[0, :-1]
            losses = cross_entropy(logits, labels[start + 1 : stop], reduction="none")
            if weighted and batch.loss_weights is not None:
                losses = losses * batch.loss_weights[start + 1 : stop]
            loss = losses.sum() / count
            torch.autograd.backward(loss)
            total += float(loss.detach())
    return total, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


class Recorder(torch.optim.SGD):
    """An optimizer that only remembers the gradients of its first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen: Gradients = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.seen:
            self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]


# --- each trainer, one optimizer step ---------------------------------------------------------------------------------


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def micro_batches(batch_packs: int) -> int:
    """How many batches each rank accumulates to have seen all packs."""
    return PACKS // batch_packs // world()


def plain_loop(out: str, scratch: Path) -> tuple[float, Gradients]:
    from packsvc.trainers import accumulate, backward

    model: Any = tiny_llama(register())
    optimizer = Recorder(model.parameters())
    if world() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    with PackStream(out, batch_packs=2) as stream:
        for batches in accumulate(stream, micro_batches(2)):
            step = backward(model, batches)
            optimizer.step()
    return step.mean(), optimizer.seen


def accelerate_loop(out: str, scratch: Path) -> tuple[float, Gradients]:
    from accelerate import Accelerator

    from packsvc.trainers import accelerated_backward, accumulate

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches(2))
    recorder = Recorder((model := tiny_llama(register())).parameters())
    model, optimizer = accelerator.prepare(model, recorder)
    with PackStream(out, batch_packs=2, rank=accelerator.process_index, world_size=accelerator.num_processes) as stream:
        for batches in accumulate(stream, micro_batches(2)):
            step = accelerated_backward(accelerator, model, batches)
            optimizer.step()
    return step.mean(), recorder.seen


ARGUMENTS: dict[str, Any] = {
    "num_train_epochs": 1,
    "report_to": "none",
    "use_cpu": True,
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "optim": "sgd",
    "bf16": False,  # TRL's default is on
}


def hf_trainer(out: str, scratch: Path) -> tuple[float, Gradients]:
    from transformers import TrainingArguments

    from packsvc.trainers import hf_trainer

    args = TrainingArguments(str(scratch / "hf"), gradient_accumulation_steps=micro_batches(2), **ARGUMENTS)
    model = tiny_llama(register())
    recorder = Recorder(model.parameters())
    stream = PackStream(out, batch_packs=2, rank=args.process_index, world_size=args.world_size)
    same = PackStream(out, batch_packs=2, rank=args.process_index, world_size=args.world_size)
    trainer = hf_trainer(stream, model=model, args=args, optimizers=(recorder, None), eval_dataset=same)
    loss = trainer.train().training_loss  # the recorder leaves the weights as they are
    evaluated = trainer.evaluate()["eval_loss"]
    if not math.isclose(evaluated, loss, rel_tol=1e-5):
        raise RuntimeError(f"the packs evaluated have a loss of {evaluated}, the step on all of them {loss}")
    return loss, recorder.seen


def trl_trainer(out: str, scratch: Path) -> tuple[float, Gradients]:
    from packsvc.trainers import sft_config, sft_trainer

    args = sft_config(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=micro_batches(2),
        **ARGUMENTS,
    )
    exported = scratch / "exported"
    if not exported.exists() and args.process_index == 0:
        export_dataset(out, str(exported), to="trl")
    if world() > 1:
        dist.barrier()
    model = tiny_llama(register())
    recorder = Recorder(model.parameters())
    trainer = sft_trainer(
        str(exported), model=model, args=args, optimizers=(recorder, None), processing_class=tiny_tokenizer()
    )
    return trainer.train().training_loss, recorder.seen


def tiny_tokenizer() -> Any:
    """TRL wants one for its pad token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="w0", eos_token="w2", unk_token="w1")


def without_boundaries(out: str, scratch: Path) -> tuple[float, Gradients]:
    """The control: the same rows, called as an unpacked row would be."""
    model = tiny_llama("sdpa")
    recorder = Recorder(model.parameters())
    with PackStream(out, batch_packs=2) as stream:
        batches = list(stream)
    count = sum(batch.num_loss_tokens for batch in batches)
    total = 0.0
    for batch in batches:
        logits = model(input_ids=batch.input_ids.long()[None], use_cache=False).logits[0, :-1]
        loss = cross_entropy(logits, batch.labels.long()[1:], reduction="sum") / count
        torch.autograd.backward(loss)
        total += float(loss.detach())
    recorder.step()
    return total, recorder.seen


TRAINERS: dict[str, tuple[str, Callable[[str, Path], tuple[float, Gradients]]]] = {
    "plain loop": ("torch", plain_loop),
    "accelerate": ("accelerate", accelerate_loop),
    "transformers Trainer": ("transformers", hf_trainer),
    "trl SFTTrainer": ("trl", trl_trainer),
}
"""By name: the library whose version is told, and how it takes a step."""


# --- the table --------------------------------------------------------------------------------------------------------


def difference(found: Gradients, wanted: Gradients) -> float:
    """The largest difference of any gradient, relative to the largest gradient."""
    assert len(found) == len(wanted) > 0
    scale = max(float(w.abs().max()) for w in wanted)
    return max(float((f - w).abs().max()) for f, w in zip(found, wanted, strict=True)) / scale


def measure(out: str, scratch: Path, *, control: bool, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """One row for each trainer (or those named), of as many ranks as run here."""
    loss_separate, wanted = one_by_one(out)
    for name in names or TRAINERS:
        library, run = TRAINERS[name]
        with contextlib.redirect_stdout(sys.stderr):  # trainers print their log there
            loss, gradients = run(out, scratch)
        yield row(name, library, loss, loss_separate, difference(gradients, wanted))
    if control:
        loss, gradients = without_boundaries(out, scratch)
        yield row("control: no boundaries", "torch", loss, loss_separate, difference(gradients, wanted))


def row(name: str, library: str, loss: float, loss_separate: float, gradient: float) -> dict[str, Any]:
    control = name.startswith("control")
    return {
        "benchmark": "trainers",
        "figure": "largest_gradient_difference",
        "trainer": name,
        "ranks": world(),
        "gradient_accumulation": micro_batches(2),
        "loss_packed": loss,
        "loss_separate": loss_separate,
        "value": gradient,
        "goal": 1e-2 if control else GOAL,
        "better": "higher" if control else "lower",
        "spread": [gradient, gradient],
        "unit": "ratio",
        "against": "the same examples one by one, float32 on the CPU",
        "version": f"{library} {importlib.metadata.version(library)}",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def on_two_ranks(out: str, scratch: Path, *, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of two processes under gloo."""
    answer = scratch / "rows.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, os.path.abspath(__file__), "--out", out, "--folder", str(scratch), "--answer", str(answer)]
    command += [f"--trainer={name}" for name in names]
    # Two ranks on few cores: threads of one would only wait for those of the other.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=environment)
    if done.returncode:
        raise RuntimeError(f"two ranks failed:\n{done.stderr[-4000:]}")
    return list(json.loads(answer.read_text()))


def as_rank(out: str, scratch: Path, answer: Path, names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    rows = list(measure(out, scratch, control=False, names=names))
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where files go; default a temporary folder")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--trainer", action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer is not None:
        as_rank(args.out, args.folder, args.answer, args.trainer)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        out = write_packs(folder / "out")
        for found in [*measure(out, folder, control=True), *on_two_ranks(out, folder)]:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
