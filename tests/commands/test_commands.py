"""The commands on a small job, in this process: what they print, and the exit codes of what goes wrong."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packsvc

Run = Callable[..., tuple[int, str, str]]
ROWS = 60


def write_job(folder: Path, rows: list[str], **keys: Any) -> Path:
    """A job file over these JSONL rows; YAML takes JSON as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat.jsonl").write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    job = {"name": "small", "sources": [{"path": "./chat.jsonl"}], "seq_len": 1024, **keys}
    (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def rows(quickstart: Path) -> list[str]:
    with gzip.open(quickstart / "data" / "chat" / "multilingual.jsonl.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()[:ROWS]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, rows: list[str]) -> Path:
    """The folder of a small packed output; its job file stands beside it."""
    path = write_job(tmp_path_factory.mktemp("small"), rows, tokenizer=str(smollm2_path))
    packsvc.pack(packsvc.load_job(path), workers=0)
    return path.parent / "out"


@pytest.fixture
def job_of(tmp_path: Path, smollm2_path: Path, rows: list[str]) -> Callable[..., Path]:
    """Writes a job over some rows, by default the first eight."""
    return lambda rows=rows[:8], **keys: write_job(tmp_path, rows, **{"tokenizer": str(smollm2_path), **keys})


def test_pack_prints_what_became_of_the_rows(run: Run, job_of: Callable[..., Path]) -> None:
    code, out, err = run("pack", job_of(), "--workers", 0)
    assert code == 0, err
    assert out.startswith("small: packed into ")
    assert "  packed " in out
    assert "  efficiency " in out
    assert "groups 1/1" in err


def test_pack_again_does_nothing_and_prints_the_same(run: Run, job_of: Callable[..., Path]) -> None:
    path = job_of()
    first = run("pack", path, "--workers", 0)
    before = {p: p.stat().st_mtime_ns for p in (path.parent / "out" / "shards").iterdir()}
    second = run("pack", path, "--workers", 0)
    assert (second[0], second[1]) == (0, first[1])
    assert {p: p.stat().st_mtime_ns for p in (path.parent / "out" / "shards").iterdir()} == before


def test_pack_prints_one_json_document(run: Run, job_of: Callable[..., Path]) -> None:
    path = job_of()
    code, out, _ = run("pack", path, "--workers", 0, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["output"] == str(path.parent / "out")
    assert found["totals"]["rows"] == 8
    assert found["totals"] == json.loads((path.parent / "out" / "manifest.json").read_text())["totals"]


def test_set_and_output_change_the_job(
    run: Run, job_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    path = job_of()
    monkeypatch.chdir(tmp_path / "here")
    args = ("--set", "seq_len=2048", "--set", "packing.align=4", "--output", "other")
    code, out, _ = run("pack", path, "--workers", 0, *args)
    assert code == 0
    assert out.startswith("small: packed into other\n")
    manifest = json.loads((tmp_path / "here" / "other" / "manifest.json").read_text())
    assert (manifest["seq_len"], manifest["align"]) == (2048, 4)
    assert not (path.parent / "out").exists()


def test_limit_packs_a_trial_beside_the_output(run: Run, job_of: Callable[..., Path]) -> None:
    path = job_of()
    code, out, _ = run("pack", path, "--workers", 0, "--limit", 3, "--json")
    assert code == 0
    assert json.loads(out)["output"] == str(path.parent / "out-limit-3")
    assert json.loads((path.parent / "out-limit-3" / "manifest.json").read_text())["totals"]["rows"] == 3
    assert not (path.parent / "out").exists()


def test_dry_run_tells_what_would_be_and_writes_nothing(run: Run, job_of: Callable[..., Path]) -> None:
    path = job_of()
    before = sorted(path.parent.rglob("*"))
    code, out, err = run("pack", path, "--dry-run")
    assert code == 0, err
    for wanted in ("nothing was written", "efficiency", "groups", "overlong", "rejected", "[[", "]]", "<|im_end|>"):
        assert wanted in out, wanted
    assert sorted(path.parent.rglob("*")) == before
    found = json.loads(run("pack", path, "--dry-run", "--json")[1])
    assert found["counts"]["rows"] == 8
    tokens = found["example"]["tokens"]
    assert {"trained", "generation prompt"} <= {token["why"] for token in tokens}
    assert all(token["trained"] == (token["why"] == "trained") for token in tokens)


def test_dry_run_shows_what_is_rejected(run: Run, job_of: Callable[..., Path], rows: list[str]) -> None:
    code, out, _ = run("pack", job_of([*rows[:8], '{"messages": [']), "--dry-run")
    assert code == 0
    assert "chat, file 0, row 8: invalid_json" in out


def test_schema_is_a_json_schema_of_the_job(run: Run) -> None:
    code, out, err = run("pack", "--schema")
    assert (code, err) == (0, "")
    assert json.loads(out)["properties"]["seq_len"]["minimum"] == 2


def test_init_writes_a_job_that_packs(
    run: Run, job_of: Callable[..., Path], smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = job_of().parent / "chat.jsonl"
    monkeypatch.chdir(tmp_path)
    code, out, err = run("init", data, "--tokenizer", smollm2_path, "-o", "jobs/new.yaml")
    assert (code, err) == (0, "")
    assert out == "wrote jobs/new.yaml; next: packsvc pack jobs/new.yaml --dry-run\n"
    text = (tmp_path / "jobs" / "new.yaml").read_text()
    assert "#" in text
    assert run("pack", "jobs/new.yaml", "--workers", 0)[0] == 0
    code, _, err = run("init", data, "--tokenizer", smollm2_path, "-o", "jobs/new.yaml")
    assert code == 2
    assert "exists already" in err
    assert (tmp_path / "jobs" / "new.yaml").read_text() == text


def test_init_goes_on_without_a_tokenizer_it_can_read_and_says_so(run: Run, job_of: Callable[..., Path]) -> None:
    code, out, err = run("init", job_of().parent / "chat.jsonl", "--tokenizer", "org/none", "-o", "-")
    assert code == 0
    assert "warning: the tokenizer was not looked at" in err
    assert "tokenizer: org/none" in out


def test_validate_tells_that_all_holds(run: Run, packed: Path) -> None:
    code, out, err = run("validate", packed)
    assert (code, err) == (0, "")
    assert f"{packed}: valid (" in out
    assert "geometry" in out
    assert json.loads(run("validate", packed, "--json")[1])["ok"] is True


def test_validate_against_sources_encodes_again(run: Run, packed: Path) -> None:
    code, out, err = run("validate", packed, "--against-sources", "--sample", 10)
    assert code == 0, out + err
    assert "sources" in out


def test_validate_exits_1_on_a_damaged_shard(run: Run, packed: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "out"
    shutil.copytree(packed, damaged)
    shard = next((damaged / "shards").iterdir())
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 1
    shard.write_bytes(data)
    code, out, err = run("validate", damaged)
    assert code == 1
    assert "NOT valid" in out
    assert shard.name in out
    assert "Traceback" not in out + err
    found = run("validate", damaged, "--json")
    assert (found[0], json.loads(found[1])["ok"]) == (1, False)


def test_stats_prints_totals_and_sources_under_the_names_of_the_manifest(run: Run, packed: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    found = json.loads(run("stats", packed, "--json")[1])
    assert found["totals"] == manifest["totals"]
    assert found["sources"] == manifest["sources"]
    code, out, _ = run("stats", packed)
    assert code == 0
    assert f"{manifest['totals']['tokens']:,} of " in out


@pytest.mark.parametrize("by", ["source", "split", "reason"])
def test_stats_by_prints_a_line_for_each(run: Run, packed: Path, by: str) -> None:
    code, out, _ = run("stats", packed, "--by", by)
    assert code == 0
    assert out.split()[0] == by
    rows = json.loads(run("stats", packed, "--by", by, "--json")[1])
    assert len(rows) == len(out.splitlines()) - 1


def test_stats_answers_sql(run: Run, packed: Path) -> None:
    query = "select count(*) as packs, sum(num_segments) as segments from packs"
    code, out, _ = run("stats", packed, "--sql", query)
    assert code == 0
    assert out.splitlines()[0].split() == ["packs", "segments"]
    assert json.loads(run("stats", packed, "--sql", query, "--json")[1])[0]["segments"] > 0


@pytest.mark.parametrize("query", ["selec 1", "select * from nothing", "copy packs to '/tmp/x'", "attach 'x'"])
def test_stats_refuses_sql_that_is_none_or_reaches_outside(run: Run, packed: Path, query: str) -> None:
    code, out, err = run("stats", packed, "--sql", query)
    assert (code, out) == (2, "")
    assert err.startswith("packsvc: ")


def test_show_prints_a_pack(run: Run, packed: Path) -> None:
    code, out, err = run("show", packed)
    assert (code, err) == (0, "")
    assert "<|im_start|>assistant" in out
    assert "chat.jsonl" in out
    one = run("show", packed, "--pack", 0, "--segment", 1)[1]
    assert 0 < len(one) < len(out)
    found = json.loads(run("show", packed, "--pack", 1, "--json")[1])
    assert found["pack"] == 1


def test_show_writes_a_page(run: Run, packed: Path, tmp_path: Path) -> None:
    code, out, err = run("show", packed, "--html", tmp_path / "pack.html")
    assert (code, out) == (0, "")
    assert "pack.html" in err
    page = (tmp_path / "pack.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("args", [("--pack", "100000"), ("--segment", "100000")])
def test_show_refuses_what_is_not_there(run: Run, packed: Path, args: tuple[str, str]) -> None:
    code, out, err = run("show", packed, *args)
    assert (code, out) == (2, "")
    assert "100000" in err or "100,000" in err


def test_repack_packs_the_same_tokens_again(run: Run, packed: Path, tmp_path: Path) -> None:
    code, out, err = run("repack", packed, tmp_path / "new", "--seq-len", 4096, "--workers", 0)
    assert code == 0, err
    assert "of 4,096 tokens" in out
    old, new = (json.loads((folder / "manifest.json").read_text())["totals"] for folder in (packed, tmp_path / "new"))
    assert (old["segments"], old["tokens"]) == (new["segments"], new["tokens"])
    assert run("validate", tmp_path / "new")[0] == 0


def test_clean_removes_leftovers_only(run: Run, packed: Path, tmp_path: Path) -> None:
    out_folder = tmp_path / "out"
    shutil.copytree(packed, out_folder)
    (out_folder / "shards" / "train-000009-000-0123456789ab.parquet").write_bytes(b"left behind")
    kept = sorted(p for p in out_folder.rglob("*") if "000009" not in p.name)
    assert "would remove 1 files" in run("clean", out_folder, "--dry-run")[1]
    assert json.loads(run("clean", out_folder, "--json")[1])["files"] == [
        "shards/train-000009-000-0123456789ab.parquet"
    ]
    assert sorted(out_folder.rglob("*")) == kept
    assert run("clean", out_folder, "--all")[0] == 0
    assert not list(out_folder.rglob("*"))


# ---- what goes wrong


def test_a_missing_input_is_told(run: Run, job_of: Callable[..., Path]) -> None:
    code, out, err = run("pack", job_of(sources=[{"path": "./none.jsonl"}]), "--workers", 0)
    assert (code, out) == (2, "")
    assert "none.jsonl" in err


@pytest.mark.parametrize("name", ["org/none", "./here"])
def test_an_unreadable_tokenizer_is_told(run: Run, job_of: Callable[..., Path], tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "tokenizer.json").write_text("{}")
    code, out, err = run("pack", job_of(tokenizer=name), "--workers", 0)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert name.strip("./") in err


def test_an_output_that_cannot_be_written_is_told(run: Run, job_of: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("pack", job_of(output="./file/out"), "--workers", 0)
    assert (code, out) == (3, "")
    assert str(tmp_path / "file") in err


def test_another_jobs_output_is_refused_and_untouched(run: Run, job_of: Callable[..., Path]) -> None:
    path = job_of()
    assert run("pack", path, "--workers", 0)[0] == 0
    before = {p: p.read_bytes() for p in (path.parent / "out").rglob("*") if p.is_file()}
    code, out, err = run("pack", path, "--workers", 0, "--set", "seed=1")
    assert (code, out) == (2, "")
    assert "seed" in err
    assert {p: p.read_bytes() for p in (path.parent / "out").rglob("*") if p.is_file()} == before


def test_an_input_that_changed_is_told(run: Run, job_of: Callable[..., Path], rows: list[str]) -> None:
    path = job_of()
    assert run("pack", path, "--workers", 0)[0] == 0
    with open(path.parent / "chat.jsonl", "a", encoding="utf-8") as file:
        file.write(rows[9] + "\n")
    code, _, err = run("pack", path, "--workers", 0)
    assert code == 2
    assert "chat.jsonl" in err


def test_too_many_rejects_end_with_1_and_no_manifest(run: Run, job_of: Callable[..., Path], rows: list[str]) -> None:
    path = job_of([*rows[:8], "{", "[]", "7"])
    code, out, err = run("pack", path, "--workers", 0)
    assert (code, out) == (1, "")
    assert "invalid_json" in err
    assert not (path.parent / "out" / "manifest.json").exists()


def test_a_job_that_packs_nothing_ends_with_1(run: Run, job_of: Callable[..., Path]) -> None:
    path = job_of(seq_len=8, limits={"max_reject_fraction": 1, "max_overlong_fraction": 1})
    code, out, err = run("pack", path, "--workers", 0)
    assert (code, out) == (1, "")
    assert "overlong" in err
    assert not (path.parent / "out" / "manifest.json").exists()


@pytest.mark.parametrize("command", ["validate", "stats", "show"])
def test_an_unfinished_a_foreign_and_a_missing_output_are_told(
    run: Run, packed: Path, tmp_path: Path, command: str
) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(packed, unfinished)
    os.unlink(unfinished / "manifest.json")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "a.txt").write_text("mine")
    for folder, said in (
        (unfinished, "unfinished"),
        (tmp_path / "foreign", "not a packsvc"),
        (tmp_path / "none", "no such"),
    ):
        code, out, err = run(command, folder)
        assert (code, out) == (2, "")
        assert said in err


def test_the_bad_jobs_are_refused_before_anything_is_written(run: Run, job_of: Callable[..., Path]) -> None:
    path = job_of(seqlen=5)
    code, _, err = run("pack", path, "--workers", 0)
    assert code == 2
    assert "did you mean 'seq_len'?" in err
    assert not (path.parent / "out").exists()


@pytest.mark.slow
@pytest.mark.ray_local
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_run_on_ray_ends_by_a_signal_with_3_and_resumes(
    run: Run, job_of: Callable[..., Path], rows: list[str], signum: int
) -> None:
    """The signal comes when the first of some twenty groups is committed."""
    path = job_of(rows * 12, packing={"group_examples": 36})
    commits = path.parent / "out" / "commits"
    process = subprocess.Popen(
        [sys.executable, "-m", "packsvc", "pack", str(path), "--workers", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (commits.exists() and any(commits.iterdir())):
        time.sleep(0.02)
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (3, ""), err
    assert err.endswith("packsvc: interrupted; run the same command again to resume\n")
    done = len(list(commits.glob("*.json")))
    assert not (path.parent / "out" / "manifest.json").exists()
    code, _, err = run("pack", path, "--workers", 0)
    assert code == 0
    found = re.search(r"resuming: (\d+) of \d+ groups", err)
    assert found is not None, err
    assert int(found[1]) >= done  # a worker may have outlived the driver by a moment
    assert run("validate", path.parent / "out")[0] == 0
