"""Figures from the manifest and the table of lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.errors import DamageError, FormatError
from packsvc.statistics import by_reason, by_source, by_split, describe, stats
from packsvc.statistics.figures import percentiles
from tests.validation.damage import manifest_of
from tests.validation.outputs import make_output


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return make_output(tmp_path, seed=3, packing={"align": 4})


def test_json_has_totals_sources_and_splits_under_the_names_of_the_manifest(out: Path) -> None:
    manifest, found = manifest_of(out), stats(out).to_json()
    for key in ("totals", "sources", "splits"):
        assert found[key] == manifest[key]
    assert json.loads(json.dumps(found)) == found


def test_no_shard_is_read(out: Path) -> None:
    for file in (out / "shards").iterdir():
        file.unlink()
    assert stats(out).totals["packs"] > 0


def test_lengths_and_alignment_agree_with_the_segments(out: Path) -> None:
    import pyarrow.parquet as pq

    lengths = []
    for shard in manifest_of(out)["shards"]:
        for row in pq.read_table(out / shard["path"]).to_pylist():
            lengths += np.diff(row["cu_seqlens"][: row["num_segments"] + 1]).tolist()
    found = stats(out)
    assert found.lengths["shortest"] == min(lengths)
    assert found.lengths["longest"] == max(lengths)
    assert found.lengths["median"] == sorted(lengths)[-(-len(lengths) // 2) - 1]
    assert found.mean_length == pytest.approx(np.mean(lengths))
    assert found.alignment is not None
    assert found.alignment.reserved_tokens == sum(-n % 4 for n in lengths)
    assert found.alignment.efficiency_cost == found.alignment.reserved_tokens / (found.totals["packs"] * 32)


@given(st.dictionaries(st.integers(1, 50), st.integers(0, 20), min_size=1))
def test_percentiles_of_a_histogram_are_those_of_the_list(histogram: dict[int, int]) -> None:
    every = sorted(n for n, times in histogram.items() for _ in range(times))
    found = percentiles(np.array(list(histogram)), np.array(list(histogram.values())))
    if not every:
        assert found == {}
        return
    for name, share in (("shortest", 0), ("p10", 10), ("median", 50), ("p99", 99), ("longest", 100)):
        rank = max(1, -(-len(every) * share // 100))
        assert found[name] == every[rank - 1]


def test_words_name_efficiency_padding_loss_share_rejects_and_alignment(out: Path) -> None:
    found = stats(out)
    lines = describe(found)
    assert f"{found.totals['packs']:,}" in lines["packs"]
    assert "overlong" in lines["rejected"]
    assert "multiples of 4" in lines["alignment"]
    assert "filtered" in lines
    assert "truncated" not in lines
    assert lines["efficiency"].startswith("0.")
    assert [row["source"] for row in by_source(found)] == ["a", "b", "c"]
    assert [row["split"] for row in by_split(found)] == ["train", "valid"]
    assert sum(row["rejected"] for row in by_reason(found)) == found.totals["rejected"]


def test_an_output_without_alignment_has_none(tmp_path: Path) -> None:
    found = stats(make_output(tmp_path))
    assert found.alignment is None
    assert "alignment" not in describe(found)


def test_a_missing_or_damaged_table_and_a_missing_manifest_are_said(out: Path) -> None:
    (out / "lengths.parquet").write_bytes(b"no table")
    with pytest.raises(DamageError, match=r"lengths\.parquet"):
        stats(out)
    (out / "lengths.parquet").unlink()
    with pytest.raises(DamageError, match="gone"):
        stats(out)
    (out / "manifest.json").unlink()
    with pytest.raises(FormatError, match="unfinished"):
        stats(out)
