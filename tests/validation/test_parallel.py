"""The verdict does not depend on where the work is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from packsvc.errors import ClusterError, SourceError
from packsvc.validation import validate
from packsvc.validation.parallel import Work, run_over
from tests.validation.damage import edit_rows
from tests.validation.encoded import encoded_output


def test_results_come_in_order_and_few_are_in_flight() -> None:
    seen: list[int] = []

    def square(n: int) -> int:
        seen.append(n)
        return n * n

    results = run_over(square, range(100), work=Work.ARRAYS, workers=3, address=None)
    assert next(results) == 0
    assert len(seen) <= 8
    assert list(results) == [n * n for n in range(1, 100)]


def test_an_error_of_one_item_is_the_error_of_all() -> None:
    def fail(n: int) -> int:
        raise SourceError(f"item {n}")

    with pytest.raises(SourceError, match="item 0"):
        list(run_over(fail, [0, 1], work=Work.ARRAYS, workers=2, address=None))


@pytest.mark.slow
@pytest.mark.ray_local
def test_ray_gives_the_report_of_one_process(tmp_path: Path) -> None:
    import ray

    out = encoded_output(tmp_path, rows=12, loss_weights=True)
    edit_rows(out, 0, lambda rows: rows[0]["input_ids"].__setitem__(2, 0))
    edit_rows(out, 1, lambda rows: rows[0]["loss_mask"].__setitem__(0, True))
    here = validate(out, against_sources=True)
    assert {f.check for f in here.failures} >= {"sources", "mask"}
    assert validate(out, against_sources=True, workers=2).to_json() == here.to_json()
    assert not ray.is_initialized(), "an embedded cluster is stopped at the end"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert validate(out, against_sources=True, address="auto").to_json() == here.to_json()
        assert ray.is_initialized(), "a cluster that was there is left alone"
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.ray_local
def test_a_cluster_that_does_not_answer_is_said(tmp_path: Path) -> None:
    out = encoded_output(tmp_path, rows=12)
    with pytest.raises(ClusterError, match="no cluster could be reached"):
        validate(out, address="127.0.0.1:1")
