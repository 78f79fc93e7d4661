"""The look before a run estimates what the run then makes."""

from pathlib import Path

import pytest

from packsvc.run import dry_run, pack
from tests.encode import toys
from tests.run.jobs import WORDS, small_job, write_rows


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return Path(toys.save(toys.words(vocabulary=sorted(set(WORDS))), tmp_path_factory.mktemp("toy")))


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.3, 2.5), (0, 1)])
def test_estimates_count_each_row_as_often_as_its_weight_says(toy, tmp_path, weights):
    sources = []
    for name, weight, rows in zip("ab", weights, (100, 300), strict=True):
        write_rows(tmp_path / "data" / f"{name}.jsonl", rows, seed=ord(name))
        sources.append({"path": f"data/{name}.jsonl", "name": name, "weight": weight})
    job = small_job(tmp_path, toy, sources=sources)
    found, made = dry_run(job), pack(job, workers=0).totals
    assert found.estimated_rows == made["rows"] == 400
    assert found.counts.left_out == made["left_out"]
    assert found.estimated_tokens == made["tokens"]
    assert found.estimated_packs == pytest.approx(made["packs"], rel=0.1)


def test_a_part_of_a_large_file_stands_for_the_whole(toy, tmp_path):
    """Sources of unlike rows are estimated each by its own."""
    write_rows(tmp_path / "data" / "a.jsonl", 3000)
    (tmp_path / "data" / "b.jsonl").write_text('{"text": "the pack"}\n' * 3000)
    sources = [{"path": f"data/{name}.jsonl", "name": name, "weight": w} for name, w in (("a", 1), ("b", 2))]
    job = small_job(tmp_path, toy, sources=sources, packing={"group_examples": 6000}, audit_fraction=0)
    found, made = dry_run(job), pack(job, workers=0).totals
    assert found.counts.rows == 1000
    assert found.estimated_rows == pytest.approx(made["rows"], rel=0.1)
    assert found.estimated_tokens == pytest.approx(made["tokens"], rel=0.1)
