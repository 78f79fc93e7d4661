"""Megatron-Bridge's packed dataset, loaded without the parts of its package that need a GPU.

`megatron.bridge` imports Transformer Engine and all of Megatron-Core when it is opened. The module with the dataset
needs four names of those; they stand in here, and everything that is tested is its own code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("bridge", "bridge.data", "bridge.data.datasets", "bridge.training", "bridge.training.tokenizers",
            "bridge.utils", "core")  # fmt: skip
NAME = "megatron.bridge.data.datasets.sft"


def load_megatron_sft() -> Any:
    """The module; the test is skipped where Megatron-Bridge and Megatron-Core are not installed."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    found = importlib.util.find_spec("megatron")
    roots = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    root = next((r for r in roots if (r / "bridge").is_dir() and (r / "core").is_dir()), None)
    if root is None:
        pytest.skip("megatron-bridge and megatron-core are not installed")
    for name in PACKAGES:
        package = ModuleType(f"megatron.{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    stand_in("megatron.bridge.training.tokenizers.tokenizer", MegatronTokenizer=object)
    stand_in("megatron.core.tokenizers", MegatronTokenizer=object)
    stand_in("megatron.bridge.utils.common_utils", get_rank_safe=lambda: 0)
    return importlib.import_module(NAME)


def stand_in(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
