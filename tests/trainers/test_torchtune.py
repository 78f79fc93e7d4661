"""The dataset component of torchtune's recipes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from packsvc.errors import ConfigError
from packsvc.export import export_dataset
from packsvc.trainers import torchtune_packs


def test_rows_are_tensors_that_its_collator_stacks(eight: str, tmp_path: Path):
    export_dataset(eight, str(tmp_path / "d"), to="torchtune")
    packs = torchtune_packs(SimpleNamespace(max_seq_len=64), path=str(tmp_path / "d"), packed=True)
    assert len(packs) == 8
    assert packs.packed
    row = packs[3]
    assert {name: value.dtype for name, value in row.items()} == dict.fromkeys(
        ("tokens", "labels", "input_pos", "seq_lens"), torch.int64
    )
    assert torch.stack([packs[i]["tokens"] for i in range(8)]).shape == (8, 64)
    assert int(row["seq_lens"].sum()) == 64


def test_what_would_cut_or_mix_rows_is_refused(eight: str, tmp_path: Path):
    export_dataset(eight, str(tmp_path / "d"), to="torchtune")
    export_dataset(eight, str(tmp_path / "other"), to="trl")
    with pytest.raises(ConfigError, match="packed: True"):
        torchtune_packs(path=str(tmp_path / "d"), packed=False)
    with pytest.raises(ConfigError, match="set it to 64"):
        torchtune_packs(SimpleNamespace(max_seq_len=32), path=str(tmp_path / "d"))
    with pytest.raises(ConfigError, match="no column tokens"):
        torchtune_packs(path=str(tmp_path / "other"))
