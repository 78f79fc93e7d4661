"""transformers' Trainer on a stream: set up right, resumed exactly, refused where it would train something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from benchmarks.trainers import ARGUMENTS, Recorder, difference, one_by_one, tiny_llama
from packsvc.attention import register
from packsvc.errors import ConfigError, StateError
from packsvc.stream import PackStream
from packsvc.trainers import hf_trainer
from packsvc.trainers.hf import row_of
from tests.trainers.test_loop import weighted_output

TRAINING = ARGUMENTS | {"learning_rate": 0.1, "lr_scheduler_type": "constant"}


def stream_of(out: str, **options: Any) -> PackStream:
    return PackStream(out, rank=0, world_size=1, **options)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **(ARGUMENTS | settings))


class Watched(Trainer):
    """Remembers what reached the model."""

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        self.__dict__.setdefault("seen", []).append(inputs["input_ids"].flatten().tolist())
        return super().training_step(model, inputs, *rest)


def test_the_arguments_are_set_on_a_copy(eight: str, tmp_path: Path):
    args = arguments(tmp_path)
    trainer = hf_trainer(stream_of(eight, batch_packs=2), model=tiny_llama(register()), args=args)
    assert args.remove_unused_columns
    assert not trainer.args.remove_unused_columns
    assert trainer.args.per_device_train_batch_size == 2
    assert isinstance(trainer, Trainer)


@pytest.mark.parametrize(("stop", "accumulation"), [(3, 2)])
def test_a_resumed_run_goes_on_with_the_very_next_batch(eight: str, tmp_path: Path, stop: int, accumulation: int):
    """Two epochs, cut short and resumed: the same batches in the same order, and the same weights at the end."""
    runs = {}
    settings = TRAINING | {"num_train_epochs": 2, "gradient_accumulation_steps": accumulation}

    def run(name: str, folder: Path, resume: bool, max_steps: int, save: str = "no") -> Any:
        saving = {"save_strategy": save, "save_steps": stop}
        args = TrainingArguments(str(folder), **(settings | saving), max_steps=max_steps)
        trainer = hf_trainer(stream_of(eight, batch_packs=3, remainder="pad"), model=tiny_llama(register()), args=args,
                             base=Watched)  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        runs[name] = trainer.seen
        return trainer

    last = 2 * -(-3 // accumulation)  # three batches an epoch
    whole = run("whole", tmp_path / "whole", False, last)
    run("first", tmp_path / "cut", False, stop, save="steps")
    rest = run("rest", tmp_path / "cut", True, last)
    assert runs["first"] + runs["rest"] == runs["whole"]
    assert len(runs["whole"]) == 6
    for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("accumulation", "packs", "fits"), [(4, 1, 2), (1, 1, 2), (3, 2, 1), (2, 2, 1), (2, 4, None)])
def test_a_resume_that_would_lose_packs_is_refused(
    eight: str, tmp_path: Path, accumulation: int, packs: int, fits: int | None
):
    """Trainer skips so many batches as its steps make; the stream stands where it stood."""

    def trainer(packs: int, accumulation: int, steps: int) -> Any:
        settings = TRAINING | {"gradient_accumulation_steps": accumulation, "save_strategy": "steps", "save_steps": 1}
        args = TrainingArguments(str(tmp_path), **settings, max_steps=steps)
        return hf_trainer(stream_of(eight, batch_packs=packs), model=tiny_llama(register()), args=args, base=Watched)

    first = trainer(1, 2, 2)
    first.train()  # 4 of 8 packs
    advice = f"Set gradient_accumulation_steps={fits}, so that" if fits else "Take the checkpoint's batch_packs"
    with pytest.raises(StateError, match=rf"checkpoint-2: after 2 optimizer steps the stream stands.*{advice}"):
        trainer(packs, accumulation, 4).train(resume_from_checkpoint=True)
    if fits:
        again = trainer(packs, fits, 4)
        again.train(resume_from_checkpoint=True)
        order = [batch.input_ids.tolist() for batch in stream_of(eight, batch_packs=packs)]
        assert again.seen == order[4 // packs :]


def test_a_resumed_run_reads_nothing_that_is_behind_it(eight: str, tmp_path: Path, monkeypatch: Any):
    settings = TRAINING | {"save_strategy": "steps", "save_steps": 6}
    args = TrainingArguments(str(tmp_path), **settings, max_steps=6)
    hf_trainer(stream_of(eight), model=tiny_llama(register()), args=args).train()
    from packsvc.stream.maker import BatchMaker

    made: list[int] = []
    make = BatchMaker.make

    def counted(self: BatchMaker, picks: Any) -> Any:
        made.extend(picks.steps)
        return make(self, picks)

    monkeypatch.setattr(BatchMaker, "make", counted)
    args = TrainingArguments(str(tmp_path), **TRAINING, max_steps=8)
    hf_trainer(stream_of(eight), model=tiny_llama(register()), args=args).train(resume_from_checkpoint=True)
    assert sorted(made) == [6, 7]


def test_a_checkpoint_without_a_position_is_refused(eight: str, tmp_path: Path):
    trainer = hf_trainer(stream_of(eight), model=tiny_llama(register()), args=arguments(tmp_path))
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(StateError, match=r"packsvc_stream.json: missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (tmp_path / "checkpoint-1" / "packsvc_stream.json").write_text("{")
    with pytest.raises(StateError, match=r"packsvc_stream.json: is no JSON"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (tmp_path / "checkpoint-1" / "packsvc_stream.json").write_text("[]")
    with pytest.raises(StateError, match=r"packsvc_stream.json: holds no object"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (tmp_path / "checkpoint-1" / "packsvc_stream.json").unlink()
    (tmp_path / "checkpoint-1").rmdir()
    with pytest.raises(StateError, match="no checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_weights_are_applied_by_the_trainer(tmp_path: Path):
    out = weighted_output(tmp_path / "out")
    wanted_loss, wanted = one_by_one(out, weighted=True)
    model = tiny_llama(register())
    recorder = Recorder(model.parameters())
    stream = stream_of(out)
    args = arguments(tmp_path / "run", gradient_accumulation_steps=len(stream))
    loss = hf_trainer(stream, model=model, args=args, optimizers=(recorder, None)).train().training_loss
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert difference(recorder.seen, wanted) < 1e-5


@pytest.mark.parametrize(
    ("settings", "more", "found"),
    [
        ({"label_smoothing_factor": 0.2}, {}, "label_smoother is set"),
        ({}, {"compute_loss_func": lambda *_, **__: torch.zeros((), requires_grad=True)}, "compute_loss_func is set"),
    ],
)
def test_another_loss_on_weighted_packs_is_refused(tmp_path: Path, settings: Any, more: Any, found: str):
    stream = stream_of(weighted_output(tmp_path / "out"))
    args = arguments(tmp_path / "run", **settings)
    with pytest.raises(ConfigError, match=found):
        hf_trainer(stream, model=tiny_llama(register()), args=args, **more).train()


def test_what_is_no_stream_or_no_arguments_is_told(eight: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"the stream is a str; open the packed output with PackStream"):
        hf_trainer(eight, model=None, args=arguments(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give TrainingArguments"):
        hf_trainer(stream_of(eight), model=None, args=None)


def test_prediction_reads_a_stream_too(eight: str, tmp_path: Path):
    trainer = hf_trainer(stream_of(eight), model=tiny_llama(register()), args=arguments(tmp_path))
    found = trainer.predict(stream_of(eight, batch_packs=8)).metrics["test_loss"]
    assert found == pytest.approx(one_by_one(eight)[0], rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_of_an_evaluation_is_the_token_mean(eight: str, tmp_path: Path, weighted: bool):
    """Packs have unlike numbers of targets, so that the mean of their means is another."""
    out = weighted_output(tmp_path / "out") if weighted else eight
    stream = stream_of(out)
    trainer = hf_trainer(stream_of(out), model=tiny_llama(register()), args=arguments(tmp_path), eval_dataset=stream)
    found = trainer.evaluate()["eval_loss"]
    assert found == pytest.approx(one_by_one(out, weighted=weighted)[0], rel=1e-5)
    means = [float(trainer.compute_loss(trainer.model, row_of(batch))) for batch in stream_of(out)]
    assert abs(found - sum(means) / len(means)) > 1e-4


def test_evaluation_reads_a_stream_too(eight: str, tmp_path: Path):
    args = arguments(tmp_path)
    trainer = hf_trainer(
        stream_of(eight), model=tiny_llama(register()), args=args, eval_dataset=stream_of(eight, batch_packs=8)
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(one_by_one(eight)[0], rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(one_by_one(eight)[0], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"dataloader_num_workers": 2}, "dataloader_num_workers=2: .*set it to 0"),
        ({"parallelism_config": SimpleNamespace(cp_size=2, sp_size=1)}, "cp_size or sp_size"),
        ({"process_index": 1, "world_size": 2}, "rank 1 of 2, the stream reads for rank 0 of 1"),
        ({"n_gpu": 2}, "torchrun"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True: .*leave it off"),
    ],
)
def test_x10_x11_arguments_that_train_something_else_are_refused(eight: str, tmp_path: Path, changes: Any, found: str):
    """Among them context parallelism, which would cut rows without knowing their segments."""
    args = arguments(tmp_path)
    names = (
        "process_index", "world_size", "n_gpu", "average_tokens_across_devices", "dataloader_num_workers",
        "ignore_data_skip",
    )  # fmt: skip
    stand_in = SimpleNamespace(**({name: getattr(args, name) for name in names} | {"n_gpu": 0} | changes))
    with pytest.raises(ConfigError, match=found):
        hf_trainer(stream_of(eight), model=tiny_llama(register()), args=stand_in)


def test_x17_a_mean_of_rank_means_is_refused(eight: str):
    args = SimpleNamespace(
        process_index=0, world_size=2, n_gpu=0, average_tokens_across_devices=False, dataloader_num_workers=0
    )
    with pytest.raises(ConfigError, match="mean of rank means"):
        hf_trainer(PackStream(eight, rank=0, world_size=2), model=None, args=args)


def test_x23_another_collator_is_refused(eight: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="data_collator was given"):
        hf_trainer(stream_of(eight), model=tiny_llama(register()), args=arguments(tmp_path), data_collator=list)


def test_training_after_an_evaluation_on_several_ranks_is_refused(eight: str, tmp_path: Path):
    """Accelerate takes the model for prepared and does not wrap it, so that ranks drift apart without a word."""
    settings = arguments(tmp_path)
    trainer = hf_trainer(stream_of(eight), model=tiny_llama(register()), args=settings, eval_dataset=stream_of(eight))
    trainer.evaluate()
    assert trainer.train().global_step > 0, "on one rank there is no wrapper to miss"
    other = hf_trainer(stream_of(eight), model=tiny_llama(register()), args=settings, eval_dataset=stream_of(eight))
    other.args = SimpleNamespace(**vars(other.args) | {"world_size": 2})
    with pytest.raises(AttributeError):  # the stand-in is no TrainingArguments, and need not get far
        other.evaluation_loop(other.get_eval_dataloader(), "evaluation")
    with pytest.raises(ConfigError, match=r"evaluate or predict was called before train: .*eval_on_start=True"):
        other.train()


def test_a_model_that_takes_no_boundaries_is_refused(eight: str, tmp_path: Path):
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            return self.weight.sum()

    with pytest.raises(ConfigError, match=r"Plain.forward takes no further keyword"):
        hf_trainer(stream_of(eight), model=Plain(), args=arguments(tmp_path))


@pytest.mark.parametrize(
    ("drop", "add", "found"),
    [
        ("cu_seq_lens_q", {}, "without cu_seq_lens_q"),
        ("position_ids", {}, "without position_ids"),
        ("seq_idx", {"attention_mask": torch.ones(1, 3)}, "attention_mask"),
    ],
)
def test_x1_x2_the_models_door_is_watched(eight: str, tmp_path: Path, drop: str, add: Any, found: str):
    """Whatever stands between the stream and the model."""
    stream = stream_of(eight)
    model = tiny_llama(register())
    trainer = hf_trainer(stream, model=model, args=arguments(tmp_path))
    row = row_of(next(iter(stream)))
    assert float(trainer.compute_loss(model, dict(row)).detach()) > 0
    del row[drop]
    with pytest.raises(ConfigError, match=found):
        trainer.compute_loss(model, row | add)


def test_a_row_with_weights_has_them_under_their_own_name(tmp_path: Path):
    with stream_of(weighted_output(tmp_path / "out")) as stream:
        batch = next(iter(stream))
    row = row_of(batch)
    assert row["loss_weights"].shape == row["labels"].shape == row["input_ids"].shape
    assert "loss_weights" not in row_of(replace(batch, fractional_weights=False))


def test_d8_no_dispatcher_joins_rows_of_unlike_width(eight: str, tmp_path: Path):
    """Each rank reads its own batches, whatever width they have."""
    trainer = hf_trainer(stream_of(eight), model=tiny_llama(register()), args=arguments(tmp_path))
    loader = trainer.get_train_dataloader()
    widths = [row["input_ids"].shape for row in loader]
    assert not type(loader).__module__.startswith("accelerate")
    assert len(loader) == len(widths) == 8
    assert len(set(widths)) > 1
    assert {height for height, _ in widths} == {1}


def test_x20_the_longest_segment_reaches_the_model_as_an_int(eight: str, tmp_path: Path):
    trainer = hf_trainer(stream_of(eight), model=tiny_llama(register()), args=arguments(tmp_path))
    for row in trainer.get_train_dataloader():
        prepared = trainer._prepare_inputs(row)
        assert type(prepared["max_length_q"]) is int
        assert prepared["cu_seq_lens_q"].dtype == torch.int32
