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
_PASS, _EPOCH, _POSITION, _RESUMED_PASS, _RESUMED_EPOCH, _SERVED = range(6)


class PassBoard:
    """Which pass is due, and which workers have begun it. Passes have numbers; a new one makes another pass legal."""

    def __init__(self) -> None:
        self._shared: Any = multiprocessing.RawArray(ctypes.c_int64, _SERVED + MAX_WORKERS)
        self._board: NDArray[np.int64] = np.frombuffer(memoryview(self._shared), dtype=np.int64)
        self.owner = os.getpid()
        """Only this process announces passes."""
        self._pass, self._start = 0, (0, 0)
        """The pass as known here: a worker inherits what stood when it was made, and asks the table only after that.
        So a worker that starts late still belongs to the pass that it was made for."""
        self._asked = 0

    def announce(self, epoch: int, position: int, *, new_pass: bool) -> None:
        """Parent: where the next pass starts. `new_pass`: it may start although another was served."""
        self._pass, self._start = self._pass + new_pass, (epoch, position)
        self._board[[_PASS, _EPOCH, _POSITION]] = self._pass, epoch, position

    @property
    def in_workers(self) -> bool:
        """Parent: whether workers have begun the pass announced last."""
        return bool((self._board[_SERVED:] == self._pass).any() or self._board[_RESUMED_PASS] == self._pass)

    def take_pass(self) -> None:
        """Worker: a pass begins here."""
        if self._asked == os.getpid():
            self._pass = int(self._board[_PASS])
            self._start = int(self._board[_EPOCH]), int(self._board[_POSITION])
        self._asked = os.getpid()

    @property
    def start(self) -> tuple[int, int]:
        """Worker: epoch and position at which the pass starts."""
        return self._start

    @property
    def is_set(self) -> bool:
        """Worker: whether `set_epoch` said where the pass starts."""
        return self._pass > 1

    def resume(self, epoch: int) -> None:
        """Worker: it goes on in `epoch` from a state of its own."""
        self._board[[_RESUMED_PASS, _RESUMED_EPOCH]] = self._pass, epoch

    def check_new_pass(self, worker: int) -> None:
        """Worker: raise StateError where this pass, or one that a state went on in, was served already."""
        epoch = self._start[0]
        again = self._board[_SERVED + worker] == self._pass
        resumed = self._board[_RESUMED_PASS] == self._pass and epoch <= self._board[_RESUMED_EPOCH]
        if again or resumed:
            raise StateError(
                f"a second pass under DataLoader workers without set_epoch: epoch {epoch} would be read again. "
                "Call stream.set_epoch(e) before each pass"
            )

    def serve(self, worker: int) -> None:
        """Worker: it hands out a batch of this pass."""
        slot = _SERVED + worker
        self._board[slot] = max(int(self._board[slot]), self._pass)

    def __getstate__(self) -> dict[str, Any]:
        # Shared memory can be handed to a process that is being started, but not pickled at large.
        state = {**self.__dict__, "_board": None}
        if context.get_spawning_popen() is None:
            state["_shared"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["_shared"] is None:
            fresh = PassBoard()
            fresh.announce(*state["_start"], new_pass=True)
            state = fresh.__dict__
        self.__dict__.update(state)
        self._board = np.frombuffer(memoryview(self._shared), dtype=np.int64)
