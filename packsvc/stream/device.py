"""Hands batches over on the device that computes on them.

On CUDA the copy runs on a stream of its own, from page-locked memory, one batch ahead of the one in use; the
consumer's stream waits for it on the device. The CPU never waits, so that no step pays for a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from packsvc.errors import ConfigError
from packsvc.stream.maker import Made, Run

_AHEAD = 1


def open_device(device: torch.device | str | None) -> torch.device:
    """The device batches go to. Raises ConfigError where there is none."""
    try:
        wanted = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}: {error}") from None
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is {device!r}, but PyTorch sees no CUDA device here; leave it out to read on the CPU"
        )
    return wanted


def stage(run: Run, device: torch.device) -> Run:
    """In the reading thread: make batches ready to be copied without waiting."""
    if device.type != "cuda":
        return run
    return replace(run, made=[replace(made, batch=made.batch.pin_memory()) for made in run.made])


def deliver(batches: Iterable[Made], device: torch.device) -> Iterator[Made]:
    """The batches on `device`, in order."""
    if device.type == "cuda":
        return _through_cuda(batches, device)
    if device.type == "cpu":
        return iter(batches)
    return (replace(made, batch=made.batch.to(device)) for made in batches)


def _through_cuda(batches: Iterable[Made], device: torch.device) -> Iterator[Made]:
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copying: deque[tuple[Made, Made, Any]] = deque()
    for made in batches:
        with torch.cuda.stream(side):
            copy = replace(made, batch=made.batch.to(device, non_blocking=True))
            done = side.record_event()
        # The page-locked batch stays alive until its copy is handed out.
        copying.append((copy, made, done))
        if len(copying) > _AHEAD:
            yield _ready(copying.popleft(), device)
    while copying:
        yield _ready(copying.popleft(), device)


def _ready(copied: tuple[Made, Made, Any], device: torch.device) -> Made:
    made, _, done = copied
    current = torch.cuda.current_stream(device)
    current.wait_event(done)
    for field in fields(made.batch):
        value = getattr(made.batch, field.name)
        if isinstance(value, torch.Tensor):
            # Memory of the side stream must not be reused there while the consumer's stream still reads it.
            value.record_stream(current)
    return made
