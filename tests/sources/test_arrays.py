"""One JSON array, streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.errors import SourceError
from packsvc.sources import arrays as arrays_module
from packsvc.sources import count_input
from packsvc.sources.arrays import elements
from packsvc.types import InputFile, Reason
from tests.sources.inputs import input_at, records_of, rows_of
from tests.sources.test_lines import blocks_of
from tests.sources.test_parsing import VALUES, strict

NAME = InputFile(path="a.json", url="a.json", source="s", size_bytes=0)


@given(values=st.lists(VALUES, max_size=6), size=st.integers(1, 50), indent=st.sampled_from([None, 0, 2]))
def test_elements_do_not_depend_on_blocks_or_layout(values: list[Any], size: int, indent: int | None) -> None:
    data = (" \n" + json.dumps(values, indent=indent, ensure_ascii=False) + "\r\n").encode()
    found = list(elements(blocks_of(data, size), name=NAME))
    assert [strict(element.value) for element in found] == [strict(value) for value in values]
    assert [json.loads(element.data) for element in found] == values


def test_a_number_is_read_to_its_end_whatever_the_blocks() -> None:
    data = b"[0.5, -1e5, 12, 3.25E-2,7]"
    for size in range(1, len(data)):
        found = [element.value for element in elements(blocks_of(data, size), name=NAME)]
        assert found == [0.5, -1e5, 12, 3.25e-2, 7]


def test_a_record_of_many_blocks_is_parsed_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parses = []
    parse = arrays_module._Window._parse
    monkeypatch.setattr(arrays_module._Window, "_parse", lambda self, at: parses.append(at) or parse(self, at))
    data = b'["' + b"x" * 4000 + b'"]'
    assert len(list(elements(blocks_of(data, 1), name=NAME))) == 1
    assert len(parses) < 20


@pytest.mark.parametrize(
    "text",
    ["[", "[1", "[1,", "[1,]", '[{"a": 1}', '[{"a" 1}]', "[1 2]", "[1] x", '["a]', "[tru]", "[1][2]", "[,1]", "[01]"],
)
@pytest.mark.parametrize("size", [1, 100])
def test_a_broken_array_is_an_error_that_names_file_and_record(text: str, size: int) -> None:
    with pytest.raises(SourceError, match=r"a\.json: not a whole JSON array.*record \d"):
        list(elements(blocks_of(text.encode(), size), name=NAME))


def test_a_broken_record_is_found_without_reading_on() -> None:
    """Memory stays bounded: a malformed record ends the reading at once."""
    seen = 0

    def endless() -> Any:
        nonlocal seen
        yield b'[{"a": tru}, '
        while True:
            seen += 1
            yield b" " * 1000

    with pytest.raises(SourceError):
        list(elements(endless(), name=NAME))
    assert seen < 5


def test_values_that_cannot_be_kept_cost_their_record_only(tmp_path: Path) -> None:
    data = b'[{"a": NaN}, {"a": 1e400}, {"a": "\\ud800"}, {"a": "\xff"}, {"a": %s}, {"a": 1}]' % (b"9" * 5000)
    rows = rows_of(input_at(tmp_path / "a.json", data))
    assert [row.row for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.error is None for row in rows] == [False] * 5 + [True]
    assert {row.error_reason for row in rows[:5]} == {Reason.INVALID_JSON}
    assert [row.raw for row in rows[:4]] == ['{"a": NaN}', '{"a": 1e400}', '{"a": "\\ud800"}', '{"a": "\\xff"}']
    assert rows[5].record == {"a": 1}


def test_big_integers_in_arrays_keep_their_value(tmp_path: Path) -> None:
    assert records_of(input_at(tmp_path / "a.json", b'[{"n": 123456789012345678901}]')) == [
        {"n": 123456789012345678901}
    ]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.ndjson"])
def test_content_tells_an_array_from_lines_whatever_the_suffix(tmp_path: Path, name: str) -> None:
    rows = [{"a": 1}, {"a": 2}]
    for text in (json.dumps(rows), json.dumps(rows, indent=1), "".join(json.dumps(r) + "\n" for r in rows)):
        file = input_at(tmp_path / name, text.encode())
        assert records_of(file) == rows
        assert count_input(file).num_rows == 2


def test_an_empty_array_has_no_rows(tmp_path: Path) -> None:
    assert records_of(input_at(tmp_path / "a.json", b" [ ] ")) == []


def test_lines_that_are_lists_are_lines(tmp_path: Path) -> None:
    file = input_at(tmp_path / "a.jsonl", b"[1, 2]\n[3]\n")
    assert records_of(file) == [[1, 2], [3]]
