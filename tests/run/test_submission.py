"""Submitting to a real Ray head with token authentication: what runs there, and what is refused here."""

import json
import os
import shutil

import pytest

from packsvc.config import job_text
from packsvc.run import pack
from tests.run.head import ray_head
from tests.run.jobs import shard_bytes, small_job, write_rows

pytestmark = [pytest.mark.ray_local, pytest.mark.slow]


@pytest.fixture(scope="module")
def head():
    with ray_head() as started:
        yield started


@pytest.fixture
def run(head, monkeypatch, capsys, tmp_path):
    """A command line of packsvc against the head: exit code, stdout, stderr."""
    from packsvc.cli import app

    monkeypatch.setenv("RAY_AUTH_TOKEN", head.token)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", head.address)
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")  # Ray's client would let it win
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def call(*words):
        try:
            app(args=[str(word) for word in words], prog_name="packsvc", standalone_mode=True)
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def job_file(tmp_path, smollm2_path):
    """A job beside its data and its tokenizer, both named by relative paths, as people write them."""
    folder = tmp_path / "job"
    write_rows(folder / "data" / "a.jsonl", 60)
    shutil.copytree(smollm2_path, folder / "tokenizer")
    job = small_job(folder, "tokenizer", output="./out", packing={"group_examples": 100})
    (folder / "job.yaml").write_text(job_text(job))
    return folder / "job.yaml"


def stand_in(tmp_path, name, script):
    """A program that stands in for the cluster's Python, so that a job need not pack."""
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_job_runs_there_as_here_and_submitted_again_it_resumes(run, job_file, tmp_path):
    out = tmp_path / "there"
    code, first, said = run("submit", job_file, "--output", out, "--ship-inputs", "--wait")
    assert code == 0, said
    assert first.strip().startswith("packsvc-")
    assert first.strip().endswith("-1")
    assert "groups" in said  # the log was followed, in plain lines
    assert "\x1b" not in said
    from packsvc.config import load_job

    pack(load_job(job_file), workers=0)
    assert shard_bytes(out) == shard_bytes(job_file.parent / "out")
    made = (out / "manifest.json").stat().st_mtime_ns

    code, again, said = run("submit", job_file, "--output", out, "--ship-inputs", "--wait", "--json")
    assert code == 0, said
    told = json.loads(again)
    assert told["id"] == first.strip()[:-1] + "2"
    assert told["job"]["status"] == "SUCCEEDED"
    assert (out / "manifest.json").stat().st_mtime_ns == made

    code, table, _ = run("jobs", "list")
    assert code == 0
    assert [line.split()[0] for line in table.splitlines()[1:3]] == [told["id"], first.strip()]
    code, logs, _ = run("jobs", "logs", first.strip())
    assert code == 0
    assert "-m packsvc pack job.yaml --address auto" in logs


def test_the_exit_code_of_the_job_comes_back(run, job_file, tmp_path):
    """The hub is out of reach there as here, so the tokenizer cannot be read."""
    code, _, said = run(
        "submit", job_file, "--output", tmp_path / "x", "--ship-inputs", "--set", "tokenizer=no/where", "--wait"
    )
    assert code == 2
    assert "tokenizer 'no/where'" in said
    assert "FAILED" in said


def test_a_running_job_is_joined_and_stopped(run, job_file, tmp_path):
    slow = stand_in(
        tmp_path, "slow", 'echo "begins with $*"; echo "hub offline: $HF_HUB_OFFLINE, $MINE"; exec sleep 300'
    )
    command = ("submit", job_file, "--output", tmp_path / "x", "--ship-inputs", "--python", slow, "--env", "MINE=7")
    code, first, _ = run(*command)
    assert code == 0
    code, again, said = run(*command)
    assert (code, again) == (0, first)
    assert "has not ended; nothing new was started" in said
    job_id = first.strip()
    code, stopped, _ = run("jobs", "stop", job_id)
    assert (code, stopped.strip()) == (0, f"{job_id}: stopped")
    assert run("jobs", "stop", job_id)[:2] == (0, stopped)
    code, status, _ = run("jobs", "status", job_id, "--json")
    assert code == 0
    told = json.loads(status)
    assert (told["status"], told["name"], told["output"]) == ("STOPPED", "small", str(tmp_path / "x"))
    code, logs, _ = run("jobs", "logs", job_id, "--follow")
    assert code == 0
    assert "begins with -m packsvc pack job.yaml --address auto" in logs
    assert "hub offline: 1, 7" in logs
    assert run(*command)[1].strip() == job_id[:-1] + "2"
    run("jobs", "stop", job_id[:-1] + "2")


def test_an_id_that_is_taken_is_refused_in_one_sentence(run, job_file, tmp_path):
    command = ("submit", job_file, "--output", tmp_path / "x", "--ship-inputs", "--submission-id", "mine")
    code, out, _ = run(*command, "--python", stand_in(tmp_path, "quick", "exit 0"), "--wait")
    assert (code, out.strip()) == (0, "mine")
    assert run("jobs", "stop", "mine")[1].strip() == "mine: had ended already (SUCCEEDED)"
    code, out, said = run(*command)
    assert (code, out) == (2, "")
    assert said.startswith("packsvc: submission id 'mine' is taken")
    assert len(said.splitlines()) == 1


def test_what_the_cluster_could_not_see_is_refused(run, job_file, head):
    code, out, said = run("submit", job_file, "--ship-inputs")
    assert (code, out) == (2, "")
    assert "output ./out: a folder beside the job file" in said
    before = len(json.loads(run("jobs", "list", "--all", "--json")[1]))
    run("submit", job_file, "--output", "/tmp/never-made")
    assert len(json.loads(run("jobs", "list", "--all", "--json")[1])) == before
    assert not os.path.exists("/tmp/never-made")


def test_wrong_doors_have_their_exit_codes(run, job_file, tmp_path, monkeypatch):
    submit = ("submit", job_file, "--output", tmp_path / "x", "--ship-inputs", "--wait-for-dashboard", 0.5)
    code, _, said = run("jobs", "status", "packsvc-none-1")
    assert code == 2
    assert "no such job" in said
    for verb in ("logs", "stop"):
        assert run("jobs", verb, "packsvc-none-1")[0] == 2
    code, _, said = run(*submit, "--address", "http://127.0.0.1:9")
    assert code == 3
    assert "no answer" in said
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong" * 8)
    for words in (submit, ("jobs", "list")):
        code, _, said = run(*words)
        assert code == 2
        assert "the token is not this cluster's" in said
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    code, _, said = run(*submit)
    assert code == 2
    assert "wants a token" in said
    code, _, said = run(*submit, "--address", "http://10.1.2.3:8265")
    assert code == 2
    assert "--insecure" in said
