"""Which rows of a source are taken, and how often."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from packsvc.types import RawRow


def passes(row: RawRow, where: Mapping[str, Any]) -> bool:
    """Whether a row meets every condition: equal to the value, or among the values of a list; where the row's
    own value is a list, one of its items is. A missing column equals null only. A row that is no object passes:
    it is rejected with its reason, not filtered."""
    if not where or row.error is not None or not isinstance(row.record, dict):
        return True
    return all(_meets(row.record.get(column), wanted) for column, wanted in where.items())


def _meets(value: Any, wanted: Any) -> bool:
    if _equal(value, wanted):
        return True
    values = value if isinstance(value, list) else [value]
    wanteds = wanted if isinstance(wanted, list) else [wanted]
    return any(_equal(v, w) for v in values for w in wanteds)


def _equal(value: Any, wanted: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def copies(weight: float, *, seed: int, source: str, path: str, row: int) -> int:
    """How often a row is packed: 2 is twice, 0.3 a seeded 30 %, 2.3 twice and a seeded 30 % once more.

    The first eight bytes of SHA-256 over the JSON array [seed, "weight", source, path, row], without spaces and
    in UTF-8, are a big-endian fraction of 2^64; a row is in if it lies below the fraction of the weight.
    """
    whole = math.floor(weight)
    fraction = weight - whole
    if fraction == 0:
        return whole
    key = json.dumps([seed, "weight", source, path, row], ensure_ascii=False, separators=(",", ":"))
    drawn = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big")
    return whole + (drawn < int(fraction * 2**64))
