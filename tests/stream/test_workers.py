"""The stream as an IterableDataset: under DataLoader and StatefulDataLoader, with workers and without."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from packsvc.errors import StateError
from packsvc.stream import PackStream
from tests.stream.oracle import fields_of, global_steps, steps_of
from tests.stream.outputs import Written

stateful = pytest.importorskip("torchdata.stateful_dataloader")


def loader(stream: PackStream, **options) -> DataLoader:
    return DataLoader(stream, batch_size=None, **options)


def stateful_loader(stream: PackStream, **options):
    return stateful.StatefulDataLoader(stream, batch_size=None, **options)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_d4_the_order_under_workers_is_the_plain_loops(small: Written, workers: int):
    expected = [fields_of(batch) for batch in PackStream(small.path, batch_packs=2)]
    stream = PackStream(small.path, batch_packs=2)
    found = loader(stream, num_workers=workers)
    assert len(found) == 10
    assert [fields_of(batch) for batch in found] == expected


def test_d4_workers_and_ranks_together_cover_everything_once(small: Written):
    expected = global_steps([PackStream(small.path, rank=r, world_size=2) for r in range(2)])
    found = [steps_of(loader(PackStream(small.path, rank=r, world_size=2), num_workers=2)) for r in range(2)]
    assert [a + b for a, b in zip(*found, strict=True)] == expected


def test_more_workers_than_steps(small: Written):
    assert len(steps_of(loader(PackStream(small.path, batch_packs=10), num_workers=4))) == 2


@pytest.mark.parametrize("persistent", [False, True])
def test_each_pass_under_workers_needs_its_epoch(small: Written, persistent: bool):
    stream = PackStream(small.path, batch_packs=3)
    loading = loader(stream, num_workers=2, persistent_workers=persistent)
    assert steps_of(loading) == steps_of(PackStream(small.path, batch_packs=3))
    with pytest.raises(StateError, match="a second pass under DataLoader workers without set_epoch"):
        steps_of(loading)
    stream.set_epoch(4)
    assert steps_of(loading) == steps_of(PackStream(small.path, batch_packs=3, epoch=4))


def test_workers_start_where_a_plain_state_says(small: Written):
    stream = PackStream(small.path, epoch=1)
    for _, _ in zip(range(4), stream, strict=False):
        pass
    state = stream.state_dict()
    resumed = PackStream(small.path)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    found = steps_of(loader(resumed, num_workers=2))
    assert found == steps_of(PackStream(small.path, epoch=1))[state["position"] :]


def test_the_parents_state_raises_and_says_where_it_is(small: Written):
    stream = PackStream(small.path)
    stream.state_dict()
    reading = iter(loader(stream, num_workers=1))
    next(reading)
    with pytest.raises(StateError, match="StatefulDataLoader"):
        stream.state_dict()
    with pytest.raises(StateError, match="StatefulDataLoader"):
        stream.shares()
    with pytest.raises(StateError, match="set_epoch"):
        next(iter(stream))
    del reading
    stream.set_epoch(1)
    assert stream.state_dict()["epoch"] == 1


@pytest.mark.slow
def test_workers_that_are_spawned(small: Written):
    stream = PackStream(small.path, batch_packs=3)
    loading = loader(stream, num_workers=1, multiprocessing_context="spawn")
    assert steps_of(loading) == steps_of(PackStream(small.path, batch_packs=3))
    with pytest.raises(StateError, match="second pass"):
        steps_of(loading)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [0, 1, 2, 5, 6, 7])
def test_stateful_dataloader_resumes_exactly(small: Written, workers: int, step: int):
    """7 steps an epoch: from the start, mid-epoch, and at its end."""
    expected = [steps_of(PackStream(small.path, batch_packs=3, epoch=e)) for e in range(3)]
    loading = stateful_loader(PackStream(small.path, batch_packs=3), num_workers=workers)
    reading = iter(loading)
    assert [next(reading).pack_indices for _ in range(step)] == expected[0][:step]
    state = loading.state_dict()
    del reading
    stream = PackStream(small.path, batch_packs=3)
    again = stateful_loader(stream, num_workers=workers)
    again.load_state_dict(state)
    if step == 7:
        # Without workers torchdata hands an ended pass over to the next; the stream knows which epoch that is.
        if workers:
            assert steps_of(again) == []
            stream.set_epoch(1)
        assert steps_of(again) == expected[1]
        return
    assert steps_of(again) == expected[0][step:]
    stream.set_epoch(1)
    assert steps_of(again) == expected[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_ended_pass_of_workers_goes_on_with_the_epoch_that_is_set(small: Written, workers: int):
    """A checkpoint in the loop, after the last batch and before the loop has ended."""
    loading = stateful_loader(PackStream(small.path, batch_packs=3), num_workers=workers)
    state = [loading.state_dict() for _ in loading][-1]
    stream = PackStream(small.path, batch_packs=3)
    again = stateful_loader(stream, num_workers=workers)
    again.load_state_dict(state)
    stream.set_epoch(1)
    assert steps_of(again) == steps_of(PackStream(small.path, batch_packs=3, epoch=1))


def test_a_state_inside_another_epoch_than_the_one_set_is_refused(small: Written):
    first = PackStream(small.path, batch_packs=3, epoch=1)
    loading = stateful_loader(first, num_workers=1)
    reading = iter(loading)
    next(reading)
    state = loading.state_dict()
    del reading
    stream = PackStream(small.path, batch_packs=3, epoch=1)
    again = stateful_loader(stream, num_workers=1)
    again.load_state_dict(state)
    stream.set_epoch(2)
    with pytest.raises(StateError, match=r"inside epoch 1, and set_epoch\(2\) was called: call set_epoch\(1\)"):
        steps_of(again)


def test_stateful_dataloader_in_the_second_epoch(small: Written):
    expected = steps_of(PackStream(small.path, batch_packs=3, epoch=1))
    stream = PackStream(small.path, batch_packs=3)
    loading = stateful_loader(stream, num_workers=2, persistent_workers=True)
    steps_of(loading)
    stream.set_epoch(1)
    reading = iter(loading)
    first = next(reading).pack_indices
    state = loading.state_dict()
    assert first == expected[0]
    again = stateful_loader(PackStream(small.path, batch_packs=3), num_workers=2)
    again.load_state_dict(state)
    assert steps_of(again) == expected[1:]


def test_a_state_of_workers_fits_the_same_number_of_workers_only(small: Written):
    loading = stateful_loader(PackStream(small.path), num_workers=2)
    reading = iter(loading)
    next(reading)
    worker = next(iter(loading.state_dict()["_snapshot"]["_worker_snapshots"].values()))
    with pytest.raises(StateError, match="StatefulDataLoader that it came from"):
        PackStream(small.path).load_state_dict(worker["dataset_state"])
