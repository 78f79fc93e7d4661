"""Errors leave by one door: one clear message on stderr, the exit code of their kind, no traceback unless asked."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packsvc.validation
from packsvc.errors import (
    ClusterError,
    ConfigError,
    ConflictError,
    DamageError,
    EncodeError,
    FormatError,
    GroupError,
    LimitError,
    PacksvcError,
    SourceError,
    StateError,
    StorageError,
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `packsvc validate` meet an error."""

    def meet(error: BaseException) -> None:
        def validate(*rest: Any, **more: Any) -> None:
            raise error

        monkeypatch.setattr(packsvc.validation, "validate", validate, raising=False)

    return meet


ERRORS: list[tuple[BaseException, int, str]] = [
    (ConfigError("job.yaml: seq_len: too small"), 2, "job.yaml: seq_len: too small"),
    (SourceError("a.jsonl: no such file"), 2, "a.jsonl"),
    (EncodeError("the template fails"), 2, "the template fails"),
    (FormatError("no manifest"), 2, "no manifest"),
    (StateError("another job's output"), 2, "another job's"),
    (LimitError("too many rejects"), 1, "too many rejects"),
    (GroupError("group 3 failed"), 1, "group 3"),
    (DamageError("shard damaged"), 1, "shard damaged"),
    (ConflictError("not deterministic"), 1, "not deterministic"),
    (StorageError("disk full"), 3, "disk full"),
    (ClusterError("no answer"), 3, "no answer"),
    (OSError(errno.ENOSPC, "No space left on device", "/out/x"), 3, "/out/x: No space left on device; free some space"),
    (PermissionError(errno.EACCES, "Permission denied", "/out"), 3, "/out: Permission denied; make it writable"),
    (MemoryError(), 3, "out of memory"),
    (KeyboardInterrupt(), 3, "interrupted; run the same command again to resume"),
    (SystemExit(signal.SIGTERM), 3, "run the same command again to resume"),
    (ZeroDivisionError("division by zero"), 1, "unexpected ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("error", "code", "said"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_becomes_one_message_and_its_code(
    run: Run, failing: Callable[[BaseException], None], error: BaseException, code: int, said: str
) -> None:
    failing(error)
    found, out, err = run("validate", "out")
    assert (found, out) == (code, "")
    assert err.startswith("packsvc: ")
    assert said in err
    assert "Traceback" not in err


def test_every_error_of_the_tree_has_an_exit_code_of_the_contract() -> None:
    todo, seen = [PacksvcError], 0
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        assert kind.exit_code in (1, 2, 3)
        seen += 1
    assert seen >= 12


@pytest.mark.parametrize("args", [("--debug", "validate", "out"), ("validate", "out", "--debug")])
def test_debug_shows_the_traceback(run: Run, failing: Callable[[BaseException], None], args: tuple[str, ...]) -> None:
    failing(FormatError("no manifest"))
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert err.endswith("packsvc: no manifest\n")


def test_an_exit_that_is_not_a_signal_passes(run: Run, failing: Callable[[BaseException], None]) -> None:
    failing(SystemExit(7))
    assert run("validate", "out")[0] == 7


@pytest.mark.parametrize(
    "args",
    [
        ("nothing",),
        ("pack",),
        ("pack", "job.yaml", "--limit", "0"),
        ("pack", "job.yaml", "--workers", "2", "--address", "auto"),
        ("pack", "job.yaml", "--dry-run", "--limit", "5"),
        ("pack", "job.yaml", "--nothing"),
        ("pack", "job.yaml", "other.yaml"),
        ("validate",),
        ("validate", "out", "--sample", "5"),
        ("stats", "out", "--by", "weather"),
        ("stats", "out", "--by", "source", "--sql", "select 1"),
        ("show", "out", "--pack", "-1"),
        ("show", "out", "--pack", "one"),
        ("init", "data"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_told_with_code_2(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert "Usage:" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "args", [("pack", "none.yaml"), ("pack", "none.yaml", "--set", "x"), ("pack", "none.yaml", "--dry-run")]
)
def test_a_wrong_job_is_told_with_code_2(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("packsvc: ")
    assert len(err.splitlines()) == 1


def run_process(*args: str, **more: Any) -> subprocess.Popen[str]:
    code = "import sys; from packsvc.cli import main; main(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_code_3_and_how_to_resume(tmp_path: Path, signum: int) -> None:
    """A job file that is a pipe which nobody writes to keeps the command waiting."""
    os.mkfifo(tmp_path / "job.yaml")
    process = run_process("pack", str(tmp_path / "job.yaml"))
    writer = os.open(tmp_path / "job.yaml", os.O_WRONLY)  # returns once the command has opened the other end
    time.sleep(0.2)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    os.close(writer)
    assert (process.returncode, out) == (3, "")
    assert err == "packsvc: interrupted; run the same command again to resume\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`packsvc pack --schema | head -1`"""
    process = run_process("pack", "--schema", env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
