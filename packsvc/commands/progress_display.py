"""How a run's progress looks on stderr: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from packsvc.run import Event, Progress

PLAIN_SECONDS = 10.0
STILL_SECONDS = 60.0


class ProgressDisplay:
    """A watcher of `packsvc.run.pack`: call it with events, inside a `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live: Any = None
        self._last = float("-inf")
        self._line = ""

    def __enter__(self) -> ProgressDisplay:
        if self._stream.isatty():
            from rich.console import Console
            from rich.status import Status

            self._live = Status("starting", console=Console(file=self._stream, highlight=False))
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        if event.progress is None:
            self._say(f"warning: {event.text}" if event.kind == "warning" else event.text)
        elif self._live is not None:
            self._live.update(progress_line(event.progress))
        else:
            self._plain(progress_line(event.progress), force=event.kind == "done")

    def _plain(self, line: str, *, force: bool) -> None:
        """A line every ten seconds; one that says nothing new, every minute."""
        every = PLAIN_SECONDS if line != self._line else STILL_SECONDS
        if force or time.monotonic() - self._last >= every:
            self._last, self._line = time.monotonic(), line
            self._say(line)

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            print(text, file=self._stream, flush=True)


def progress_line(progress: Progress) -> str:
    """Groups, rows, rate, efficiency so far, rejects, and the time that is left."""
    parts = [
        f"groups {progress.groups_done:,}/{progress.groups_total:,}",
        f"rows {progress.rows:,}",
        f"{progress.tokens_per_second:,.0f} tokens/s",
    ]
    if progress.packs:
        parts.append(f"efficiency {progress.efficiency:.4f}")
    if rejected := sum(progress.rejected_by_reason.values()):
        parts.append(f"rejected {rejected:,}")
    if progress.eta_seconds is not None and progress.groups_done < progress.groups_total:
        parts.append(f"{_duration(progress.eta_seconds)} left")
    return f"{progress.stage}: " + ", ".join(parts)


def _duration(seconds: float) -> str:
    """A time as a person says it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
