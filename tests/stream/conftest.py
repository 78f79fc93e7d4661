"""Outputs that many tests read."""

from __future__ import annotations

import pytest

from tests.objectstore import moto_address, s3
from tests.stream.outputs import Written, write_output

__all__ = ["moto_address", "s3"]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """21 packs in three shards, several row groups each."""
    return write_output(tmp_path_factory.mktemp("small"), [7, 5, 9])


@pytest.fixture(scope="session")
def even(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """16 packs in two shards."""
    return write_output(tmp_path_factory.mktemp("even"), [10, 6], seed=5)
