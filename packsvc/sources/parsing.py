"""Exact JSON: what is parsed has the value that was written, or the text is refused.

orjson reads a line first, at several times the speed of the standard library; where it would change a value
(integers beyond 64 bits become floats) or refuses the text, the standard library decides. NaN and infinities
are not JSON, numbers that overflow to infinity and lone surrogates cannot be kept: all are refused.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

_DIGITS = bytes(48 if 48 <= b <= 57 else 120 for b in range(256))
_LONG_NUMBER = b"0" * 19


class NotJson(ValueError):
    """The text is not JSON, or holds a value that cannot be kept; the message says why."""


def parse_json(text: bytes) -> Any:
    """The value of one JSON text, exactly.

    Raises:
        NotJson: See the module.
    """
    if _LONG_NUMBER not in text.translate(_DIGITS):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            pass
    return parse_json_slowly(text)


def parse_json_slowly(text: bytes) -> Any:
    """`parse_json` by the standard library alone."""
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
        check_text(value)
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 at byte {error.start}") from None
    except NotJson:
        raise
    except RecursionError:
        raise NotJson("nested too deeply") from None
    except ValueError as error:
        raise NotJson(str(error)) from None
    return value


def check_text(value: Any) -> None:
    """Refuse a value whose text cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise NotJson("a lone surrogate (\\ud800 to \\udfff), which no UTF-8 text can hold") from None


def _no_constant(name: str) -> None:
    raise NotJson(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise NotJson(f"the number {text[:40]} is too large to be kept")
    return value


def shown(data: bytes) -> str:
    """Bytes as text that can be written anywhere; what is not UTF-8 is escaped."""
    return data.decode("utf-8", "backslashreplace")
