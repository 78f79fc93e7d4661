"""Random corruptions of any field of a shard are caught, or named as what only the sources, or nobody, can tell.

Page checksums, hashes, sizes and names are made right again after each, so that no hash catches it trivially.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from packsvc.types import PackColumns
from tests.validation.encoded import encoded_output
from tests.validation.mutations import run_mutations
from tests.validation.outputs import make_output


@pytest.mark.slow
def test_every_corruption_is_caught_or_needs_the_sources(tmp_path: Path) -> None:
    out = make_output(tmp_path, rows=6, loss_weights=True, splits={"train": 1.0})
    tally = run_mutations(out, 200, seed=11, against_sources=False)
    assert tally.missed == []
    assert set(tally.made) == {name for name in PackColumns.__slots__ if not name.endswith("offsets")}
    for column in ("position_ids", "loss_mask", "cu_seqlens", "num_tokens", "num_loss_tokens", "num_segments"):
        assert tally.caught[column] == tally.made[column] > 0
    assert sum(tally.caught.values()) > 150


@pytest.mark.slow
def test_every_corruption_is_caught_against_the_sources(tmp_path: Path) -> None:
    out = encoded_output(tmp_path, rows=12, loss_weights=True, splits={"train": 1.0})
    tally = run_mutations(out, 150, seed=12, against_sources=True)
    assert tally.missed == []
    assert sum(tally.caught.values()) + sum(tally.named.values()) == 150
    assert sum(tally.named.values()) <= 3, "only a weight of -0.0 is harmless"
