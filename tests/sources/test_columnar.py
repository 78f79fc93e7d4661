"""Parquet and Arrow IPC."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packsvc.config import Format
from packsvc.errors import SourceError
from packsvc.sources import columnar as columnar_module
from packsvc.sources import count_input, cut_input
from packsvc.types import PieceKind
from tests.sources.inputs import chat, good, input_at, parquet, read_as, records_of, rows_of

ROWS = [{"n": n, "text": f"row {n}"} for n in range(100)]


def arrow(path: Path, rows: list[dict[str, Any]], *, stream: bool, rows_per_batch: int = 7) -> Any:
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return input_at(path)


@pytest.mark.parametrize("rows_per_group", [1, 7, 100, 1000])
def test_parquet_gives_its_rows_in_order(tmp_path: Path, rows_per_group: int) -> None:
    file = parquet(tmp_path / "a.parquet", ROWS, row_group_size=rows_per_group)
    assert records_of(file) == ROWS
    assert [row.row for row in rows_of(file)] == list(range(100))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("suffix", ["arrow", "ipc", "feather"])
def test_arrow_gives_its_rows_in_order(tmp_path: Path, suffix: str, stream: bool) -> None:
    file = arrow(tmp_path / f"a.{suffix}", ROWS, stream=stream)
    assert records_of(file) == ROWS
    assert count_input(file).num_rows == 100


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
@pytest.mark.parametrize("max_rows", [1, 3, 10, 64])
def test_row_ranges_give_each_row_once(tmp_path: Path, kind: str, max_rows: int) -> None:
    if kind == "parquet":
        file = parquet(tmp_path / "a.parquet", ROWS, row_group_size=33)
    else:
        file = arrow(tmp_path / "a.arrow", ROWS, stream=kind == "stream", rows_per_batch=33)
    pieces = cut_input(0, file, count_input(file), max_rows=max_rows, max_bytes=1 << 30)
    assert {piece.kind for piece in pieces} == {PieceKind.ROWS}
    assert all(piece.num_rows is not None and piece.num_rows <= max_rows for piece in pieces)
    found = [(row.row, row.record) for piece in pieces for row in rows_of(file, piece)]
    assert found == list(enumerate(ROWS))


def test_a_row_group_above_the_bytes_is_cut_by_rows(tmp_path: Path) -> None:
    rows = [{"text": f"{n:04}" * 250} for n in range(64)]
    file = parquet(tmp_path / "a.parquet", rows, use_dictionary=False, compression="none")
    pieces = cut_input(0, file, count_input(file), max_rows=1000, max_bytes=10_000)
    assert len(pieces) >= 6
    assert all(piece.size_bytes <= 12_000 for piece in pieces)
    assert [row.record for piece in pieces for row in rows_of(file, piece)] == rows


def test_t4_schemas_from_structs_lose_the_nulls_that_arrow_invents(tmp_path: Path) -> None:
    """Arrow gives every tool the parameters of all others, as nulls."""
    tool_a = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    tool_b = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"b": {"enum": ["x", None]}}}}}
    calls = [
        [{"function": {"name": "f", "arguments": {"a": "1"}}}],
        [{"function": {"name": "g", "arguments": {"b": 2}}}],
    ]
    rows = [chat(tools=[tool_a]), chat(tools=[tool_b])]
    for made, call in zip(rows, calls, strict=True):
        made["messages"][1]["tool_calls"] = call
    file = parquet(tmp_path / "a.parquet", rows)
    first, second = (good(read_as(record, Format.MESSAGES)) for record in records_of(file))
    assert (first.tools, second.tools) == ([tool_a], [tool_b])
    assert [m.messages[1]["tool_calls"] for m in (first, second)] == calls


def test_t4_json_text_in_columns_keeps_its_own_nulls(tmp_path: Path) -> None:
    rows = [{"messages": '[{"role": "user", "content": "a", "x": {"k": null}}]', "tools": '[{"d": null}]'}]
    example = good(read_as(records_of(parquet(tmp_path / "a.parquet", rows))[0], Format.MESSAGES))
    assert example.messages[0]["x"] == {"k": None}
    assert example.tools == [{"d": None}]


def test_maps_are_objects_and_keep_their_nulls(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.int64())
    table = pa.table({"m": pa.array([[("a", 1), ("b", None)]], type=kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert records_of(input_at(tmp_path / "a.parquet")) == [{"m": {"a": 1, "b": None}}]


def test_i1_lists_beyond_32_bit_offsets_are_read_in_bounded_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit lowered: no batch holds more values than a fraction of the row group, none are combined."""
    rows = [{"input_ids": list(range(1000)), "n": n} for n in range(200)]
    table = pa.Table.from_pylist(rows, schema=pa.schema({"input_ids": pa.large_list(pa.int64()), "n": pa.int64()}))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=200, use_dictionary=False)
    monkeypatch.setattr(columnar_module, "BATCH_BYTES", 64_000)
    seen = []
    read = pq.ParquetFile.iter_batches

    def watched(self: Any, **options: Any) -> Any:
        for batch in read(self, **options):
            seen.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    assert records_of(input_at(tmp_path / "a.parquet")) == rows
    assert max(seen) * 8000 <= 80_000
    assert sum(seen) == 200


def test_times_and_decimals_are_text(tmp_path: Path) -> None:
    noon = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "ns": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
            "tz": pa.array([noon], pa.timestamp("us", tz="Europe/Berlin")),
            "day": pa.array([datetime.date(2026, 1, 2)]),
            "cost": pa.array([Decimal("1.50")]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert records_of(input_at(tmp_path / "a.parquet")) == [
        {
            "ns": "2023-11-14 22:13:20.123456789",
            "tz": "2026-01-02 12:00:00.000000",
            "day": "2026-01-02",
            "cost": "1.50",
        }
    ]


def test_a_text_that_is_not_utf8_costs_its_row_only(tmp_path: Path) -> None:
    column = pa.StringArray.from_buffers(3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc"))
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema({"text": pa.string()})) as writer:
        writer.write_batch(pa.record_batch({"text": column}))
    rows = rows_of(input_at(tmp_path / "a.arrow"))
    assert [row.record for row in rows] == [{"text": "a"}, None, {"text": "c"}]
    assert (rows[1].row, rows[1].raw) == (1, "text=\\xff")


def test_dictionary_columns_are_values(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    assert [r["text"] for r in records_of(input_at(tmp_path / "a.parquet"))] == ["a", "b", "a"]


def test_no_rows(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [])
    assert rows_of(file) == []
    assert count_input(file).num_rows == 0


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 200, -9, -1])
def test_a_parquet_file_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    whole = Path(parquet(tmp_path / "a.parquet", ROWS).url).read_bytes()
    file = input_at(tmp_path / "b.parquet", whole[:keep])
    for read in (count_input, rows_of):
        with pytest.raises(SourceError, match=r"b\.parquet"):
            read(file)


def test_a_flipped_bit_in_a_page_with_checksums_is_found(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 1000] * 50})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[20_000] ^= 1
    with pytest.raises(SourceError, match=r"a\.parquet"):
        rows_of(input_at(tmp_path / "a.parquet", bytes(data)))
