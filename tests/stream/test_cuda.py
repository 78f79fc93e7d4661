"""Batches on the device: the same ones, ready when they are handed out, without making the host wait."""

from __future__ import annotations

import pytest
import torch

from packsvc.stream import PackStream
from tests.stream.oracle import fields_of
from tests.stream.outputs import Written

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_on_cuda_are_those_on_the_cpu(small: Written, threads: int):
    expected = [fields_of(batch) for batch in PackStream(small.path, batch_packs=2)]
    batches = list(PackStream(small.path, batch_packs=2, device="cuda", threads=threads))
    assert all(batch.input_ids.is_cuda and batch.cu_seqlens.is_cuda for batch in batches)
    assert all(type(batch.max_seqlen) is int for batch in batches)
    assert [fields_of(batch) for batch in batches] == expected


def test_the_state_is_of_what_was_handed_out_and_not_of_what_was_copied_ahead(small: Written):
    stream = PackStream(small.path, device="cuda")
    for number, _ in enumerate(stream, start=1):
        assert stream.state_dict()["position"] == number % 21


def test_a_batch_does_not_make_the_host_wait(small: Written):
    reading = iter(PackStream(small.path, device="cuda"))
    next(reading)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            next(reading).hf()
    finally:
        torch.cuda.set_sync_debug_mode("default")
