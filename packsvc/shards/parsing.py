"""JSON values that know where they stand, so that every complaint names the key, the value and the file."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from packsvc.errors import FormatError
from packsvc.types import JsonDict


@dataclass(frozen=True, slots=True)
class Value:
    """A value read from JSON, with the file it came from and the keys that lead to it."""

    raw: Any
    where: str
    key: str = ""

    @property
    def is_null(self) -> bool:
        return self.raw is None

    def get(self, key: str) -> Value:
        """The value under `key`. Raises FormatError when there is none."""
        if not isinstance(self.raw, dict):
            self._refuse("an object")
        if key not in self.raw:
            raise FormatError(f"{self.where}: {self._name(key)} is missing; the file is damaged or not packsvc's")
        return Value(self.raw[key], self.where, self._name(key))

    def table(self) -> dict[str, Value]:
        """The values of an object."""
        if not isinstance(self.raw, dict):
            self._refuse("an object")
        return {key: Value(value, self.where, self._name(key)) for key, value in self.raw.items()}

    def items(self) -> list[Value]:
        """The values of a list."""
        if not isinstance(self.raw, list):
            self._refuse("a list")
        return [Value(value, self.where, f"{self.key}[{i}]") for i, value in enumerate(self.raw)]

    def object(self) -> JsonDict:
        """A JSON object as it stands."""
        if not isinstance(self.raw, dict):
            self._refuse("an object")
        return dict(self.raw)

    def rest(self, known: Sequence[str]) -> JsonDict:
        """What an object holds besides the known keys."""
        return {key: value for key, value in self.object().items() if key not in known}

    def text(self) -> str:
        """A string."""
        if not isinstance(self.raw, str):
            self._refuse("a string")
        return self.raw

    def integer(self, least: int = 0, most: int | None = None) -> int:
        """An integer from `least` to `most`."""
        if not isinstance(self.raw, int) or isinstance(self.raw, bool) or self.raw < least:
            self._refuse(f"an integer of at least {least}")
        if most is not None and self.raw > most:
            self._refuse(f"an integer of at most {most}")
        return self.raw

    def number(self) -> float:
        """A finite number."""
        if not isinstance(self.raw, (int, float)) or isinstance(self.raw, bool) or not math.isfinite(self.raw):
            self._refuse("a number")
        return float(self.raw)

    def sha256(self) -> str:
        """64 hex digits."""
        if not re.fullmatch(r"[0-9a-f]{64}", self.text()):
            self._refuse("64 hex digits")
        return self.text()

    def path(self) -> str:
        """A path that stays inside the output, whatever file system it is read from."""
        path = self.text()
        parts = path.split("/")
        inside = path != "" and posixpath.normpath(path) == path and ".." not in parts and path != "."
        if not inside or path.startswith(("/", "~")) or any(c in path for c in "\\:\0"):
            raise FormatError(
                f"{self.where}: {self.key} is {path!r}, which leaves the output; refusing to read outside of it"
            )
        return path

    def _name(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else str(key)

    def _refuse(self, wanted: str) -> NoReturn:
        shown = repr(self.raw)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise FormatError(f"{self.where}: {self.key or 'the whole'} must be {wanted}, not {shown}")
