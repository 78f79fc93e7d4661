"""TRL: the combinations that leak are refused, with what to change; the right one goes through its own collator."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.trainers import ARGUMENTS, tiny_llama, tiny_tokenizer
from packsvc.attention import register
from packsvc.errors import ConfigError
from packsvc.export import export_dataset
from packsvc.trainers import check_sft, sft_config, sft_dataset, sft_trainer
from tests.export.oracle import from_labels

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def exported(eight: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sft") / "exported"
    export_dataset(eight, str(folder), to="trl")
    return str(folder)


def build(exported: Any, folder: Path, **more: Any) -> Any:
    args = more.pop("args", None) or sft_config(output_dir=str(folder), **ARGUMENTS)
    return sft_trainer(exported, model=tiny_llama(register()), args=args, processing_class=tiny_tokenizer(), **more)


def test_the_config_has_what_packed_rows_need(tmp_path: Path):
    args = sft_config(output_dir=str(tmp_path), **ARGUMENTS)
    assert (args.padding_free, args.packing, args.max_length, args.remove_unused_columns) == (True, False, None, False)


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ({"padding_free": False}, "padding_free is False: .*mask of ones.*Set padding_free=True"),
        ({"packing": True, "max_length": 64}, "packing is True: .*packing them again"),
        ({"max_length": 32}, "max_length is 32: it would cut input_ids and labels but not seq_lengths"),
        ({"remove_unused_columns": True}, "remove_unused_columns is True"),
        ({"eval_packing": True}, "eval_packing is True"),
        ({"assistant_only_loss": True}, "assistant_only_loss is True: labels are masked already"),
        ({"completion_only_loss": True}, "completion_only_loss is True"),
    ],
)
def test_x1_settings_that_leak_are_refused(exported: str, tmp_path: Path, setting: dict[str, Any], found: str):
    with pytest.raises(ConfigError, match=found):
        sft_config(output_dir=str(tmp_path), **(ARGUMENTS | setting))
    args = sft_config(output_dir=str(tmp_path), **ARGUMENTS)
    for name, value in setting.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError, match=found):
        build(exported, tmp_path, args=args)


def test_x11_context_parallelism_is_refused(exported: str, tmp_path: Path):
    args = sft_config(output_dir=str(tmp_path), **ARGUMENTS)
    args.parallelism_config = SimpleNamespace(cp_size=2, sp_size=1)
    with pytest.raises(ConfigError, match="examples would attend to each other"):
        build(exported, tmp_path, args=args)


def test_x17_a_mean_of_rank_means_is_refused(exported: str, tmp_path: Path):
    args = SimpleNamespace(**vars(sft_config(output_dir=str(tmp_path), **ARGUMENTS)))
    args.average_tokens_across_devices, args.world_size = False, 2
    with pytest.raises(ConfigError, match="mean of rank means"):
        build(exported, tmp_path, args=args)
    with pytest.raises(ConfigError, match=r"make them by packsvc\.trainers\.sft_config"):
        sft_trainer(exported, model=None, args=None)


def test_x1_rows_without_their_boundaries_are_refused(exported: str, tmp_path: Path):
    rows = sft_dataset(exported)
    with pytest.raises(ConfigError, match="no column seq_lengths"):
        build(rows.remove_columns("seq_lengths"), tmp_path)
    with pytest.raises(ConfigError, match="no column labels"):
        build(rows.remove_columns("labels"), tmp_path)
    cut = rows.map(lambda row: {"input_ids": row["input_ids"][:5], "labels": row["labels"][:5]})
    with pytest.raises(ConfigError, match="5 ids, 5 labels and seq_lengths that add up to"):
        build(cut, tmp_path)


def test_x23_another_collator_is_refused(exported: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="data_collator was given"):
        build(exported, tmp_path, data_collator=list)
    trainer = build(exported, tmp_path)
    check_sft(trainer)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {**collate(rows), "attention_mask": 1}
    with pytest.raises(ConfigError, match="attention_mask"):
        check_sft(trainer)
    trainer.data_collator = lambda rows: {k: v for k, v in collate(rows).items() if k != "position_ids"}
    with pytest.raises(ConfigError, match="does not keep the boundaries"):
        check_sft(trainer)


def test_trls_own_collator_reads_back_what_was_packed(exported: str, eight: str, tmp_path: Path):
    """By TRL's code: the segments and the targets of each row."""
    from tests.export.oracle import streamed

    trainer = build(exported, tmp_path)
    found = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        bounds = batch["cu_seq_lens_q"].tolist()
        found.append([from_labels(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(bounds)])
    wanted = streamed(eight)
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))


def test_an_unfinished_export_and_an_unknown_split_are_refused(exported: str, tmp_path: Path):
    shutil.copytree(exported, tmp_path / "half")
    (tmp_path / "half" / "export.json").unlink()
    with pytest.raises(ConfigError, match="not a finished export"):
        sft_dataset(str(tmp_path / "half"))
    with pytest.raises(ConfigError, match="no rows of the split 'valid'; it has train"):
        sft_dataset(exported, split="valid")
