"""What DataLoader workers and their parent must know of each other: a small table in shared memory.

Workers hold copies of the stream, forked or pickled, so a plain attribute would not reach them, and what they do
would not reach the parent. Through the table `set_epoch` in the parent reaches workers that live on, a worker
notices that it is asked for the same pass twice (it would serve an epoch again), and the parent knows that the
position is no longer its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from multiprocessing import context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packsvc.errors import StateError

MAX_WORKERS = 1024
_TOKEN, _EPOCH, _POSITION, _RESUMED_TOKEN, _RESUMED_EPOCH, _SERVED = range(6)


class PassBoard:
    """Which pass is due, and which workers have begun it."""

    def __init__(self) -> None:
        self._shared: Any = multiprocessing.RawArray(ctypes.c_int64, _SERVED + MAX_WORKERS)
        self._board: NDArray[np.int64] = np.frombuffer(memoryview(self._shared), dtype=np.int64)
        self.owner = os.getpid()
        """Only this process announces passes."""

    def announce(self, epoch: int, position: int, *, new_pass: bool) -> None:
        """Parent: where the next pass starts. `new_pass`: it may start although another was served."""
        self._board[_EPOCH], self._board[_POSITION] = epoch, position
        if new_pass:
            self._board[_TOKEN] += 1

    @property
    def next_start(self) -> tuple[int, int]:
        """Worker: epoch and position at which the pass starts."""
        return int(self._board[_EPOCH]), int(self._board[_POSITION])

    @property
    def in_workers(self) -> bool:
        """Parent: whether workers have begun the pass announced last."""
        token = self._board[_TOKEN]
        return token > 0 and bool((self._board[_SERVED:] == token).any() or self._board[_RESUMED_TOKEN] == token)

    def resume(self, epoch: int) -> None:
        """Worker: it goes on in `epoch` from a state of its own."""
        self._board[_RESUMED_TOKEN], self._board[_RESUMED_EPOCH] = self._board[_TOKEN], epoch

    def check_new_pass(self, worker: int) -> None:
        """Worker: raise StateError where this pass, or one that a state went on in, was served already."""
        board = self._board
        again = board[_SERVED + worker] == board[_TOKEN]
        resumed = board[_RESUMED_TOKEN] == board[_TOKEN] and board[_EPOCH] <= board[_RESUMED_EPOCH]
        if again or resumed:
            raise StateError(
                f"a second pass under DataLoader workers without set_epoch: epoch {board[_EPOCH]} would be read again. "
                "Call stream.set_epoch(e) before each pass"
            )

    def serve(self, worker: int) -> None:
        """Worker: it hands out the first batch of this pass."""
        self._board[_SERVED + worker] = self._board[_TOKEN]

    def __getstate__(self) -> dict[str, Any]:
        # Shared memory can be handed to a process that is being started, but not pickled at large.
        if context.get_spawning_popen() is None:
            return {"values": self._board.copy()}
        return {"shared": self._shared, "owner": self.owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "shared" in state:
            self._shared = state["shared"]
            self._board = np.frombuffer(memoryview(self._shared), dtype=np.int64)
            self.owner = state["owner"]
        else:
            self.__init__()  # type: ignore[misc]
            self._board[:_SERVED] = state["values"][:_SERVED]
