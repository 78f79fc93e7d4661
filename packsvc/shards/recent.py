"""Values kept by key up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class RecentlyUsed(Generic[V]):
    """Values by key up to a number of bytes, least recently used out first. The newest always stays."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Any, tuple[V, int]] = OrderedDict()
        self._size = 0

    def get(self, key: Any) -> V | None:
        """The value, now the most recently used; None where there is none."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: Any, value: V, size_bytes: int) -> None:
        """Keep a value, and let go of the oldest ones over the limit."""
        with self._lock:
            old = self._held.pop(key, None)
            self._size += size_bytes - (old[1] if old else 0)
            self._held[key] = (value, size_bytes)
            while self._size > self._limit and len(self._held) > 1:
                _, (_, size) = self._held.popitem(last=False)
                self._size -= size
