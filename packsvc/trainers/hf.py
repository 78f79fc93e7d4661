"""transformers' Trainer on a stream.

    stream = PackStream(out, batch_packs=2)
    trainer = hf_trainer(stream, model=model, args=TrainingArguments("run", gradient_accumulation_steps=4))
    trainer.train()

The stream shares itself out over ranks, so its loader is not prepared by Accelerate, which would deal it out a second
time. `num_items_in_batch` is the number of targets of the optimizer step on all ranks, as Trainer counts it from the
labels. Checkpoints hold the stream's position; a resumed run goes on with the very next batch without reading the
ones before. Trainer counts in optimizer steps, so a step must take as many packs as before: on fewer ranks, more
accumulation. What would lose packs is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from packsvc.errors import ConfigError, StateError
from packsvc.stream import PackedBatch, PackStream
from packsvc.trainers.loss import model_inputs, weighted_sum

STATE = "packsvc_stream.json"
"""Stands in each checkpoint folder."""
MOST_ACCUMULATED = 4096
Row = dict[str, Any]


def hf_trainer(stream: PackStream, *, model: Any, args: Any, base: Any = None, **more: Any) -> Any:
    """A Trainer that reads packs.

    Args:
        stream: Of the rank that runs here. It decides how many packs a batch has (`batch_packs`).
        model: A causal language model; with `attn_implementation=packsvc.attention.register()` a batch that lost its
            boundaries is refused instead of trained.
        args: TrainingArguments; a copy with `remove_unused_columns=False` and the stream's batch size is used.
        base: A subclass of Trainer to build on; default `transformers.Trainer`.
        more: For the trainer's constructor; `eval_dataset` may be a stream too.

    Raises:
        ConfigError: Something here would train another loss than the token mean, or attention across examples.
    """
    import transformers

    if not isinstance(stream, PackStream):
        raise ConfigError(f"the stream is a {type(stream).__name__}; open the packed output with PackStream(out)")
    if args is None:
        raise ConfigError("there are no args; give TrainingArguments")
    if taken := sorted({"train_dataset", "data_collator"} & set(more)):
        raise ConfigError(
            f"{taken[0]} was given, but the stream makes the batches; leave it out, since another collator drops the "
            "boundaries between examples"
        )
    args = copy.copy(args)
    args.remove_unused_columns = False  # the default drops boundaries that forward() does not name
    args.per_device_train_batch_size = stream.batch_packs
    _check_arguments(stream, args)
    base = base or transformers.Trainer
    trainer_class = type("PackTrainer", (_Packs, base), {})
    trainer = trainer_class(model=model, args=args, train_dataset=_Rows(stream), **more)
    if not trainer.model_accepts_loss_kwargs:
        raise ConfigError(
            f"{type(model).__name__}.forward takes no further keyword arguments, so it would get neither boundaries "
            "nor num_items_in_batch; use a model of transformers, or packsvc.trainers.backward with a loss of your own"
        )
    trainer.add_callback(_saver(stream, transformers.TrainerCallback))
    return trainer


class _Rows(IterableDataset[Row]):
    """A stream as rows that a model takes. Positions that a resumed run has behind it are passed without reading."""

    def __init__(self, stream: PackStream) -> None:
        self.stream = stream
        self._passed = 0

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Row]:
        passed, self._passed = self._passed, 0
        for _ in range(passed):
            yield {}  # dropped by the trainer, which skips as many as it has trained
        for batch in self.stream:
            yield row_of(batch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.stream.set_epoch(epoch)

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a stream's state."""
        self.stream.load_state_dict(state)
        _, self._passed = _standing(self.stream)


class _Loader(DataLoader[Row]):
    """A loader that tells its rows which epoch comes."""

    def set_epoch(self, epoch: int) -> None:
        cast(_Rows, self.dataset).set_epoch(epoch)


class _Packs:
    """What is laid over Trainer."""

    args: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    is_in_train: bool
    state: Any
    train_dataset: Any
    eval_dataset: Any
    _is_bare = False
    """The model was prepared to be evaluated on several ranks, and Accelerate would not wrap it to be trained."""
    _evaluated: torch.Tensor | None = None
    """(2,) float64: the sum of token losses evaluated so far, and how many they are; None in training."""

    def get_train_dataloader(self) -> Any:
        return _Loader(self.train_dataset, batch_size=None)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = self.eval_dataset[chosen] if isinstance(chosen, str) else chosen
        if not isinstance(chosen, PackStream):
            return cast(Any, super()).get_eval_dataloader(eval_dataset)
        chosen.set_epoch(0)
        return _Loader(_Rows(chosen), batch_size=None)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        if not isinstance(test_dataset, PackStream):
            return cast(Any, super()).get_test_dataloader(test_dataset)
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(self, dataloader: Any, *rest: Any, **more: Any) -> Any:
        """As Trainer's, but on a stream the loss is the token mean over all batches and ranks, not a mean of means."""
        is_first = not self.is_in_train and self.state.global_step == 0
        self._is_bare |= is_first and self.args.world_size > 1 and self.model_wrapped is self.model
        self._evaluated = torch.zeros(2, dtype=torch.float64)
        try:
            output = cast(Any, super()).evaluation_loop(dataloader, *rest, **more)
        finally:
            sums, self._evaluated = self._evaluated, None
        name = f"{more.get('metric_key_prefix', 'eval')}_loss"
        if isinstance(dataloader.dataset, _Rows) and name in output.metrics:
            if self.accelerator.num_processes > 1:
                sums = self.accelerator.reduce(sums.to(self.accelerator.device), reduction="sum")
            output.metrics[name] = float(sums[0] / sums[1].clamp(min=1))
        return output

    def compute_loss(
        self, model: Any, inputs: Row, return_outputs: bool = False, num_items_in_batch: Any = None, **rest: Any
    ) -> Any:
        _check_row(inputs)
        num_targets = int((inputs["labels"] != -100).sum()) if self._evaluated is not None else 0
        found = self._loss(model, inputs, return_outputs, num_items_in_batch, **rest)
        if self._evaluated is not None and num_targets:
            loss = float(found[0] if return_outputs else found)
            # Trainer divides by the targets of all ranks, and makes up for the mean that ranks take.
            total = loss * num_targets
            if num_items_in_batch is not None:
                total = loss * float(num_items_in_batch) / self.args.world_size
            self._evaluated += torch.tensor([total, num_targets], dtype=torch.float64)
        return found

    def _loss(self, model: Any, inputs: Row, return_outputs: bool, num_items_in_batch: Any, **rest: Any) -> Any:
        weights = inputs.pop("loss_weights", None)
        parent = cast(Any, super())
        if weights is None:
            return parent.compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **rest
            )
        for name in ("compute_loss_func", "label_smoother"):
            if getattr(self, name, None) is not None:
                raise ConfigError(
                    f"{name} is set, and the packs have loss weights, which it would not apply; leave it out, or pack "
                    "the job with loss_weights: false"
                )
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        mine = (labels != -100).sum().clamp(min=1)
        loss = weighted_sum(outputs.logits, labels, weights) / (
            mine if num_items_in_batch is None else num_items_in_batch
        )
        if num_items_in_batch is not None:
            loss = loss * self.args.world_size  # ranks average their gradients
        return (loss, outputs) if return_outputs else loss

    def train(self, resume_from_checkpoint: Any = None, *rest: Any, **more: Any) -> Any:
        if self._is_bare:
            raise ConfigError(
                "evaluate or predict was called before train: transformers then leaves the model unwrapped, and every "
                "rank would train by itself. Make the trainer anew, or set eval_on_start=True instead"
            )
        if resume_from_checkpoint:
            folder = _checkpoint(resume_from_checkpoint, self.args.output_dir)
            self.train_dataset.resume(_json(folder / STATE))
            _check_resume(self.train_dataset.stream, self.args, folder)
        return cast(Any, super()).train(resume_from_checkpoint, *rest, **more)


def row_of(batch: PackedBatch) -> Row:
    """A batch as the model takes it; weights come along under their own name where there are any."""
    if not batch.fractional_weights:
        return batch.hf()
    assert batch.loss_weights is not None
    return {
        **model_inputs(batch),
        "labels": batch.labels.long().unsqueeze(0),
        "loss_weights": batch.loss_weights.unsqueeze(0),
    }


def _check_row(inputs: Row) -> None:
    """At the model's door: boundaries are there, and nothing that makes models forget them."""
    if missing := [name for name in ("cu_seq_lens_q", "max_length_q", "position_ids") if inputs.get(name) is None]:
        raise ConfigError(
            f"a batch reached the model without {missing[0]}, so examples would attend to each other; something "
            "between the stream and the model dropped it (remove_unused_columns, another collator)"
        )
    if inputs.get("attention_mask") is not None:
        raise ConfigError("a batch reached the model with an attention_mask, which makes models forget the boundaries")


def _check_arguments(stream: PackStream, args: Any) -> None:
    here, its = (args.process_index, args.world_size), (stream.rank, stream.world_size)
    if here != its:
        raise ConfigError(
            f"the trainer is rank {here[0]} of {here[1]}, the stream reads for rank {its[0]} of {its[1]}; open it with "
            "rank=args.process_index, world_size=args.world_size"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs in one process would split a packed row; start one process a GPU with torchrun, or "
            "show it one (CUDA_VISIBLE_DEVICES=0)"
        )
    refuse_rank_means(args)
    if args.ignore_data_skip:
        raise ConfigError(
            "ignore_data_skip=True: a resumed run goes on at the checkpoint's position without reading what is behind "
            "it, so there is nothing to ignore, and Trainer must count those batches; leave it off"
        )
    if args.dataloader_num_workers:
        raise ConfigError(
            f"dataloader_num_workers={args.dataloader_num_workers}: the stream reads ahead in threads of its own "
            "(PackStream(threads=...)) and must be in this process to know its position; set it to 0"
        )
    refuse_split_rows(args)


def refuse_rank_means(args: Any) -> None:
    """Refuse a loss that is a mean of rank means."""
    if not args.average_tokens_across_devices and args.world_size > 1:
        raise ConfigError(
            "average_tokens_across_devices=False makes the loss a mean of rank means, in which tokens of ranks with "
            "few targets weigh more; leave it on"
        )


def refuse_split_rows(args: Any) -> None:
    """Refuse context and sequence parallelism, which cut a packed row without knowing its segments."""
    plan = getattr(args, "parallelism_config", None)
    if plan is not None and (getattr(plan, "cp_size", 1) > 1 or getattr(plan, "sp_size", 1) > 1):
        raise ConfigError(
            "parallelism_config splits rows over ranks (cp_size or sp_size above 1): boundaries would be those of the "
            "whole row, and examples would attend to each other. Set both to 1, or train with Megatron-Bridge on "
            "`packsvc export --to megatron --pad-to-multiple`"
        )


def _saver(stream: PackStream, callback: Any) -> Any:
    """A callback that writes the stream's position into each checkpoint."""

    def on_save(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            (folder / STATE).write_text(json.dumps(stream.state_dict()), encoding="utf-8")

    return type("StreamSaver", (callback,), {"on_save": on_save})()


def _checkpoint(checkpoint: Any, output_dir: str) -> Path:
    if checkpoint is True:
        from transformers.trainer_utils import get_last_checkpoint

        latest: Any = get_last_checkpoint
        checkpoint = latest(output_dir)
        if checkpoint is None:
            raise StateError(f"{output_dir}: there is no checkpoint to resume from")
    return Path(checkpoint)


def _json(path: Path) -> dict[str, Any]:
    """An object from a checkpoint. Raises StateError."""
    advice = "resume from a checkpoint that packsvc.trainers.hf_trainer wrote whole"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StateError(f"{path}: missing, so it is not known which packs the checkpoint has seen; {advice}") from None
    except ValueError as error:
        raise StateError(f"{path}: is no JSON ({error}); {advice}") from None
    if not isinstance(found, dict):
        raise StateError(f"{path}: holds no object; {advice}")
    return found


def _standing(stream: PackStream) -> tuple[int, int]:
    """The epoch and the batch that come next."""
    state = stream.state_dict()
    return state["epoch"], state["position"] // stream.global_batch


def _check_resume(stream: PackStream, args: Any, folder: Path) -> None:
    """Trainer skips so many batches as its steps make here; that must be what the stream has behind it.

    Raises:
        StateError: They differ, so that packs would be lost or trained twice.
    """
    done = int(_json(folder / "trainer_state.json")["global_step"])
    epoch, passed = _standing(stream)

    def skipped(accumulated: int) -> tuple[int, int]:
        """Epoch and batch at which Trainer goes on."""
        per_epoch = -(-len(stream) // accumulated)
        return done // per_epoch, done % per_epoch * accumulated

    here = args.gradient_accumulation_steps
    if skipped(here) == (epoch, passed):
        return
    fitting = [n for n in range(1, min(len(stream), MOST_ACCUMULATED) + 1) if skipped(n) == (epoch, passed)]
    advice = (
        f"Set gradient_accumulation_steps={min(fitting, key=lambda n: abs(n - here))}"
        if fitting
        else "Take the checkpoint's batch_packs, ranks and gradient_accumulation_steps"
    )
    raise StateError(
        f"{folder}: after {done} optimizer steps the stream stands at batch {passed} of epoch {epoch}, but with "
        f"gradient_accumulation_steps={here} Trainer would go on at batch {skipped(here)[1]} of epoch "
        f"{skipped(here)[0]}, and packs would be lost or trained twice. {advice}, so that a step takes as many packs "
        "as before"
    )
