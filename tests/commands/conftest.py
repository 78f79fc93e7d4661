"""A command line that runs here, in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from packsvc.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line; gives its exit code, stdout and stderr."""
    monkeypatch.setattr(signal, "signal", lambda *rest: None)

    def call(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        shown = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), shown.out, shown.err

    return call
