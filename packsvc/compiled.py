"""The compiled code, where a C compiler was there to build it; everything it does has a slower twin."""

from __future__ import annotations

from typing import Any

__all__ = ["native"]

native: Any
"""The module `packsvc._native`, or None."""
try:
    from packsvc import _native as native
except ImportError:
    native = None
