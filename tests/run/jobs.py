"""Small jobs for the tests of the run room."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from packsvc.config import PackJob, parse_job


def conversation(rng: random.Random) -> dict[str, Any]:
    """A chat of one to three exchanges of a few words each."""
    messages = []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))})
        messages.append({"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))})
    return {"messages": messages}


WORDS = [
    "the",
    "pack",
    "holds",
    "whole",
    "examples",
    "and",
    "a",
    "mask",
    "that",
    "never",
    "lies",
    "about",
    "what",
    "the",
    "model",
    "must",
    "learn",
]


def write_rows(path: Path, n: int, *, seed: int = 0) -> Path:
    """`n` conversations as JSONL."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(conversation(rng)) + "\n" for _ in range(n)), encoding="utf-8")
    return path


def small_job(folder: Path, tokenizer: Path, **changes: Any) -> PackJob:
    """A job over `folder`/data/*.jsonl with packs of 256 tokens and groups of 40 rows."""
    tree: dict[str, Any] = {
        "name": "small",
        "tokenizer": str(tokenizer),
        "sources": [{"path": "data/*.jsonl", "name": "chat"}],
        "seq_len": 256,
        "packing": {"group_examples": 40},
        "output": "out",
        "audit_fraction": 0.1,
    }
    return parse_job({**tree, **changes}, base=folder)


def shard_bytes(out: Path) -> dict[str, bytes]:
    """Every file that readers look at, by name."""
    folders = ("shards", "rejects", "tails", "commits")
    files = [p for folder in folders for p in sorted((out / folder).glob("*"))]
    files += [out / name for name in ("packs.parquet", "lengths.parquet")]
    return {str(p.relative_to(out)): p.read_bytes() for p in files if p.exists()}
