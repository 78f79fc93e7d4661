"""The eight packs that every trainer takes a step on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.trainers import write_packs


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The models are tiny: a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An output of eight packs of 64 tokens."""
    folder: Path = tmp_path_factory.mktemp("trainers")
    return write_packs(folder / "out")
