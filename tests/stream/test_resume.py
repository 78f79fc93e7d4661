"""Stopping anywhere and going on, on other ranks and threads, equals never having stopped."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.errors import StateError
from packsvc.stream import PackStream
from packsvc.stream.state import Binding, Position, read_state, write_state
from tests.stream.oracle import fields_of, global_steps, ranks_of, steps_of
from tests.stream.outputs import Written, write_manifest, write_output


def stopped_at(path: str, step: int, **options) -> dict:
    """The state of a loop left by break after so many steps, as a checkpoint keeps it."""
    stream = PackStream(path, **options)
    taken = steps_of(islice(stream, step))
    assert len(taken) == step
    return json.loads(json.dumps(stream.state_dict()))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("step", range(3))
def test_d7_resume_at_every_step_on_any_number_of_ranks(even: Written, step: int, world: int):
    """16 packs, global batch 8: mid-epoch, at the edge, and two epochs on."""
    expected = [s for e in range(3) for s in steps_of(PackStream(even.path, batch_packs=8, epoch=e))]
    state = stopped_at(even.path, step, batch_packs=2, rank=3, world_size=4)
    streams = ranks_of(even.path, world, batch_packs=8 // world, threads=world % 3)
    for stream in streams:
        stream.load_state_dict(state)
    found = [s for _ in range(2) for s in global_steps(streams)]
    assert found == expected[step : step + len(found)]
    assert len(found) == 4 - step % 2


@pytest.mark.parametrize("step", range(11))
def test_d6_resume_repeats_and_skips_nothing(small: Written, step: int):
    """Whole batches, not only their numbers, with other threads."""
    whole = [fields_of(batch) for batch in PackStream(small.path, batch_packs=2)]
    state = stopped_at(small.path, step, batch_packs=2, threads=3)
    stream = PackStream(small.path, batch_packs=2, threads=0)
    stream.load_state_dict(state)
    rest = [fields_of(batch) for batch in stream]
    if step < 10:
        assert rest == whole[step:]
    else:
        assert rest == [fields_of(batch) for batch in PackStream(small.path, batch_packs=2, epoch=1)]


@settings(max_examples=25)
@given(data=st.data())
def test_any_chain_of_stops_equals_no_stop(even: Written, data: st.DataObject):
    """Each part with its own ranks, threads and global batch, as long as the position allows it."""
    order = [p for e in range(2) for s in steps_of(PackStream(even.path, epoch=e, seed=9)) for p in s]
    found: list[int] = []
    state = None
    while len(found) < 16:
        sizes = [g for g in (1, 2, 4, 8) if len(found) % g == 0]
        size = data.draw(st.sampled_from(sizes))
        world = data.draw(st.sampled_from([w for w in (1, 2, 4, 8) if size % w == 0]))
        threads = data.draw(st.integers(0, 3))
        streams = ranks_of(even.path, world, batch_packs=size // world, threads=threads, seed=9)
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        count = data.draw(st.integers(1, (16 - len(found)) // size))
        parts = [steps_of(islice(stream, count)) for stream in streams]
        found += [pack for step in zip(*parts, strict=True) for part in step for pack in part]
        state = streams[-1].state_dict()
    assert found == order[:16]
    assert (state["epoch"], state["position"]) == (1, 0)


def test_the_state_speaks_of_what_was_handed_out_and_not_of_what_was_read_ahead(small: Written):
    stream = PackStream(small.path, threads=4)
    for number, _ in enumerate(stream, start=1):
        assert stream.state_dict()["position"] == (number if number < 21 else 0)
        assert len(stream) == 21


def test_a_state_is_a_few_integers_bound_to_the_data(small: Written):
    state = PackStream(small.path, seed=3).state_dict()
    assert state["plan_ids"] == [small.manifest.plan_id]
    assert state["digests"] == [small.manifest.digest]
    assert {k: v for k, v in state.items() if isinstance(v, int) and not isinstance(v, bool)} == {
        "version": 1,
        "epoch": 0,
        "position": 0,
        "global_batch": 1,
        "seed": 3,
    }
    assert len(json.dumps(state)) < 600


def test_a_state_after_the_last_batch_goes_on_with_the_next_epoch(small: Written):
    for options in ({"batch_packs": 4}, {"batch_packs": 4, "remainder": "pad"}):
        stream = PackStream(small.path, **options)
        for _ in stream:
            last = stream.state_dict()
        assert (last["epoch"], last["position"]) == (1, 0)
        again = PackStream(small.path, **options)
        again.load_state_dict(last)
        assert steps_of(again) == steps_of(PackStream(small.path, epoch=1, **options))


def test_set_epoch_right_after_loading_keeps_the_position_and_else_rewinds(small: Written):
    whole = steps_of(PackStream(small.path, epoch=2))
    stream = PackStream(small.path, epoch=2)
    list(islice(stream, 5))
    state = stream.state_dict()
    resumed = PackStream(small.path)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    resumed.set_epoch(2)
    assert len(resumed) == 21
    assert steps_of(resumed) == whole[5:]
    resumed.load_state_dict(state)
    resumed.set_epoch(3)
    assert steps_of(islice(resumed, 1)) == steps_of(PackStream(small.path, epoch=3))[:1]
    resumed.load_state_dict(state)
    assert steps_of(islice(resumed, 1)) == whole[5:6]
    resumed.set_epoch(2)
    assert steps_of(resumed) == whole


def test_the_epoch_after_a_resumed_one_is_whole(small: Written):
    stream = PackStream(small.path, epoch=4)
    list(islice(stream, 7))
    resumed = PackStream(small.path)
    resumed.load_state_dict(stream.state_dict())
    assert len(steps_of(resumed)) == 14
    assert steps_of(resumed) == steps_of(PackStream(small.path, epoch=5))


def test_another_global_batch_goes_on_where_the_position_is_a_multiple_of_it(even: Written):
    order = [pack for step in steps_of(PackStream(even.path)) for pack in step]
    state = stopped_at(even.path, 3, batch_packs=4)
    for size in (1, 2, 3, 4):
        stream = PackStream(even.path, batch_packs=size)
        stream.load_state_dict(state)
        rest = [pack for step in steps_of(stream) for pack in step]
        assert rest == order[12 : 12 + len(rest)]
        assert len(rest) == (16 // size) * size - 12
    # Of 16 packs, batches of 6 take 12: nothing is left of this epoch.
    stream = PackStream(even.path, batch_packs=6)
    stream.load_state_dict(state)
    assert steps_of(stream) == steps_of(PackStream(even.path, batch_packs=6, epoch=1))


@pytest.mark.parametrize(
    ("world", "nearest"),
    [(5, r"nearest global batch that fits is 4 or 6; none is a multiple of 5"), (8, "is 6; none is a multiple of 8")],
)
def test_another_global_batch_is_refused_elsewhere_with_both_and_the_nearest(even: Written, world: int, nearest: str):
    state = stopped_at(even.path, 3, batch_packs=4)
    stream = PackStream(even.path, rank=0, world_size=world)
    with pytest.raises(
        StateError, match=f"pack 12 .* global batch of 4; this stream's global batch is {world}.*{nearest}"
    ):
        stream.load_state_dict(state)


def test_the_nearest_global_batch_names_what_this_world_can_do(even: Written):
    state = stopped_at(even.path, 3, batch_packs=4)
    stream = PackStream(even.path, rank=0, world_size=4, batch_packs=2)
    with pytest.raises(StateError, match=r"is 6, on 4 ranks 4 \(batch_packs=1\)"):
        stream.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "the state has seed 1, this stream 0"),
        ({"shuffle": False}, "the state has shuffle False, this stream True"),
    ],
)
def test_a_state_of_another_order_is_refused_with_both_values(small: Written, options, message):
    state = PackStream(small.path, **options).state_dict()
    with pytest.raises(StateError) as caught:
        PackStream(small.path).load_state_dict(state)
    assert message in str(caught.value)


def test_a_state_of_another_output_is_refused(small: Written, even: Written):
    with pytest.raises(StateError, match="plan_ids"):
        PackStream(small.path).load_state_dict(PackStream(even.path).state_dict())


def test_a_state_of_other_shards_under_the_same_plan_is_refused(tmp_path):
    out = write_output(tmp_path / "o", [4, 3])
    state = PackStream(out.path).state_dict()
    write_manifest(out, shards=out.manifest.shards[::-1])
    with pytest.raises(StateError, match="digests"):
        PackStream(out.path).load_state_dict(state)


def test_dates_and_names_in_a_manifest_do_not_enter_the_state(tmp_path):
    out = write_output(tmp_path / "o", [4, 3])
    state = PackStream(out.path).state_dict()
    write_manifest(out, name="other", packsvc_version="9")
    PackStream(out.path).load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [{}, {"version": 2}, {"version": 1, "epoch": 0}, {"version": 1, "epoch": -1, "position": 0, "global_batch": 1}],
)
def test_what_is_no_state_is_refused(small: Written, state: dict):
    with pytest.raises(StateError):
        PackStream(small.path).load_state_dict(state)


def test_a_state_round_trips():
    binding = Binding(
        plan_ids=("p", "q"), digests=("d", "e"), split="train", shuffle=True, seed=1, shares=(0.7, 0.3), unit="packs"
    )
    position = Position(epoch=3, position=12, global_batch=4, handed_out=(7, 5), worker=(1, 2))
    state = json.loads(json.dumps(write_state(binding, position)))
    assert read_state(state, binding, global_batch=6, world_size=1) == position
