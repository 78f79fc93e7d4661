"""Epochs, ranks, the remainder, and the loop around them."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packsvc.errors import ConfigError, FormatError, StateError
from packsvc.stream import PackStream
from packsvc.stream.epoch import Epoch, Steps
from packsvc.stream.options import Remainder, rank_and_world
from packsvc.stream.order import PackOrder
from tests.stream.oracle import fields_of, global_steps, ranks_of, slow_batch, steps_of
from tests.stream.outputs import Written, write_output


def test_manifest_order_gives_every_pack_as_it_was_written(small: Written):
    batches = list(PackStream(small.path, shuffle=False))
    assert steps_of(batches) == [(i,) for i in range(21)]
    for batch, pack in zip(batches, small.packs, strict=True):
        expected = slow_batch([pack])
        assert batch.input_ids.tolist() == expected["input_ids"]
        assert batch.labels.tolist() == expected["labels"]
        assert batch.cu_seqlens.tolist() == expected["cu_seqlens"]


@settings(max_examples=100)
@given(
    shards=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    batch_packs=st.integers(1, 5),
    world=st.integers(1, 8),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 2),
    remainder=st.sampled_from(list(Remainder)),
    shuffle=st.booleans(),
)
def test_d5_every_pack_goes_to_one_rank_at_one_step(shards, batch_packs, world, seed, epoch, remainder, shuffle):
    """Disjoint cover by ranks, whatever the counts; without files, on the function itself."""
    firsts = [sum(shards[:i]) for i in range(len(shards))]
    order = PackOrder(firsts, shards, seed=seed, epoch=epoch, shuffle=shuffle, window_shards=2, window_packs=4)
    steps = Steps(num_packs=sum(shards), global_batch=batch_packs * world, remainder=remainder)
    found = [Epoch([order], None, steps).picks(range(step, step + 1)) for step in range(len(steps))]
    repeated = [np.zeros_like(picks.packs, bool) if picks.repeated is None else picks.repeated for picks in found]
    taken = Counter(int(p) for picks, r in zip(found, repeated, strict=True) for p in picks.packs[~r])
    assert set(taken.values()) <= {1}
    assert sum(taken.values()) + steps.num_dropped == sum(shards)
    assert sum(int(r.sum()) for r in repeated) == steps.num_repeated
    assert all(picks.packs.shape == (1, steps.global_batch) for picks in found)
    for some in (range(len(steps)), range(1, len(steps)), range(0, len(steps), 3)):
        if some:
            together = Epoch([order], None, steps).picks(some)
            assert together.packs.tolist() == [found[step].packs[0].tolist() for step in some]
            assert together.outputs.tolist() == [found[step].outputs[0].tolist() for step in some]
            each = list(together.each())
            assert [one.steps for one in each] == [range(step, step + some.step, some.step) for step in some]
            assert [one.packs.tolist() for one in each] == [found[step].packs.tolist() for step in some]
            where = np.zeros_like(together.packs, bool) if together.repeated is None else together.repeated
            assert where.tolist() == [repeated[step][0].tolist() for step in some]
    assert steps.num_dropped < steps.global_batch
    assert (steps.num_dropped == 0) or remainder is Remainder.DROP


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_same_global_batches_on_any_number_of_ranks(even: Written, world: int):
    assert global_steps(ranks_of(even.path, world, batch_packs=8 // world)) == global_steps(
        ranks_of(even.path, 1, batch_packs=8)
    )


def test_d1_seventeen_packs_on_eight_ranks_give_equal_steps(tmp_path):
    out = write_output(tmp_path / "o", [9, 8])
    drop = ranks_of(out.path, 8)
    assert {len(stream) for stream in drop} == {2}
    assert drop[0].num_dropped_packs == 1
    taken = Counter(pack for step in global_steps(drop) for pack in step)
    assert set(taken.values()) == {1}
    assert len(taken) == 16
    pad = ranks_of(out.path, 8, remainder="pad")
    assert {len(stream) for stream in pad} == {3}
    assert pad[0].num_repeated_packs == 7
    last = [list(stream)[-1] for stream in pad]
    assert [batch.num_repeated_packs for batch in last] == [0, *[1] * 7]
    assert [batch.num_loss_tokens > 0 for batch in last] == [True, *[False] * 7]
    assert {batch.num_loss_tokens_global for batch in last} == {last[0].num_loss_tokens}
    assert all((batch.labels == -100).all() for batch in last[1:])


def test_d2_row_groups_are_no_unit_of_splitting(tmp_path):
    out = write_output(tmp_path / "o", [12], rows_per_group=4)
    taken = Counter(pack for step in global_steps(ranks_of(out.path, 2)) for pack in step)
    assert taken == Counter(range(12))


def test_d3_order_comes_from_the_manifest_and_not_from_a_directory(tmp_path):
    one = write_output(tmp_path / "a" / "o", [5, 3])
    other = write_output(tmp_path / "b" / "o", [5, 3])
    for path in sorted(os.listdir(f"{other.path}/shards"), reverse=True):
        os.utime(f"{other.path}/shards/{path}", (1, 1))
    (tmp_path / "b" / "o" / "shards" / "a-stray.parquet").write_bytes(b"not ours")
    assert [fields_of(b) for b in PackStream(one.path)] == [fields_of(b) for b in PackStream(other.path)]
    assert PackStream(one.path).state_dict() == PackStream(other.path).state_dict()


def test_x17_the_global_token_mean_needs_no_communication(small: Written):
    """Per rank sums over the global count give the token mean; the mean of rank means does not."""
    ranks = [list(stream) for stream in ranks_of(small.path, 4, batch_packs=2)]
    apart = 0
    for parts in zip(*ranks, strict=True):
        total = sum(part.num_loss_tokens for part in parts)
        assert {part.num_loss_tokens_global for part in parts} == {total}
        assert all(int((part.labels != -100).sum()) == part.num_loss_tokens for part in parts)
        apart += len({part.num_loss_tokens for part in parts}) > 1
    assert apart > 0


def test_balance_keeps_global_batches_and_evens_out_the_cost(tmp_path):
    out = write_output(tmp_path / "o", [16, 16], mean_length=12, seq_len=48)
    plain = global_steps(ranks_of(out.path, 4, batch_packs=2))
    balanced = ranks_of(out.path, 4, batch_packs=2, balance=True)
    found = global_steps(balanced)
    assert [sorted(step) for step in found] == [sorted(step) for step in plain]
    assert found != plain
    cost = [int(pack.sum_squared_lengths[0]) for pack in out.packs]

    def spread(steps: list[tuple[int, ...]]) -> int:
        loads = [[sum(cost[p] for p in step[r * 2 : r * 2 + 2]) for r in range(4)] for step in steps]
        return sum(max(load) - min(load) for load in loads)

    assert spread(found) < spread(plain) / 2


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_threads_change_nothing(small: Written, threads: int):
    expected = [fields_of(batch) for batch in PackStream(small.path, batch_packs=2, threads=0)]
    assert [fields_of(batch) for batch in PackStream(small.path, batch_packs=2, threads=threads)] == expected


def test_a_second_iter_starts_the_next_epoch_also_after_a_break(small: Written):
    epochs = [steps_of(PackStream(small.path, epoch=e)) for e in range(4)]
    assert len({tuple(e) for e in epochs}) == 4
    stream = PackStream(small.path)
    assert steps_of(stream) == epochs[0]
    assert steps_of(islice(stream, 3)) == epochs[1][:3]
    assert len(stream) == 21
    assert steps_of(stream) == epochs[2]
    stream.set_epoch(1)
    assert steps_of(stream) == epochs[1]
    stream.set_epoch(1)
    assert steps_of(islice(stream, 2)) == epochs[1][:2]
    stream.set_epoch(3)
    assert steps_of(stream) == epochs[3]


def test_an_iterator_that_was_overtaken_is_refused_and_repeats_nothing(small: Written):
    stream = PackStream(small.path)
    first = iter(stream)
    next(first)
    second = iter(stream)
    assert next(second).pack_indices == steps_of(PackStream(small.path, epoch=1))[0]
    with pytest.raises(StateError, match="moved the stream"):
        next(first)
    next(second)
    stream.set_epoch(5)
    with pytest.raises(StateError, match="moved the stream"):
        next(second)


def test_a_closed_stream_says_so(small: Written):
    with PackStream(small.path) as stream:
        reading = iter(stream)
        next(reading)
    with pytest.raises(StateError, match="closed"):
        next(reading)
    with pytest.raises(StateError, match="closed"):
        next(iter(stream))


def test_threads_end_with_their_iteration(small: Written):
    import threading

    for _ in PackStream(small.path, threads=3):
        break
    assert not [t for t in threading.enumerate() if t.name.startswith("packsvc-read")]


def test_nothing_left_after_dropping_is_refused_with_the_numbers(small: Written):
    with pytest.raises(ConfigError, match=r"21 packs .* 24 \(batch_packs 3 x world_size 8\)"):
        PackStream(small.path, batch_packs=3, rank=0, world_size=8)
    assert len(PackStream(small.path, batch_packs=3, rank=0, world_size=8, remainder="pad")) == 1


def test_pad_repeats_as_often_as_needed(tmp_path):
    out = write_output(tmp_path / "o", [3])
    batch = next(iter(PackStream(out.path, batch_packs=8, remainder="pad", shuffle=False)))
    assert batch.pack_indices == (0, 1, 2, 0, 1, 2, 0, 1)
    assert batch.num_repeated_packs == 5


def test_splits_are_read_apart(tmp_path):
    out = write_output(tmp_path / "o", [4, 3], split="valid")
    assert len(PackStream(out.path, split="valid")) == 7
    with pytest.raises(ConfigError, match="no split 'train'; it has valid"):
        PackStream(out.path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_packs": 0}, "batch_packs is 0"),
        ({"batch_packs": 1.5}, "batch_packs is 1.5"),
        ({"rank": 2, "world_size": 2}, "ranks count from 0 to 1"),
        ({"rank": 1}, "give both"),
        ({"world_size": 2}, "there is no rank"),
        ({"remainder": "short"}, "remainder is 'short'; it must be one of drop, pad"),
        ({"layout": "ragged"}, "layout is 'ragged'"),
        ({"unit": "rows"}, "unit is 'rows'"),
        ({"check": "never"}, "check is 'never'"),
        ({"epoch": -1}, "epoch is -1"),
        ({"threads": -1}, "threads is -1"),
        ({"align": 0}, "align is 0"),
        ({"device": "cuda:77"}, "no CUDA device"),
        ({"device": "nowhere"}, "device is 'nowhere'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(small: Written, options, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError) as caught:
        PackStream(small.path, **options)
    assert message in str(caught.value)


def test_rank_and_world_come_from_the_environment():
    assert rank_and_world(None, None, environment={"RANK": "3", "WORLD_SIZE": "4"}) == (3, 4)
    assert rank_and_world(0, 2, environment={"RANK": "3", "WORLD_SIZE": "4"}) == (0, 2)
    assert rank_and_world(None, None, environment={"RANK": "3"}) == (0, 1)
    assert rank_and_world(None, None, environment={"WORLD_SIZE": "1"}) == (0, 1)
    assert rank_and_world(1, 2, environment={"WORLD_SIZE": "4"}) == (1, 2)
    with pytest.raises(ConfigError, match="WORLD_SIZE=4 and no RANK, so that every process would read all packs"):
        rank_and_world(None, None, environment={"WORLD_SIZE": "4"})
    assert rank_and_world(None, None, environment={}) == (0, 1)
    assert rank_and_world(0, None, environment={}) == (0, 1)
    with pytest.raises(ConfigError, match="not numbers"):
        rank_and_world(None, None, environment={"RANK": "x", "WORLD_SIZE": "4"})


def test_an_output_of_another_tokenizer_is_refused(small: Written):
    PackStream(small.path, tokenizer="a" * 64)
    with pytest.raises(FormatError, match=f"{'a' * 64}.*{'b' * 64}"):
        PackStream(small.path, tokenizer="b" * 64)
    with pytest.raises(ConfigError, match="tokenizer is a dict"):
        PackStream(small.path, tokenizer={})


def test_a_tokenizer_is_known_by_what_it_does(qwen3_path, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen3_path)
    from packsvc.encode import fingerprint

    out = write_output(tmp_path / "o", [2], fingerprint=fingerprint(tokenizer))
    PackStream(out.path, tokenizer=tokenizer)
    PackStream(out.path, tokenizer=str(qwen3_path))
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(FormatError, match="Its ids mean other tokens"):
        PackStream(out.path, tokenizer=tokenizer)


def test_a_forked_process_may_iterate_anew_but_not_go_on(small: Written):
    stream = PackStream(small.path)
    reading = iter(stream)
    next(reading)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(reading)
            answer = b"went on"
        except StateError as error:
            answer = b"refused" if "fork" in str(error) else b"?"
        answer += b", %d" % len(list(stream))
        os.write(send, answer)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(receive, 100) == b"refused, 21"
    assert len(list(reading)) == 20
