"""Reject files keep everything about a row that was not packed."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packsvc.shards.reject_files as reject_files
from packsvc.errors import DamageError
from packsvc.shards import RejectWriter, read_rejects, write_rejects
from packsvc.types import Reason, Reject


def reject(**changes: object) -> Reject:
    values: dict[str, object] = {
        "file": 3,
        "row": 2**40,
        "part": None,
        "source": "chat",
        "reason": Reason.OVERLONG,
        "detail": "5000 tokens, seq_len is 4096",
        "record": '{"messages": []}',
    }
    return Reject(**{**values, **changes})  # type: ignore[arg-type]


def test_what_is_written_is_read() -> None:
    rejects = [reject(reason=reason, part=i or None) for i, reason in enumerate(Reason)]
    assert read_rejects(write_rejects(rejects)) == rejects
    assert read_rejects(write_rejects([])) == []


def test_the_columns_are_those_of_the_format() -> None:
    table = pq.read_table(pa.BufferReader(write_rejects([reject(), reject(part=2)])))
    assert {field.name: (str(field.type), field.nullable) for field in table.schema} == {
        "file": ("int32", False),
        "row": ("int64", False),
        "part": ("int32", True),
        "source": ("string", False),
        "reason": ("string", False),
        "detail": ("string", False),
        "record": ("string", False),
    }
    assert table.column("part").to_pylist() == [None, 2]
    assert table.column("reason").to_pylist() == ["overlong", "overlong"]


def test_a_lone_surrogate_is_kept_as_json_spells_it() -> None:
    """JSON may carry half a character, UTF-8 may not; the record must not be lost for it."""
    found = read_rejects(write_rejects([reject(record="a\ud800b", detail="bad \udfff")]))
    assert (found[0].record, found[0].detail) == ("a\\ud800b", "bad \\udfff")


def test_the_same_rejects_give_the_same_bytes() -> None:
    assert write_rejects([reject()]) == write_rejects([reject()])


def test_rejects_that_come_in_parts_wait_for_no_more_than_a_row_group(monkeypatch: pytest.MonkeyPatch) -> None:
    rejects = [reject(row=row, record="x" * (row % 7)) for row in range(100)]
    whole = write_rejects(rejects)
    writer = RejectWriter()
    for start in range(0, 100, 30):
        writer.add(rejects[start : start + 30])
    assert writer.num_rows == 100
    assert writer.finish() == whole
    monkeypatch.setattr(reject_files, "ROW_GROUP_CHARACTERS", 200)
    data = write_rejects(iter(rejects))
    sizes = [pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(i).num_rows for i in range(3)]
    assert max(sizes) < 10
    assert read_rejects(data) == rejects


def test_a_damaged_file_is_named() -> None:
    data = bytearray(write_rejects([reject(record="x" * 500)] * 50))
    with pytest.raises(DamageError, match=r"rejects/000001\.parquet: cannot be read"):
        read_rejects(bytes(data[: len(data) // 2]), where="rejects/000001.parquet")
    metadata = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0).column(6)
    data[metadata.data_page_offset + metadata.total_compressed_size - 3] ^= 1
    with pytest.raises(DamageError):
        read_rejects(bytes(data))
