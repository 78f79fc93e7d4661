"""The rows of a job's files, as the encoder gets them, and tokenizers that are kept compressed."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path

from packsvc.config import PackJob
from packsvc.sources import list_inputs, read_example, recognise, sample_rows
from packsvc.types import Example, Reject


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
