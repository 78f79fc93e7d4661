"""The search for cycles is paused while rows are held, never for longer."""

from __future__ import annotations

import gc
import weakref

import pytest

from packsvc.encode import collect_new, collector_paused


class Node:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


def test_the_collector_is_off_inside_and_as_before_afterwards():
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_does_not_leave_it_off():
    with pytest.raises(ValueError), collector_paused():
        raise ValueError
    assert gc.isenabled()


def test_cycles_of_a_batch_go_with_the_batch():
    with collector_paused():
        node = weakref.ref(Node())
        assert node() is not None
        collect_new()
        assert node() is None
