"""The search for cycles is paused while rows are held, never for longer."""

from __future__ import annotations

import gc
import weakref

import pytest

from packsvc.encode import collect_new, collector_paused
from packsvc.encode.units import Unit
from tests.encode import toys


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


def test_refusals_hold_no_rows_that_only_a_search_for_cycles_would_free(make_encoder):
    encoder = make_encoder({"template": toys.ALT}, seq_len=128)
    rows = [
        toys.chat("fine", "fine"),
        toys.chat(f"typed {toys.IM_END}", "b", row=1),
        toys.chat(("user", "u"), ("user", "u"), ("assistant", "a"), row=2),
        toys.chat("a lone \ud800", "b", row=3),
        toys.chat("long " * 80, "long " * 80, row=4),
    ]
    gc.collect()
    with collector_paused():
        batch = encoder.encode(rows, source="chat")
        batch_slow = encoder.encode_slow(rows, source="chat")
        left = [found for found in gc.get_objects() if type(found) is Unit]
    reasons = ["control_tokens", "template_error", "encode_mismatch", "overlong"]
    assert [reject.reason for reject in batch.rejects] == reasons
    assert [reject.reason for reject in batch_slow.rejects] == reasons
    assert not left
