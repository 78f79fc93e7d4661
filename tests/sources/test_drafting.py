"""A first job file from the data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from packsvc.config import Format, PackJob, load_job
from packsvc.errors import SourceError
from packsvc.sources import draft_job, has_reasoning, list_inputs, look_at, recognise, sample_files
from tests.sources.inputs import chat, jsonl, row, source


def drafted(folder: Path, paths: list[str], **options: bool | None) -> tuple[str, PackJob]:
    where = folder / "job.yaml"
    text = draft_job(paths, "some/tokenizer", job_path=where, **options)
    where.write_text(text)
    return text, load_job(where)


def test_the_drafted_job_loads_and_finds_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(jsonl([chat()] * 1234))
    (tmp_path / "data" / "b.json.gz").write_bytes(
        gzip.compress(json.dumps([{"instruction": "q", "output": "a"}]).encode())
    )
    (tmp_path / "jobs").mkdir()
    text, job = drafted(tmp_path / "jobs", ["data/a.jsonl", "data/b.json.gz"])
    assert [(s.path, s.name, s.format) for s in job.sources] == [
        ("../data/a.jsonl", "a", Format.MESSAGES),
        ("../data/b.json.gz", "b", Format.ALPACA),
    ]
    assert "# 1,234 rows in 1 file" in text
    assert "# rows have `messages` with role/content" in text
    assert [len(list_inputs(s, job=job)) for s in job.sources] == [1, 1]


def test_a_folder_of_several_kinds_becomes_several_sources(tmp_path: Path) -> None:
    (tmp_path / "mix").mkdir()
    for name, record in (("a", chat()), ("b", {"text": "x"}), ("c", chat())):
        (tmp_path / "mix" / f"{name}.jsonl").write_bytes(jsonl([record]))
    _, job = drafted(tmp_path, [str(tmp_path / "mix")])
    assert [(s.name, s.format, len(s.paths)) for s in job.sources] == [
        ("mix-messages", Format.MESSAGES, 2),
        ("mix-text", Format.TEXT, 1),
    ]
    assert [len(list_inputs(s, job=job)) for s in job.sources] == [2, 1]


def test_numbered_files_are_one_source(tmp_path: Path) -> None:
    paths = [tmp_path / f"train-0000{n}-of-00003.jsonl" for n in range(3)]
    for path in paths:
        path.write_bytes(jsonl([chat()]))
    _, job = drafted(tmp_path, list(map(str, paths)))
    assert [(s.name, len(s.paths)) for s in job.sources] == [("train", 3)]


def test_names_stay_distinct_and_odd_paths_are_quoted(tmp_path: Path) -> None:
    for name in ("x/on.jsonl", "y/on.jsonl", "z/a: #b.jsonl", "z/12.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jsonl([chat()]))
    names = ["x/on.jsonl", "y/on.jsonl", "z/a: #b.jsonl", "z/12.jsonl"]
    _, job = drafted(tmp_path, [str(tmp_path / name) for name in names])
    assert [s.path for s in job.sources] == [str(tmp_path / name) for name in names]
    assert [s.name for s in job.sources] == ["on", "on-2", "a: #b", "12"]


@pytest.mark.parametrize(("drops", "turns"), [(True, "each"), (False, "whole"), (None, "whole")])
def test_reasoning_that_the_template_drops_suggests_a_segment_per_turn(
    tmp_path: Path, drops: bool | None, turns: str
) -> None:
    record = chat()
    record["messages"][1]["reasoning_content"] = "hm"
    (tmp_path / "a.jsonl").write_bytes(jsonl([chat(), record]))
    text, job = drafted(tmp_path, [str(tmp_path / "a.jsonl")], drops_reasoning=drops)
    assert job.turns == turns
    assert ("assistants reason" in text) is (drops is not False)


def test_reasoning_is_seen_in_fields_and_between_tags() -> None:
    plain, field, tags = chat(), chat(), chat("q", "<think>\nhm\n</think>\n\n4")
    field["messages"][1]["reasoning_content"] = "hm"
    reading = recognise([row(plain)], source())
    assert [has_reasoning([row(r)], reading) for r in (plain, field, tags)] == [False, True, True]
    assert not has_reasoning([row(chat("what does </think> mean?", "x"))], reading)


def test_rejects_and_weights_in_the_sample_are_told(tmp_path: Path) -> None:
    weighted = chat()
    weighted["messages"][1]["weight"] = 0.5
    rows = [weighted, {"messages": []}, {"messages": 3}]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows) + b"{bad\n")
    text, job = drafted(tmp_path, [str(tmp_path / "a.jsonl")])
    assert "these would be rejected: empty 1, invalid_json 1, wrong_type 1" in text
    assert job.loss_weights


def test_what_is_not_recognised_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"question": 1}]))
    with pytest.raises(SourceError, match=r"a\.jsonl: .*columns seen: question"):
        draft_job([str(tmp_path / "a.jsonl")], "t", job_path=tmp_path / "job.yaml")
    with pytest.raises(SourceError, match="no such file"):
        draft_job(["nowhere.jsonl"], "t", job_path=tmp_path / "job.yaml")


def test_many_files_are_told_from_some_of_them(tmp_path: Path) -> None:
    for n in range(70):
        (tmp_path / f"{n}.jsonl").write_bytes(jsonl([chat()]) if n % 2 else b"")
    (draft,) = look_at([str(tmp_path)], folder=str(tmp_path))
    assert (draft.num_files, draft.num_rows) == (70, 35)


def test_a_sample_goes_on_until_it_finds_rows(tmp_path: Path) -> None:
    from tests.sources.inputs import input_at

    files = [input_at(tmp_path / f"{n}.jsonl", b"" if n < 30 else jsonl([n])) for n in range(31)]
    assert [r.record for r in sample_files(files, limit=10)] == [30]


def test_the_quickstart_is_recognised(quickstart: Path) -> None:
    _, seen = "", {draft.name: draft.reading.format for draft in look_at([str(quickstart / "data")], folder=".")}
    assert set(seen.values()) == {Format.MESSAGES, Format.SHAREGPT, Format.ALPACA, Format.PROMPT_COMPLETION}
