"""Job files and the command line: from text to a checked job, and how what is wrong is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packsvc.config import load_job, parse_job, parse_set
from packsvc.errors import ConfigError

SMALLEST = "tokenizer: ./t\nsources: [{path: a.jsonl}]\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, overrides: dict[str, Any] | None = None) -> str:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_job(path, overrides)
    assert str(caught.value).startswith(str(path)) or "override" in str(caught.value)
    return str(caught.value)


def test_relative_paths_start_from_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    job = load_job(write(tmp_path, SMALLEST))
    assert job.output_url == str(tmp_path / "out")
    assert job.output == "./out"


def test_the_quickstart_is_a_job(quickstart: Path) -> None:
    job = load_job(quickstart / "job.yaml")
    assert Path(job.tokenizer_path, "tokenizer.json").is_file()
    assert [source.name for source in job.sources] == ["chat", "sharegpt", "alpaca", "math"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokenizer: [", "not YAML"),
        ("tokenizer: a\ntokenizer: b\n", "key 'tokenizer' stands twice"),
        (SMALLEST + "packing: {align: 1, align: 2}\n", "key 'align' stands twice"),
        ("? [a, b]\n: c\n", "a key must be a plain value"),
        (SMALLEST + "date: 2026-13-01\n", "not YAML"),
        ("a: &a [*a]\n", "contains itself"),
        ("- a\n", "a job file is a mapping"),
        ("", "a job file is a mapping"),
        ("sources: [{path: a}]\n", "tokenizer: Field required"),
        ("tokenizer: t\n", "sources: Field required"),
        ("tokenizer: t\nsources: [{format: alpaca}]\n", "sources.0.path: Field required"),
        ("tokenizer: t\nsources: a.jsonl\n", "sources:"),
        (SMALLEST + "!!python/object:os.system {}\n", "not YAML"),
    ],
)
def test_a_bad_file_is_told_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read the job file: No such file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_job(tmp_path)


def test_a_file_of_another_encoding_is_told(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes("tokenizer: caf\xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_job(tmp_path / "job.yaml")


def test_overrides_reach_into_the_job(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST)
    job = load_job(path, {"packing.align": 16, "sources.0.weight": 2, "limits.max_reject_fraction": 0.5})
    assert (job.packing.align, job.sources[0].weight, job.limits.max_reject_fraction) == (16, 2.0, 0.5)


def test_overrides_may_fill_what_is_null() -> None:
    data = {"tokenizer": "t", "sources": [{"path": "a"}], "packing": None}
    assert parse_job(data, overrides={"packing.align": 4}).packing.align == 4
    assert data["packing"] is None, "the caller's values are left as they were"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"sources.1.weight": 2}, "override sources.1.weight: '1' is no index into a list of 1"),
        ({"sources.x": 2}, "'x' is no index"),
        ({"seq_len.x": 2}, "override seq_len.x: seq_len is a single value"),
        ({"packing.aling": 2}, "did you mean 'align'?"),
        ({"seqlen": 2}, "did you mean 'seq_len'?"),
    ],
)
def test_a_wrong_override_is_told(tmp_path: Path, overrides: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, SMALLEST + "seq_len: 64\n", overrides)


def test_set_takes_yaml_values() -> None:
    items = ["seq_len=8192", "splits={train: 0.9, valid: 0.1}", "name=a=b", "revision=", "loss_weights=true"]
    assert parse_set(items) == {
        "seq_len": 8192,
        "splits": {"train": 0.9, "valid": 0.1},
        "name": "a=b",
        "revision": None,
        "loss_weights": True,
    }


@pytest.mark.parametrize("item", ["seq_len", "=3", "a=[1", "date=2026-13-01"])
def test_set_refuses_what_is_no_key_and_value(item: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_set([item])


def test_the_config_room_needs_only_pydantic_and_yaml() -> None:
    code = (
        "import sys, packsvc.config; "
        "print([m for m in ('ray', 'torch', 'transformers', 'pyarrow', 'fsspec', 'duckdb') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
