"""What of an example becomes one segment: all of it, or one conversation a user turn.

With `turns: each` a chat of k user turns gives k units. Unit j is the conversation up to the end of turn j, as the
model would see it then, and learns that turn's answers only. Users who speak twice in a row speak one turn; what
stands before the first user message belongs to the first turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from packsvc.config import Turns
from packsvc.encode.rendered import RowRefused
from packsvc.types import Example, ExampleKind, JsonDict

Weights = tuple[float | None, ...]
PartWeights = tuple[Weights | None, ...]


class Unit(NamedTuple):
    """An example, or the part of it that one segment is made of."""

    example: Example
    row: int
    """Number of the example in its batch."""
    number: int
    """Number of the unit in its row."""
    messages: list[JsonDict]
    weights: Weights
    part_weights: PartWeights
    refused: RowRefused | None = None
    """Why it is not to be encoded at all."""


def fractional_weight(example: Example) -> float | None:
    """The first weight of an example that is neither 0 nor 1."""
    for weights in (example.weights, *filter(None, example.part_weights)):
        if weights.count(None) < len(weights):
            for weight in weights:
                if weight is not None and weight != 0 and weight != 1:
                    return weight
    return None


def units_of(example: Example, *, row: int, turns: Turns) -> Iterator[Unit]:
    """The units of an example in order; there is at least one."""
    if turns is Turns.WHOLE or example.kind is not ExampleKind.CHAT:
        yield Unit(example, row, 0, example.messages, example.weights, example.part_weights)
        return
    ends = turn_ends(example.messages)
    for number, end in enumerate(ends):
        yield _turn(example, row, number, ends[number - 1] if number else 0, end)


def turn_ends(messages: Sequence[JsonDict]) -> list[int]:
    """For each user turn, the number of messages up to its end; one turn when nobody is a user."""
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    # a turn ends before a user message that another message parts from the user message before it
    return [*(b for a, b in pairwise(users) if b - a > 1), len(messages)]


def without_oldest(unit: Unit, count: int) -> Unit:
    """The unit less its oldest `count` exchanges: a user message and all up to the next, after the system message."""
    starts = exchange_starts(unit.messages)
    head, tail = starts[0], starts[count]
    keep = [*range(head), *range(tail, len(unit.messages))]
    return Unit(
        unit.example,
        unit.row,
        unit.number,
        [unit.messages[i] for i in keep],
        tuple(unit.weights[i] for i in keep if i < len(unit.weights)),
        tuple(unit.part_weights[i] for i in keep if i < len(unit.part_weights)),
    )


def exchange_starts(messages: Sequence[JsonDict]) -> list[int]:
    """Where exchanges begin. The first also holds what an assistant says before any user."""
    head = 0
    while head < len(messages) and messages[head].get("role") in ("system", "developer"):
        head += 1
    users = [i for i in range(head, len(messages)) if messages[i].get("role") == "user"]
    return [head, *users[1:]]


def _turn(example: Example, row: int, number: int, start: int, end: int) -> Unit:
    """Messages up to `end`, where only those from `start` on may be learned."""
    silent = tuple(0.0 for _ in range(start))
    weights = (*silent, *_padded(example.weights, end)[start:])
    parts = (*(None for _ in range(start)), *_padded(example.part_weights, end)[start:])
    return Unit(example, row, number, example.messages[:end], weights, parts)


def _padded(values: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    return (*values[:length], *(None for _ in range(length - len(values))))
