"""Where a reader stands, in a few integers that any number of ranks and threads can go on from.

The position counts packs of the global order handed out in the epoch. It is bound to what the order is made of:
plan and shard digests, seed, shuffle, split, shares. Dates, paths, ranks, threads and workers do not enter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packsvc.errors import StateError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What an order is made of; a state fits where all of it is equal."""

    plan_ids: tuple[str, ...]
    digests: tuple[str, ...]
    """One an output: of plan_id and the shards' digests."""
    split: str
    shuffle: bool
    seed: int
    shares: tuple[float, ...]
    """Empty unless outputs are mixed."""
    unit: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        mixed = {"shares": list(self.shares), "unit": self.unit} if self.shares else {}
        return {
            "plan_ids": list(self.plan_ids),
            "digests": list(self.digests),
            "split": self.split,
            "shuffle": self.shuffle,
            "seed": self.seed,
            **mixed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in the global order, and what was handed out to get there."""

    epoch: int
    position: int
    """Packs of this epoch's global order handed out."""
    global_batch: int
    """With which it was reached."""
    handed_out: tuple[int, ...]
    """Units of each output handed out so far, for the achieved shares; empty unless outputs are mixed."""
    worker: tuple[int, int] | None = None
    """In a DataLoader worker: its number and how many there are; `position` is then where its next batch starts."""


def write_state(binding: Binding, position: Position) -> dict[str, Any]:
    """A state as plain JSON values."""
    state: dict[str, Any] = {
        "version": VERSION,
        "epoch": position.epoch,
        "position": position.position,
        "global_batch": position.global_batch,
        **binding.to_json(),
    }
    if binding.shares:
        state["handed_out"] = list(position.handed_out)
    if position.worker is not None:
        state["worker"], state["num_workers"] = position.worker
    return state


def read_state(state: Mapping[str, Any], binding: Binding, *, global_batch: int, world_size: int) -> Position:
    """The position in a state, if this reader can go on from it exactly.

    Raises:
        StateError: It belongs to another data set, order or version, or its position falls inside a global
            batch; the message has both values and what to do.
    """
    try:
        found = _parse(state)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no state of a PackStream: {type(error).__name__}: {error}") from error
    expected = binding.to_json()
    for key, mine in expected.items():
        theirs = state.get(key)
        if theirs != mine:
            raise StateError(f"the state has {key} {_show(theirs)}, this stream {_show(mine)}; {_ADVICE[key]}")
    if (extra := {"shares", "unit"} & set(state)) and not binding.shares:
        raise StateError(f"the state is of a mixture ({', '.join(sorted(extra))} set), this stream reads one output")
    if found.position % global_batch:
        raise StateError(
            f"the state stands at pack {found.position} of epoch {found.epoch}, reached with a global batch of "
            f"{found.global_batch}; this stream's global batch is {global_batch}, and {found.position} is no multiple "
            f"of it. {_nearest(found.position, global_batch, world_size)}"
        )
    return found


_ADVICE = {
    "plan_ids": "it belongs to another data set, or to one packed by another job",
    "digests": "the shards are not those the state was taken on",
    "split": "open the stream with the state's split",
    "shuffle": "open the stream with the state's shuffle",
    "seed": "open the stream with the state's seed",
    "shares": "open the stream with the state's shares",
    "unit": "open the stream with the state's unit",
}


def _parse(state: Mapping[str, Any]) -> Position:
    version = state["version"]
    if version != VERSION:
        raise StateError(f"the state is of version {version!r}; this packsvc reads version {VERSION}")
    numbers = {key: state[key] for key in ("epoch", "position", "global_batch")}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (key == "global_batch"):
            raise ValueError(f"{key} is {value!r}")
    worker = (int(state["worker"]), int(state["num_workers"])) if "worker" in state else None
    return Position(handed_out=tuple(int(n) for n in state.get("handed_out", ())), worker=worker, **numbers)


def _nearest(position: int, wanted: int, world_size: int) -> str:
    """Which global batches near the wanted one divide the position."""
    divisors = _divisors(position)
    here = [d for d in divisors if d % world_size == 0]
    nearest = _closest(divisors, wanted)
    text = f"The nearest global batch that fits is {' or '.join(map(str, nearest))}"
    if any(n % world_size == 0 for n in nearest):
        fitting = next(n for n in nearest if n % world_size == 0)
        return f"{text} (batch_packs={fitting // world_size} on {world_size} ranks)."
    if here:
        fitting = _closest(here, wanted)[0]
        return f"{text}, on {world_size} ranks {fitting} (batch_packs={fitting // world_size})."
    return f"{text}; none is a multiple of {world_size}, so another number of ranks is needed."


def _closest(values: Sequence[int], wanted: int) -> list[int]:
    distance = min(abs(value - wanted) for value in values)
    return [value for value in values if abs(value - wanted) == distance]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _show(value: Any) -> str:
    """Long digests cut to what a person compares."""
    if isinstance(value, list):
        return "[" + ", ".join(_show(item) for item in value) + "]"
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 20 else repr(value)
