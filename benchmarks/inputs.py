"""The rows of a job's files, as the encoder gets them."""

from __future__ import annotations

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
