"""Outputs that the tests of export read."""

from __future__ import annotations

import pytest

from tests.stream.outputs import Written, write_output


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """21 packs of 24 tokens in three shards, several row groups each."""
    return write_output(tmp_path_factory.mktemp("small"), [7, 5, 9], seed=3)


@pytest.fixture(scope="session")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Packs with room to pad every segment to a multiple of 4."""
    return write_output(tmp_path_factory.mktemp("aligned"), [6, 4], seq_len=32, seed=4, align=4)


@pytest.fixture(scope="session")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Packs whose targets weigh 0.25 or 1."""
    return write_output(tmp_path_factory.mktemp("weighted"), [4, 3], seed=5, weights=True)
