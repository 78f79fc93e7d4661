"""Trainers: packs -> the loops people already have, with the loss that the same examples have one by one.

`loss` is the sum over targets, weights included; `loop` takes a plain PyTorch step over several batches and ranks,
`accelerated` the same under Accelerate; `hf` puts a stream into transformers' Trainer; `sft` sets up TRL's
SFTTrainer on exported rows and refuses what leaks; `torchtune` is the dataset component for its recipes. Axolotl,
LLaMA-Factory and ms-swift read what `packsvc export --to examples` writes, Unsloth takes `sft_config` as TRL does.

Trainer libraries are imported inside the functions that need them.
"""

from packsvc.trainers.accelerated import accelerated_backward
from packsvc.trainers.hf import hf_trainer
from packsvc.trainers.loop import Step, accumulate, backward, evaluate
from packsvc.trainers.loss import loss_sum
from packsvc.trainers.sft import check_sft, sft_config, sft_dataset, sft_trainer
from packsvc.trainers.torchtune import torchtune_packs

__all__ = [
    "Step",
    "accelerated_backward",
    "accumulate",
    "backward",
    "check_sft",
    "evaluate",
    "hf_trainer",
    "loss_sum",
    "sft_config",
    "sft_dataset",
    "sft_trainer",
    "torchtune_packs",
]
