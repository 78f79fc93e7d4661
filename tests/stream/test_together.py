"""Reading several packs at once gives what reading them one by one does, and no error comes sooner for it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packsvc.errors import DamageError
from packsvc.storage import Store
from packsvc.stream import PackStream
from packsvc.stream.epoch import runs
from packsvc.stream.prefetch import prefetch
from packsvc.stream.source import PackSource
from tests.marks import needs_compiled
from tests.stream.oracle import fields_of, slow_batch
from tests.stream.outputs import Written, write_output

SEQ_LEN = 2500


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """19 packs of 2500 tokens, each a page of its own, in three shards of several row groups."""
    return write_output(tmp_path_factory.mktemp("long"), [8, 3, 8], seq_len=SEQ_LEN, mean_length=300)


def refuse(*_: object) -> None:
    raise AssertionError("read in the other way")


@needs_compiled
@pytest.mark.parametrize("options", [{}, {"layout": "padded"}, {"align": 4}, {"remainder": "pad", "world_size": 3}])
@pytest.mark.parametrize("threads", [0, 2])
def test_equals_reading_one_by_one(long: Written, monkeypatch: pytest.MonkeyPatch, options: dict, threads: int):
    """And the oracle, token by token."""
    options = {"rank": 0, "world_size": 1, "batch_packs": 2, "threads": threads, **options}
    with monkeypatch.context() as patch:
        patch.setattr(PackSource, "pages", refuse)
        together = [fields_of(batch) for batch in PackStream(long.path, **options)]
    with monkeypatch.context() as patch:
        patch.setattr("packsvc.stream.source.native", None)
        assert [fields_of(batch) for batch in PackStream(long.path, **options)] == together
    first = together[0]
    slow = slow_batch(
        [long.packs[i] for i in first["pack_indices"]],
        layout=options.get("layout", "trimmed"),
        align=options.get("align", 1),
    )
    assert len(together) > 2
    assert all(first[name] == slow[name] for name in ("input_ids", "labels", "position_ids", "seq_idx", "cu_seqlens"))


@needs_compiled
def test_weights_are_read_together_too(tmp_path, monkeypatch: pytest.MonkeyPatch):
    out = write_output(tmp_path / "o", [5], seq_len=SEQ_LEN, mean_length=300, weights=True)
    with monkeypatch.context() as patch:
        patch.setattr(PackSource, "pages", refuse)
        together = [fields_of(batch) for batch in PackStream(out.path, batch_packs=2)]
    monkeypatch.setattr("packsvc.stream.source.native", None)
    assert together[0]["loss_weights"] is not None
    assert [fields_of(batch) for batch in PackStream(out.path, batch_packs=2)] == together


@needs_compiled
def test_a_mixture_is_read_together_too(long: Written, tmp_path, monkeypatch: pytest.MonkeyPatch):
    other = write_output(tmp_path / "o", [9], seq_len=SEQ_LEN, mean_length=200, seed=4)
    outputs = {long.path: long, other.path: other}
    monkeypatch.setattr(PackSource, "pages", refuse)
    seen = 0
    for batch in PackStream([(long.path, 0.6), (other.path, 0.4)], unit="packs", batch_packs=3):
        packs = [list(outputs.values())[output].packs[number] for output, number in batch.pack_indices]
        slow, found = slow_batch(packs), fields_of(batch)
        assert all(found[name] == slow[name] for name in ("input_ids", "labels", "position_ids", "cu_seqlens"))
        seen += len({output for output, _ in batch.pack_indices}) > 1
    assert seen


def test_outputs_with_and_without_weights_are_mixed(long: Written, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Targets of the one without weigh 1; the others keep theirs."""
    other = write_output(tmp_path / "o", [9], seq_len=SEQ_LEN, mean_length=200, weights=True)
    mixture = [(long.path, 0.5), (other.path, 0.5)]
    found = [fields_of(batch) for batch in PackStream(mixture, batch_packs=4)]
    both = 0
    for batch in found:
        if len({output for output, _ in batch["pack_indices"]}) == 1:
            continue
        both += 1
        expected = []
        for output, number in batch["pack_indices"]:
            pack = [long, other][output].packs[number]
            weight = pack.loss_mask if pack.loss_weight is None else pack.loss_weight
            expected += weight[0, : int(pack.num_tokens[0])].astype(float).tolist()
        assert batch["loss_weights"] == expected
        assert batch["fractional_weights"]
    assert both
    monkeypatch.setattr("packsvc.stream.source.native", None)
    assert [fields_of(batch) for batch in PackStream(mixture, batch_packs=4)] == found


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("batch_packs", [1, 2])
def test_batches_before_a_damaged_pack_are_handed_out(tmp_path, threads: int, batch_packs: int):
    """Though it was read together with them."""
    out = write_output(tmp_path / "o", [12], seq_len=SEQ_LEN, mean_length=300)
    expected = [fields_of(batch) for batch in PackStream(out.path, shuffle=False, batch_packs=batch_packs)]
    path = Path(out.path, out.manifest.shards[0].path)
    data = path.read_bytes()
    group, _, page = opened(out)._readers[0]._located([8])[0]
    at = group.places[0][0][page] + group.places[0][1][page] - 9
    path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
    stream = PackStream(out.path, shuffle=False, batch_packs=batch_packs, threads=threads)
    found, batches = [], iter(stream)
    found += [fields_of(next(batches)) for _ in expected[: 8 // batch_packs]]
    with pytest.raises(DamageError, match=r"pack 8 cannot be read: .*pack 8: input_ids is damaged: the page at byte"):
        next(batches)
    assert found == expected[: 8 // batch_packs]
    assert stream.state_dict()["position"] == 8


def opened(out: Written) -> PackSource:
    return PackSource(Store(out.path), out.manifest)


@needs_compiled
def test_what_is_kept_of_a_shard_is_not_kept_when_it_is_opened_again(long: Written):
    source = opened(long)
    packs = np.array([3, 0])
    counts = source.counts(packs)
    before = source.contents(packs, counts)
    source.close()
    assert source.contents(packs, counts) == before


@given(st.integers(0, 300), st.integers(1, 7), st.integers(1, 1 << 19))
def test_runs_take_every_step_once_and_the_first_alone(count: int, stride: int, step_tokens: int):
    steps = range(5, 5 + count * stride, stride)
    found = list(runs(steps, step_tokens=step_tokens))
    assert [step for run in found for step in run] == list(steps)
    assert all(len(run) == 1 or len(run) * step_tokens <= 1 << 17 for run in found)
    assert not found or len(found[0]) == 1


def test_the_first_item_is_made_by_whoever_asks():
    names = list(prefetch(lambda _: threading.current_thread().name, range(5), threads=2))
    assert names[0] == threading.current_thread().name
    assert all(name.startswith("packsvc-read") for name in names[1:])
    assert list(prefetch(lambda item: item, [], threads=2)) == []
