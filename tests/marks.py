"""Marks that tests of several rooms share."""

from __future__ import annotations

import pytest

from packsvc.compiled import native

needs_compiled = pytest.mark.skipif(native is None, reason="no C compiler was there to build packsvc._native")
"""`tests/test_compiled.py` sees to it that compiled code is there wherever it can be built."""
