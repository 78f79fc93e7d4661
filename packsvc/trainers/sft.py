"""TRL's SFTTrainer on rows that `packsvc export --to trl` wrote.

    trainer = sft_trainer("out-trl", model=model, args=sft_config(output_dir="run", learning_rate=2e-5),
                          processing_class=tokenizer)
    trainer.train()

TRL 1.16 keeps examples apart only with `padding_free=True`, `packing=False`, and the column `seq_lengths` there.
Any other combination trains without a word and lets examples attend to each other; the loss changes by 0.2 %. So the
settings are made here, contradicting ones refused, and the first rows are put through the trainer's own collator to
see that the boundaries arrive. Unsloth patches this same SFTTrainer and takes the same settings.
"""

from __future__ import annotations

import importlib
from itertools import accumulate
from typing import Any

from packsvc.errors import ConfigError
from packsvc.storage import Store
from packsvc.trainers.hf import refuse_rank_means, refuse_split_rows

COLUMNS = ("input_ids", "labels", "seq_lengths")
SETTINGS: dict[str, Any] = {
    "padding_free": True,
    "packing": False,
    "max_length": None,
    "remove_unused_columns": False,
}
WHY = {
    "padding_free": "without it the collator makes a mask of ones, and examples attend to each other",
    "packing": "the rows are packed; packing them again drops seq_lengths, and examples attend to each other",
    "eval_packing": "the rows are packed; packing them again drops seq_lengths, and examples attend to each other",
    "max_length": "it would cut input_ids and labels but not seq_lengths",
    "remove_unused_columns": "it can drop seq_lengths before the collator sees it",
    "assistant_only_loss": "labels are masked already",
    "completion_only_loss": "labels are masked already",
}
CHECKED_ROWS = 2


def sft_config(**settings: Any) -> Any:
    """An SFTConfig with the settings that packed rows need.

    Raises:
        ConfigError: A setting contradicts them.
    """
    trl: Any = importlib.import_module("trl")
    args = trl.SFTConfig(**(SETTINGS | settings))
    _check_config(args)
    return args


def sft_dataset(exported: str, *, split: str = "train", storage_options: Any = None) -> Any:
    """The rows of `packsvc export --to trl` as a `datasets.Dataset`.

    Raises:
        ConfigError: There are none, or the export is unfinished.
    """
    return exported_rows(exported, split=split, storage_options=storage_options)


def exported_rows(exported: str, *, split: str, storage_options: Any = None) -> Any:
    """The Parquet rows of a split of a finished export, memory-mapped."""
    import datasets

    store = Store(exported, storage_options=storage_options)
    if store.info("export.json") is None:
        raise ConfigError(
            f"{exported}: is not a finished export; write one with `packsvc export OUT {exported} --to ...`"
        )
    names = [file.name for file in store.list() if file.name.endswith(".parquet")]
    files = [name for name in names if name.rsplit("/", 1)[-1].startswith(f"{split}-")]
    if not files:
        there = sorted({name.rsplit("/", 1)[-1].rsplit("-", 3)[0] for name in names})
        raise ConfigError(f"{exported}: holds no rows of the split {split!r}; it has {', '.join(there) or 'none'}")
    if store.is_local:
        return datasets.load_dataset("parquet", data_files=[store.path(name) for name in files], split="train")
    urls = [store.fs.unstrip_protocol(store.path(name)) for name in files]
    return datasets.load_dataset(
        "parquet", data_files=urls, split="train", storage_options=store.storage_options or None
    )


def sft_trainer(exported: Any, *, model: Any, args: Any, split: str = "train", base: Any = None, **more: Any) -> Any:
    """An SFTTrainer on packed rows, checked.

    Args:
        exported: Folder or URL of an export, or a dataset of its rows.
        model: As for SFTTrainer; with `attn_implementation=packsvc.attention.register()` a batch that lost its
            boundaries is refused instead of trained.
        args: What `sft_config` gave, or an SFTConfig that agrees with it.
        split: Which split of the export.
        base: A subclass of SFTTrainer; default SFTTrainer.
        more: For the trainer's constructor.

    Raises:
        ConfigError: A setting, a column or an argument would let examples attend to each other.
    """
    trl: Any = importlib.import_module("trl")
    if args is None:
        raise ConfigError("there are no args; make them by packsvc.trainers.sft_config")
    if "data_collator" in more:
        raise ConfigError("data_collator was given; only TRL's own with padding_free makes boundaries from seq_lengths")
    _check_config(args)
    dataset = sft_dataset(exported, split=split) if isinstance(exported, str) else exported
    _check_rows(dataset)
    if isinstance(evaluated := more.get("eval_dataset"), str):
        more["eval_dataset"] = sft_dataset(exported, split=evaluated)
    trainer = (base or trl.SFTTrainer)(model=model, args=args, train_dataset=dataset, **more)
    check_sft(trainer)
    return trainer


def check_sft(trainer: Any) -> None:
    """Check any SFTTrainer that is to train on packed rows, however it was made.

    Raises:
        ConfigError: Its settings, its columns or what its collator makes of the first rows would leak.
    """
    _check_config(trainer.args)
    datasets = [trainer.train_dataset]
    evaluated = getattr(trainer, "eval_dataset", None)
    if evaluated is not None:
        datasets += list(evaluated.values()) if isinstance(evaluated, dict) else [evaluated]
    for dataset in datasets:
        _check_rows(dataset)
        rows = [row for row, _ in zip(dataset, range(CHECKED_ROWS), strict=False)]
        _check_batch(trainer.data_collator(rows), rows)


def _check_config(args: Any) -> None:
    for name, value in SETTINGS.items():
        if (found := getattr(args, name)) != value:
            raise ConfigError(
                f"{name} is {found!r}: {WHY[name]}. Set {name}={value!r}, or make the config by sft_config"
            )
    for name in ("eval_packing", "assistant_only_loss", "completion_only_loss"):
        if getattr(args, name, None):
            raise ConfigError(f"{name} is {getattr(args, name)!r}: {WHY[name]}. Leave it out")
    refuse_rank_means(args)
    refuse_split_rows(args)


def _check_rows(dataset: Any) -> None:
    columns = list(getattr(dataset, "column_names", None) or next(iter(dataset)))
    if missing := [name for name in COLUMNS if name not in columns]:
        raise ConfigError(
            f"the dataset has no column {missing[0]} (it has {', '.join(columns)}), so the collator would take a "
            "packed row for one example; write it with `packsvc export OUT DEST --to trl` and keep its columns"
        )
    row = next(iter(dataset))
    if sum(row["seq_lengths"]) != len(row["input_ids"]) or len(row["labels"]) != len(row["input_ids"]):
        raise ConfigError(
            f"the first row has {len(row['input_ids'])} ids, {len(row['labels'])} labels and seq_lengths that add up "
            f"to {sum(row['seq_lengths'])}; it was cut or joined after the export"
        )


def _check_batch(batch: Any, rows: list[Any]) -> None:
    """What the trainer's own collator hands to the model says the same boundaries as the rows."""
    if batch.get("attention_mask") is not None:
        raise ConfigError(f"the collator makes an attention_mask: {WHY['padding_free']}")
    wanted = [0, *accumulate(length for row in rows for length in row["seq_lengths"])]
    positions = batch.get("position_ids")
    found = None if positions is None else (positions[0] == 0).nonzero().flatten().tolist()
    if found is None or found[: len(wanted) - 1] != wanted[:-1]:
        raise ConfigError(
            "the collator does not keep the boundaries of the packed rows (seq_lengths), so examples would attend to "
            "each other; this TRL is not one that packsvc knows: train with packsvc.trainers.hf_trainer"
        )
