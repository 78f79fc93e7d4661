"""The job model: what it takes, what it refuses and how, and what it writes down."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.config import Overlong, PackJob, Strategy, is_url, parse_job
from packsvc.config.job import default_source_name, format_size, parse_size
from packsvc.errors import ConfigError

SMALLEST: dict[str, Any] = {"tokenizer": "./t", "sources": [{"path": "a.jsonl"}]}


def job(**keys: Any) -> PackJob:
    return parse_job({**SMALLEST, **keys})


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        job(**keys)
    return str(caught.value)


def test_defaults_are_those_of_the_contract() -> None:
    found = job().dump()
    source = found.pop("sources")[0]
    assert source == {
        "path": "a.jsonl",
        "name": "a",
        "format": "auto",
        "columns": {},
        "weight": 1.0,
        "where": {},
        "split": None,
    }
    assert found == {
        "name": "packsvc",
        "tokenizer": "./t",
        "revision": None,
        "chat_template": None,
        "template_kwargs": {},
        "date": None,
        "turns": "whole",
        "splits": {"train": 1.0},
        "dropped_reasoning": "no_loss",
        "train_on": "assistant",
        "seq_len": 4096,
        "overlong": "reject",
        "packing": {"strategy": "ffd", "max_segments": None, "align": 1, "group_examples": 65536},
        "seed": 0,
        "output": "./out",
        "shard_size": "256MB",
        "compression": "zstd:1",
        "loss_weights": False,
        "control_tokens": "reject",
        "audit_fraction": 0.01,
        "limits": {"max_reject_fraction": 0.01, "max_overlong_fraction": 0.1},
    }


def test_every_key_of_the_contract_is_taken() -> None:
    found = job(
        name="quickstart",
        revision="main",
        chat_template="t.jinja",
        template_kwargs={"enable_thinking": False},
        date="2026-01-01",
        sources=[
            {
                "path": ["a/*.jsonl.gz", "s3://b/c"],
                "name": "chat",
                "format": "sharegpt",
                "columns": {"messages": "conversations"},
                "weight": 0.3,
                "where": {"lang": ["en", "de"]},
                "split": "valid",
            }
        ],
        turns="each",
        splits={"train": 1.0, "valid": 0},
        dropped_reasoning="train",
        train_on="all",
        seq_len=8192,
        overlong="split",
        packing={"strategy": "next_fit", "max_segments": 8, "align": 16, "group_examples": 100},
        seed=7,
        output="s3://bucket/out",
        shard_size="1GiB",
        compression="none",
        loss_weights=True,
        control_tokens="encode_as_text",
        audit_fraction=1,
        limits={"max_reject_fraction": 0, "max_overlong_fraction": 1},
    )
    assert found.date == datetime.date(2026, 1, 1)
    assert found.overlong is Overlong.SPLIT
    assert found.packing.strategy is Strategy.NEXT_FIT
    assert found.shard_size == 2**30
    assert found.split_names == ["train", "valid"]


@pytest.mark.parametrize(
    ("keys", "near"),
    [
        ({"seqlen": 4096}, "unknown key 'seqlen'; did you mean 'seq_len'?"),
        ({"packing": {"aling": 2}}, "packing: unknown key 'aling'; did you mean 'align'?"),
        ({"sources": [{"path": "a", "wieght": 2}]}, "sources.0: unknown key 'wieght'; did you mean 'weight'?"),
        ({"limits": {"max_rejects": 1}}, "limits: unknown key 'max_rejects'; did you mean 'max_reject_fraction'?"),
    ],
)
def test_an_unknown_key_names_its_nearest(keys: dict[str, Any], near: str) -> None:
    assert near in refusal(**keys)


def test_an_unknown_key_like_no_other_lists_those_there_are() -> None:
    assert "known: strategy, max_segments, align, group_examples" in refusal(packing={"zzzzzz": 1})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"seq_len": 1}, "seq_len: Input should be greater than or equal to 2 (given: 1)"),
        ({"seq_len": "long"}, "seq_len:"),
        ({"seed": -1}, "seed:"),
        ({"overlong": "cut"}, "'reject', 'truncate_right', 'drop_turns', 'split' or 'error'"),
        ({"turns": "some"}, "turns:"),
        ({"packing": {"strategy": "bfd"}}, "packing.strategy:"),
        ({"packing": {"align": 0}}, "packing.align:"),
        ({"packing": {"max_segments": 0}}, "packing.max_segments:"),
        ({"packing": {"align": 8192}}, "packing.align 8192 is above seq_len 4096"),
        ({"sources": []}, "sources:"),
        ({"sources": [{"path": ""}]}, "sources.0.path: a source needs a path"),
        ({"sources": [{"path": ["a", ""]}]}, "sources.0.path: a source needs a path"),
        ({"sources": [{"path": "a", "weight": -1}]}, "sources.0.weight:"),
        ({"sources": [{"path": "a", "weight": float("nan")}]}, "sources.0.weight:"),
        ({"sources": [{"path": "a", "split": "test"}]}, "sources.0.split: 'test' is not among splits (train)"),
        ({"sources": [{"path": "a", "name": "x"}, {"path": "b", "name": "x"}]}, "sources.1.name: 'x' stands twice"),
        ({"splits": {"train": 0.9, "valid": 0.2}}, "splits: shares of splits must add up to 1, not 1.1"),
        ({"splits": {}}, "splits: shares of splits must add up to 1, not 0"),
        ({"splits": {"Train": 1}}, "split 'Train' must match [a-z0-9_]+"),
        ({"splits": {"train": 1.5, "valid": -0.5}}, "share of split 'train' must lie between 0 and 1, not 1.5"),
        ({"splits": {"train": float("nan")}}, "must lie between 0 and 1"),
        ({"compression": "gzip"}, "compression: 'gzip' is not known; use zstd:1 to zstd:22"),
        ({"compression": "zstd:23"}, "compression: 'zstd:23' is not known"),
        ({"shard_size": "big"}, "shard_size: 'big' is not a size; write for example 256MB or 1GiB"),
        ({"shard_size": "0MB"}, "shard_size:"),
        ({"shard_size": -5}, "shard_size:"),
        ({"date": "soon"}, "date:"),
        ({"audit_fraction": 2}, "audit_fraction:"),
        ({"limits": {"max_reject_fraction": -0.1}}, "limits.max_reject_fraction:"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(keys: dict[str, Any], said: str) -> None:
    assert said in refusal(**keys)


def test_all_problems_are_told_at_once() -> None:
    said = refusal(seq_len=1, seed=-1)
    assert "seq_len:" in said
    assert "seed:" in said


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("256MB", 256_000_000), ("1.5 GiB", 1_610_612_736), ("0.29GB", 290_000_000), ("17", 17), ("3kb", 3000)],
)
def test_sizes_are_exact(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes
    assert job(shard_size=text).shard_size == size_bytes


@given(st.integers(1, 10**15))
def test_a_size_reads_back_as_it_was_written(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("./data/chat/*.jsonl.gz", "chat"),
        ("data/**/*.jsonl", "data"),
        ("data/alpaca.json.gz", "alpaca"),
        ("s3://bucket/chat/part-*.parquet", "chat"),
        ("s3://bucket", "bucket"),
        ("a.b.csv.zst", "a.b"),
        ("../*", "source"),
        (".", "source"),
    ],
)
def test_a_source_is_named_after_its_path(path: str, name: str) -> None:
    assert default_source_name(path) == name


def test_sources_of_one_name_are_numbered() -> None:
    found = job(sources=[{"path": "x/a.jsonl"}, {"path": "y/a.jsonl"}, {"path": "z/a.jsonl"}])
    assert [s.name for s in found.sources] == ["a", "a-2", "a-3"]


def test_what_is_written_down_reads_back_the_same() -> None:
    before = job(shard_size="3MB", splits={"train": 0.5, "valid": 0.5}, date="2026-01-01")
    text = json.dumps(before.dump())
    assert PackJob.model_validate(json.loads(text)) == before


def test_identity_leaves_out_what_does_not_shape_the_output() -> None:
    plain = job().identity()
    assert (
        job(name="other", output="/elsewhere", limits={"max_reject_fraction": 1}, audit_fraction=0).identity() == plain
    )
    for other in (
        {"seed": 1},
        {"seq_len": 8},
        {"compression": "none"},
        {"template_kwargs": {"a": 1}},
        {"shard_size": 1},
    ):
        assert job(**other).identity() != plain


def test_paths_resolve_against_the_base(tmp_path: Any) -> None:
    here = job().with_base(tmp_path)
    assert here.resolve("./a/../b") == str(tmp_path / "b")
    assert here.resolve("/abs/x") == "/abs/x"
    assert here.resolve("file:///abs/x") == "/abs/x"
    assert here.resolve("s3://bucket/x") == "s3://bucket/x"
    assert here.output_url == str(tmp_path / "out")


def test_a_tokenizer_is_a_folder_where_there_is_one_and_a_hub_id_otherwise(tmp_path: Any) -> None:
    (tmp_path / "t").mkdir()
    assert job().with_base(tmp_path).tokenizer_path == str(tmp_path / "t")
    assert job(tokenizer="org/model").with_base(tmp_path).tokenizer_path == "org/model"


def test_another_base_is_another_job(tmp_path: Any) -> None:
    before = job()
    after = before.with_base(tmp_path)
    assert before.base != after.base == str(tmp_path)
    assert before.identity() == after.identity()


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        job().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://b/x", True),
        ("memory://x", True),
        ("simplecache::s3://b", True),
        ("a/b", False),
        ("/a", False),
        ("a:b", False),
    ],
)
def test_urls_are_told_from_paths(path: str, url: bool) -> None:
    assert is_url(path) is url


def test_the_schema_describes_every_key() -> None:
    schema = PackJob.model_json_schema()
    assert set(schema["properties"]) == set(PackJob.model_fields)
    assert schema["additionalProperties"] is False
