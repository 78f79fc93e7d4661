"""A packed output of real encoded conversations, with its sources beside it, made without a run."""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from packsvc.config import PackJob, parse_job
from packsvc.encode import load_encoder, merge_batches
from packsvc.sources import (
    InputCount,
    copies,
    count_input,
    cut_input,
    list_inputs,
    passes,
    read_example,
    read_piece,
    recognise,
    sample_rows,
)
from packsvc.types import Counts, InputFile, Reject
from tests.validation.outputs import write_output

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCE = (
    "the pack holds whole examples and a mask that never lies about what 日本語 a model must learn: naïve 👍🏽 €5"
)
WORDS = [*SENTENCE.split(), "\n"]


def conversation(rng: random.Random, *, weights: bool) -> dict[str, Any]:
    """A chat of one or two exchanges; sometimes a weight, sometimes one with nothing to say."""
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 2)):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))})
        answer: dict[str, Any] = {"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))}
        if weights and rng.random() < 0.5:
            answer["weight"] = rng.choice([0.5, 0.25, 1])
        messages.append(answer)
    if rng.random() < 0.05:
        messages[-1]["role"] = "narrator"
    return {"messages": messages, "kind": rng.choice(["a", "a", "b"])}


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer of a few hundred tokens with a ChatML template: opens in no time."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([SENTENCE], trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def encoded_job(folder: Path, **changes: Any) -> PackJob:
    """Chats by lines, weighted and filtered, and questions with answers in Parquet."""
    tree: dict[str, Any] = {
        "name": "encoded",
        "tokenizer": "./tokenizer",
        "sources": [
            {"path": "data/chat-*.jsonl", "name": "chat", "weight": 1.5, "where": {"kind": "a"}},
            {"path": "data/math.parquet", "name": "math"},
        ],
        "seq_len": 192,
        "splits": {"train": 0.7, "valid": 0.3},
        "output": "out",
        "limits": {"max_reject_fraction": 1.0, "max_overlong_fraction": 1.0},
    }
    return parse_job({**tree, **changes}, base=folder)


def encoded_output(root: Path, *, rows: int = 40, **changes: Any) -> Path:
    """The output under `root`/out, its sources under `root`/data."""
    made = _make_once(rows, json.dumps(changes, sort_keys=True))
    shutil.copytree(made, root, dirs_exist_ok=True)
    plan = json.loads((root / "out/plan.json").read_text())
    for file in plan["inputs"]:
        file["url"] = str(root / file["path"])
    (root / "out/plan.json").write_text(json.dumps(plan))
    return root / "out"


@functools.cache
def _make_once(rows: int, changes: str) -> Path:
    folder = tempfile.mkdtemp(prefix="packsvc-encoded-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    root = Path(folder)
    job = encoded_job(root, **json.loads(changes))
    rng = random.Random(5)
    (root / "data").mkdir()
    write_tokenizer(root / "tokenizer")
    for name in ("chat-0", "chat-1"):
        lines = [json.dumps(conversation(rng, weights=job.loss_weights), ensure_ascii=False) for _ in range(rows)]
        lines[3:3] = [""]
        lines[7:7] = ["{no json"]
        (root / f"data/{name}.jsonl").write_text("\n".join(lines) + "\n")
    pairs = [{"prompt": f"What is {n} + {n}?", "completion": f"It is {2 * n}."} for n in range(rows)]
    pq.write_table(pa.Table.from_pylist(pairs), root / "data/math.parquet", row_group_size=10)
    return _write(root, job)


def _write(root: Path, job: PackJob) -> Path:
    encoder = load_encoder(job)
    inputs: list[InputFile] = []
    groups: list[list[dict[str, Any]]] = []
    batches, often, rejects = [], [], list[Reject]()
    counts: dict[str, Counts] = {}
    readings = {}
    for source in job.sources:
        count = counts.setdefault(source.name, Counts())
        for file in list_inputs(source, job=job):
            index, found = len(inputs), count_input(file)
            reading = readings.setdefault(source.name, recognise(sample_rows(file, limit=50), source))
            inputs.append(_counted(file, found))
            examples, pieces = [], cut_input(index, file, found, max_rows=16, max_bytes=10**6)
            groups.append([asdict(piece) for piece in pieces])
            for row in [row for piece in pieces for row in read_piece(piece, file)]:
                count.rows += 1
                if source.where and row.error is None and not passes(row, source.where):
                    count.filtered += 1
                elif not copies(source.weight, seed=job.seed, source=source.name, path=file.path, row=row.row):
                    count.left_out += 1
                elif isinstance(example := read_example(row, reading, source_name=source.name), Reject):
                    count.rejected += 1
                    count.rejected_by_reason[example.reason.value] = (
                        count.rejected_by_reason.get(example.reason.value, 0) + 1
                    )
                    rejects.append(example)
                else:
                    count.rows -= 1
                    examples.append(example)
            batch = encoder.encode(examples, source=source.name)
            count.add(batch.counts)
            rejects += batch.rejects
            times = [
                copies(source.weight, seed=job.seed, source=source.name, path=file.path, row=int(row))
                for row in batch.row
            ]
            count.repeated_tokens += int(((np.array(times) - 1) * np.diff(batch.offsets)).sum())
            batches.append(batch)
            often += times
    return write_output(
        root / "out",
        job=job,
        inputs=inputs,
        batch=merge_batches(batches),
        copies=often,
        counts=counts,
        rejects=rejects,
        facts=encoder.facts,
        encoder=encoder.settings,
        readings={name: asdict(reading) for name, reading in readings.items()},
        groups=groups,
    ).parent


def _counted(file: InputFile, count: InputCount) -> InputFile:
    found = {"num_rows": count.num_rows, "num_lines": count.marks[-1].row, "content_hash": count.content_hash}
    return InputFile(**{**asdict(file), **found})
