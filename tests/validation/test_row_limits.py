"""How large a row number can be, from what the manifest knows."""

from __future__ import annotations

from packsvc.shards import InputEntry
from packsvc.validation.row_limits import row_limits


def entry(path: str, *, num_rows: int | None = 10, num_lines: int | None = None) -> InputEntry:
    extra = {} if num_lines is None else {"num_lines": num_lines}
    return InputEntry(path=path, source="a", size_bytes=100, etag=None, mtime=None, num_rows=num_rows, extra=extra)


def test_counted_lines_are_the_bound() -> None:
    assert row_limits([entry("a.jsonl.gz", num_lines=13)]).tolist() == [13]


def test_formats_of_records_are_bounded_by_their_rows() -> None:
    names = ["a.parquet", "B.CSV.GZ", "c.arrow", "d.csv.zst"]
    assert row_limits([entry(name) for name in names]).tolist() == [10] * 4


def test_lines_that_were_not_counted_are_bounded_by_bytes() -> None:
    uncounted = [entry(n, num_rows=None) for n in ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet")]
    assert row_limits(uncounted).tolist() == [100, 103_200, 100, 100]
    assert row_limits([entry("a.jsonl.zst", num_rows=None)]).tolist() == [100 * 2**17]
