"""`packsvc export` at the command line: what it prints, and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.commands.conftest import run  # noqa: F401
from tests.stream.outputs import Written

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_export_prints_what_it_made(run, small: Written, tmp_path: Path):  # noqa: F811
    code, shown, _ = run("export", small.path, tmp_path / "d", "--to", "trl")
    assert code == 0
    assert "padding_free=True" in shown
    assert "train" in shown
    assert "21" in shown


def test_export_as_json(run, small: Written, tmp_path: Path):  # noqa: F811
    code, shown, _ = run("export", small.path, tmp_path / "d", "--to", "megatron", "--split", "train", "--json")
    made = json.loads(shown)
    assert code == 0
    assert made["totals"]["packs"] == 21
    assert made["destination"] == str(tmp_path / "d")


def test_exit_codes_of_export(run, small: Written, tmp_path: Path):  # noqa: F811
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    assert run("export", small.path, tmp_path / "full", "--to", "trl")[0] == 2
    assert run("export", tmp_path / "none", tmp_path / "d", "--to", "trl")[0] == 2
    assert run("export", small.path, tmp_path / "d", "--to", "nemo")[0] == 2
    assert run("export", small.path, tmp_path / "d")[0] == 2


def test_damage_ends_with_exit_code_1(run, small: Written, tmp_path: Path):  # noqa: F811
    shutil.copytree(small.path, tmp_path / "bad")
    shard = tmp_path / "bad" / small.manifest.shards[0].path
    data = bytearray(shard.read_bytes())
    data[200] ^= 4
    shard.write_bytes(data)
    code, shown, said = run("export", tmp_path / "bad", tmp_path / "d", "--to", "trl")
    assert (code, shown) == (1, "")
    assert shard.name in said
    assert "Traceback" not in said


def test_weights_that_cannot_be_said_end_with_exit_code_2(run, weighted: Written, tmp_path: Path):  # noqa: F811
    code, _, said = run("export", weighted.path, tmp_path / "d", "--to", "megatron")
    assert code == 2
    assert "--to examples" in said
