"""Exports read back by the code of the projects that they are for, where those are installed (`benchmarks/peers.sh`).

None of them is in the development environment: they pin other versions of what we use. TRL, which is, has its test
in tests/trainers.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.trainers import tiny_tokenizer
from packsvc.export import export_dataset
from packsvc.trainers import sft_dataset
from tests.export.megatron_loader import load_megatron_sft
from tests.export.oracle import Pair, rows_of, stored
from tests.stream.outputs import PAD, VOCAB, Written, write_output

NEVER = VOCAB + 1
"""An EOS that stands nowhere."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Packs of 32 tokens; OLMo-core packs into powers of two only."""
    return write_output(tmp_path_factory.mktemp("peers"), [7, 5, 9], seq_len=32, seed=3, align=4)


def pairs_of(packs: list[list[Any]]) -> list[list[tuple[Pair, ...]]]:
    return [[segment.pairs for segment in pack] for pack in packs]


def read_off(tokens: list[int], shifted: list[int], bounds: list[int]) -> list[tuple[Pair, ...]]:
    """Trained pairs of the segments that have any, from shifted labels, as all of these losses take them."""
    segments = [
        tuple((j - a, tokens[j], shifted[j]) for j in range(a, b) if shifted[j] != -100) for a, b in pairwise(bounds)
    ]
    return [pairs for pairs in segments if pairs]


def test_olmo_core_reads_the_same_pairs(out: Written, tmp_path: Path):
    dataset = pytest.importorskip("olmo_core.data.numpy_dataset")
    from olmo_core.data.utils import get_labels

    export_dataset(out.path, str(tmp_path / "d"), to="olmo")
    ids = sorted(str(path) for path in (tmp_path / "d").glob("token_ids_part_*.npy"))
    packed = dataset.NumpyPackedFSLDataset(
        *ids,
        label_mask_paths=[path.replace("token_ids", "labels_mask") for path in ids],
        sequence_length=32,
        pad_token_id=PAD,
        eos_token_id=2,
        vocab_size=VOCAB,
        dtype=np.uint16,
        generate_doc_lengths=True,
        use_array_if_local=False,
    )
    packed.work_dir = tmp_path / "work"
    packed.prepare()
    found: Counter[tuple[Pair, ...]] = Counter()
    for item in packed:
        labels = get_labels({name: item[name][None] for name in ("input_ids", "label_mask")})[0].tolist()
        bounds = np.cumsum([0, *item["doc_lens"].tolist()]).tolist()
        found.update(read_off(item["input_ids"].tolist(), labels, bounds))
    assert found == Counter(pairs for pack in pairs_of(stored(out)) for pairs in pack)


def test_torchtune_collates_the_same_pairs(out: Written, tmp_path: Path):
    data = pytest.importorskip("torchtune.data")
    import torch

    from packsvc.trainers import torchtune_packs

    export_dataset(out.path, str(tmp_path / "d"), to="torchtune")
    packs = torchtune_packs(SimpleNamespace(max_seq_len=32), path=str(tmp_path / "d"), packed=True)
    found = []
    for start in range(0, len(packs), 4):
        batch = data.padded_collate_packed([packs[i] for i in range(start, min(start + 4, len(packs)))])
        # As its recipes do before the loss.
        shifted = torch.hstack((batch["labels"][..., 1:], torch.full((len(batch["labels"]), 1), -100)))
        for row, labels, mask in zip(batch["tokens"], shifted, batch["mask"], strict=True):
            first_seen = mask.int().argmax(dim=-1)
            bounds = [*torch.unique(first_seen).tolist(), len(row)]
            found.append(read_off(row.tolist(), labels.tolist(), bounds))
    assert found == pairs_of(stored(out))


@pytest.mark.parametrize(("multiple", "eos"), [(1, NEVER), (4, 2)])
def test_megatron_bridge_collates_the_same_pairs(out: Written, tmp_path: Path, multiple: int, eos: int):
    sft = load_megatron_sft()
    options = {} if multiple == 1 else {"pad_to_multiple": multiple, "eos_id": eos}
    export_dataset(out.path, str(tmp_path / "d"), to="megatron", **options)
    found = megatron_batches(sft, rows_of(tmp_path / "d"), tmp_path, eos)
    assert found == pairs_of(stored(out))


def test_megatron_bridge_drops_what_the_notes_count(out: Written, tmp_path: Path):
    sft = load_megatron_sft()
    wanted = [pair for pack in pairs_of(stored(out)) for pairs in pack for pair in pairs]
    eos = Counter(pair[1] for pair in wanted).most_common(1)[0][0]
    made = export_dataset(out.path, str(tmp_path / "d"), to="megatron", eos_id=eos)
    found = megatron_batches(sft, rows_of(tmp_path / "d"), tmp_path, eos)
    lost = len(wanted) - sum(len(pairs) for pack in found for pairs in pack)
    assert lost > 0
    assert any(note.startswith(f"{lost} targets stand right after token {eos}:") for note in made.notes)


def test_axolotl_loads_and_packs_the_same_pairs(out: Written, tmp_path: Path):
    """By its loader, its sampler and its collator, with the config lines that `packsvc.export.examples` names."""
    sft = pytest.importorskip("axolotl.utils.data.sft")
    from axolotl.utils.collators.batching import V2BatchSamplerDataCollatorForSeq2Seq
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.samplers.multipack import MultipackBatchSampler
    from axolotl.utils.samplers.utils import get_dataset_lengths
    from torch.utils.data import SequentialSampler

    export_dataset(out.path, str(tmp_path / "d"), to="examples")
    lines = {
        "datasets": [{"path": str(tmp_path / "d"), "ds_type": "parquet", "type": None}],
        "sequence_len": 32,
        "sample_packing": True,
        "train_on_inputs": True,
        "excess_length_strategy": "raise",
    }
    others = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "batch_size": 1, "num_epochs": 1, "seed": 42,
              "val_set_size": 0, "dataset_num_proc": 1, "world_size": 1, "sample_packing_bin_size": 200,
              "sample_packing_group_size": 100_000, "tokenizer_config": "none",
              "dataset_prepared_path": str(tmp_path / "prepared")}  # fmt: skip
    tokenizer = tiny_tokenizer()
    tokenizer.name_or_path = "tiny"
    rows = sft.prepare_datasets(DictDefault(lines | others), tokenizer)[0]
    sampler = MultipackBatchSampler(
        SequentialSampler(rows), batch_size=1, batch_max_len=32, lengths=get_dataset_lengths(rows), bin_size=200,
        drop_last=False, num_processes=1,
    )  # fmt: skip
    collate = V2BatchSamplerDataCollatorForSeq2Seq(tokenizer)
    found: Counter[tuple[Pair, ...]] = Counter()
    for chosen in sampler:
        batch = collate([[rows[i] for i in pack] for pack in chosen])
        tokens, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        numbers = batch["attention_mask"][0].tolist()
        bounds = [i for i in range(len(numbers)) if i == 0 or numbers[i] != numbers[i - 1]]
        found.update(read_off(tokens, [*labels[1:], -100], [*bounds, len(numbers)]))
    assert found == Counter(pairs for pack in pairs_of(stored(out)) for pairs in pack)


def test_unsloth_collates_the_same_pairs(out: Written, tmp_path: Path):
    """By TRL's collator as Unsloth wraps it. The package itself wants a GPU when it is imported; this file does not."""
    packing = load_unsloth_packing()
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    export_dataset(out.path, str(tmp_path / "d"), to="trl")
    rows = sft_dataset(str(tmp_path / "d"))
    collator = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)
    packing.enable_padding_free_metadata(SimpleNamespace(), SimpleNamespace(data_collator=collator))
    found = []
    for start in range(0, len(rows), 2):
        chosen = [rows[i] for i in range(start, min(start + 2, len(rows)))]
        batch = collator(chosen)
        _, bounds, longest = packing.get_packed_info_from_kwargs(batch, "cpu")
        assert longest == int(bounds.diff().max())
        assert batch["position_ids"][0].tolist() == [i for n in bounds.diff().tolist() for i in range(n)]
        assert "attention_mask" not in batch
        found.append(
            read_off(batch["input_ids"][0].tolist(), [*batch["labels"][0].tolist()[1:], -100], bounds.tolist())
        )
    expected = pairs_of(stored(out))
    assert found == [[pairs for pack in expected[i : i + 2] for pairs in pack] for i in range(0, len(expected), 2)]


def load_unsloth_packing() -> Any:
    spec = importlib.util.find_spec("unsloth")
    if spec is None or spec.origin is None:
        pytest.skip("unsloth is not installed")
    path = Path(spec.origin).parent / "utils" / "packing.py"
    made = importlib.util.spec_from_file_location("unsloth_packing", path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def megatron_batches(sft: Any, rows: list[Any], folder: Path, eos: int) -> list[list[tuple[Pair, ...]]]:
    """What its packed dataset hands to a model, pack by pack."""
    np.save(folder / "rows.npy", np.array(rows, dtype=object), allow_pickle=True)
    tokenizer = SimpleNamespace(eos_id=eos, pad_id=PAD)
    dataset = sft.GPTSFTPackedDataset(
        str(folder / "rows.npy"), tokenizer, max_seq_length=32, answer_only_loss=True, prompt_template="{text} {answer}"
    )
    packs = []
    for i in range(len(rows)):
        batch = dataset.collate_fn([dataset[i]])
        labels, on = batch["labels"][0].tolist(), batch["loss_mask"][0].tolist()
        shifted = [label if use else -100 for label, use in zip(labels, on, strict=True)]
        bounds = [bound for bound in batch["cu_seqlens"][0].tolist() if bound >= 0]
        packs.append(read_off(batch["tokens"][0].tolist(), shifted, bounds))
    return packs
