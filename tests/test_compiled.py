"""Compiled code is there wherever it could be built, so that its tests are not left out in silence."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from packsvc.compiled import native


def test_compiled_code_is_there_where_it_can_be_built() -> None:
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if shutil.which("cc") is None or not headers.exists():
        pytest.skip("there is no C compiler, or no header of Python")
    assert native is not None, (
        "packsvc was installed without its compiled code: run `pip install -e .` and read its log"
    )
