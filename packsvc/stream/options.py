"""The choices a reader has, and how arguments become them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from packsvc.errors import ConfigError


class Remainder(StrEnum):
    """What becomes of packs that do not fill a global batch at the end of an epoch."""

    DROP = "drop"
    PAD = "pad"
    """Packs from the start of the order are repeated without loss, so that none is dropped."""


class Layout(StrEnum):
    """How long the row is."""

    TRIMMED = "trimmed"
    """Real tokens only: no compute on padding, another length at each step."""
    PADDED = "padded"
    """`seq_len` tokens a pack, always: the tail is a segment of its own."""


class Unit(StrEnum):
    """What the shares of a mixture are shares of."""

    LOSS_TOKENS = "loss_tokens"
    TOKENS = "tokens"
    PACKS = "packs"


class Check(StrEnum):
    """When a shard's size, metadata and counts are compared with the manifest."""

    TOUCH = "touch"
    """Before the first batch with any of its packs."""
    ALL = "all"
    """All of them at opening."""


E = TypeVar("E", bound=StrEnum)


def choice(kind: type[E], name: str, value: str) -> E:
    """`value` as one of the choices of `name`. Raises ConfigError naming them."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(kind)}") from None


def whole_number(name: str, value: object, *, least: int) -> int:
    """`value` as a Python int of at least `least`. Raises ConfigError."""
    number = None
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        number = value.__index__()
    if not isinstance(number, int) or number < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return number


def size_in_bytes(name: str, value: int | str | None) -> int | None:
    """Bytes from a number or a text like "20GB"; None stays None. Raises ConfigError."""
    if isinstance(value, str):
        from packsvc.config import parse_size

        try:
            value = parse_size(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None
    return None if value is None else whole_number(name, value, least=1)


def rank_and_world(
    rank: int | None, world_size: int | None, *, environment: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Which rank of how many this is: what is given, else torch.distributed, else RANK and WORLD_SIZE, else 0 of 1.

    Raises:
        ConfigError: The two do not fit, or only one of them can be found.
    """
    environment = os.environ if environment is None else environment
    found_rank, found_world = _surroundings(environment)
    if rank is None and world_size is None and found_world is None and environment.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"the environment has WORLD_SIZE={environment['WORLD_SIZE']} and no RANK, so that every process would read "
            "all packs; set RANK too, or give rank and world_size"
        )
    if world_size is None and rank is not None and found_world is None and rank != 0:
        raise ConfigError(f"rank is {rank}, but there is no world_size; give both")
    rank = found_rank if rank is None else rank
    world_size = found_world if world_size is None else world_size
    world = whole_number("world_size", 1 if world_size is None else world_size, least=1)
    if rank is None and world > 1:
        raise ConfigError(f"world_size is {world}, but there is no rank; give both")
    number = whole_number("rank", 0 if rank is None else rank, least=0)
    if number >= world:
        raise ConfigError(f"rank is {number} and world_size {world}; ranks count from 0 to {world - 1}")
    return number, world


def _surroundings(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Rank and world size of the process group, else of the environment; both or none."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    texts = environment.get("RANK"), environment.get("WORLD_SIZE")
    if None in texts:
        return None, None
    try:
        return int(texts[0] or ""), int(texts[1] or "")
    except ValueError:
        raise ConfigError(f"the environment has RANK={texts[0]!r} and WORLD_SIZE={texts[1]!r}; not numbers") from None
