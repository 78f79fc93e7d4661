"""benchmarks/gpu.py runs, at toy size on the CPU, and every line it prints is whole."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_gpu_script_runs_on_the_cpu(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gpu.run("cpu", replace(gpu.TOY, steps=1, repeats=1))
    finally:
        torch.set_num_threads(threads)
        for name in ("gpu", "stream"):
            sys.modules.pop(name, None)
    lines = {line["figure"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert len(lines) == 14
    assert all(line["benchmark"] == "gpu" and "toy size" in line["hardware"] for line in lines.values())
    assert lines["isolation_change"]["value"] == lines["isolation_gradient"]["value"] == 0
    assert lines["kernel_error_dv"]["value"] <= 2
    assert lines["isolation_control"]["value"] > 0.1


def test_a_machine_without_a_gpu_or_a_library_is_told_so(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu.main()
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "a_library_that_is_not"))
    with pytest.raises(SystemExit, match="needs a_library_that_is_not; nothing was measured"):
        gpu.main()
    sys.modules.pop("gpu", None)
