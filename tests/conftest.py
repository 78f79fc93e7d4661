"""Shared set-up: nothing in the suite may reach a hub or, unless it says so, Ray; threads are kept to one."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("RAY_worker_niceness", "0")  # else Ray's workers wait for every other process of a busy machine

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "packsvc", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("packsvc")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait for Ray come first, then other slow ones, so that workers of the suite end together."""
    rank: dict[Path, int] = {}
    for item in items:
        mine = 0 if item.get_closest_marker("ray_local") else 1 if item.get_closest_marker("slow") else 2
        rank[item.path] = min(mine, rank.get(item.path, 2))
    items.sort(key=lambda item: rank[item.path])


@pytest.fixture(autouse=True)
def _no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing Ray raises in every test that is not marked `ray_local`: the core is pure."""
    if request.node.get_closest_marker("ray_local") is None:
        monkeypatch.setitem(sys.modules, "ray", None)


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The folder pipelines/quickstart: job.yaml, data, tokenizers."""
    return ROOT / "pipelines" / "quickstart"


@pytest.fixture(scope="session")
def qwen3_path(quickstart: Path) -> Path:
    """Folder of the Qwen3 tokenizer: chat template with tools and reasoning, 151,669 tokens."""
    return quickstart / "tokenizers" / "qwen3"


@pytest.fixture(scope="session")
def smollm2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the SmolLM2 tokenizer: a short ChatML template without tools, 49,152 tokens, pad = stop token."""
    from benchmarks.inputs import unpack

    return unpack(ROOT / "tests" / "data" / "tokenizers" / "smollm2", tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def edge_cases_path() -> Path:
    """26 hand-written conversations in JSONL: whitespace, typed control tokens, emoji, think tags, odd roles."""
    return ROOT / "tests" / "data" / "edge_cases.jsonl"
