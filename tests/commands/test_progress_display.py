"""Progress goes to stderr: plain lines where nobody watches, a live line on a terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

import packsvc.commands.progress_display as module
from packsvc.commands.progress_display import ProgressDisplay, progress_line


def progress(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "stage": "packing", "groups_done": 3, "groups_total": 12, "rows": 1234, "tokens_per_second": 56_789.0,
        "packs": 7, "efficiency": 0.9951, "rejected_by_reason": {"overlong": 2, "empty": 1}, "eta_seconds": 75.2,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def event(kind: str, **more: Any) -> Any:
    return SimpleNamespace(**{"kind": kind, "text": "", "progress": None, **more})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_tells_all_there_is_to_know() -> None:
    assert progress_line(progress()) == (
        "packing: groups 3/12, rows 1,234, 56,789 tokens/s, efficiency 0.9951, rejected 3, 1 min 15 s left"
    )


def test_the_line_leaves_out_what_is_not_known_yet() -> None:
    line = progress_line(progress(packs=0, rejected_by_reason={}, eta_seconds=None, groups_done=0))
    assert line == "packing: groups 0/12, rows 1,234, 56,789 tokens/s"


@pytest.mark.parametrize(("seconds", "text"), [(3, "3 s left"), (61, "1 min 1 s left"), (7320, "2 h 2 min left")])
def test_the_time_left_reads_well(seconds: float, text: str) -> None:
    assert progress_line(progress(eta_seconds=seconds)).endswith(text)


def test_elsewhere_a_line_stands_every_ten_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    with ProgressDisplay(stream) as watch:
        watch(event("message", text="counting 4 inputs"))
        for second in range(25):
            watch(event("progress", progress=progress(rows=second)))
            now[0] += 1
        watch(event("warning", text="group 3 failed, trying again"))
        watch(event("done", progress=progress(groups_done=12)))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "counting 4 inputs"
    assert sum("groups 3/12" in line for line in lines) == 3
    assert lines[-2:] == ["warning: group 3 failed, trying again", progress_line(progress(groups_done=12))]


def test_a_line_that_says_nothing_new_stands_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    with ProgressDisplay(stream) as watch:
        for _ in range(130):
            watch(event("progress", progress=progress()))
            now[0] += 1
    assert len(stream.getvalue().splitlines()) == 3


def test_on_a_terminal_messages_stand_above_a_live_line() -> None:
    stream = Terminal()
    with ProgressDisplay(stream) as watch:
        watch(event("message", text="template [/no-markup] ok"))
        watch(event("progress", progress=progress()))
    assert "template [/no-markup] ok" in stream.getvalue()


def test_the_live_line_ends_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(ValueError), ProgressDisplay(stream):
        raise ValueError
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"
