"""What to change, for each verdict on each way of calling."""

from __future__ import annotations

import re

import torch

from packsvc.attention import NAME
from packsvc.probe.calls import Call
from packsvc.probe.verdicts import Verdict

_MIXERS = re.compile(
    r"Mamba|SSM|DeltaNet|DeltaAttention|ShortConv|Rwkv|RWKV|Recurrent|mLSTM|xLSTM|Lightning|LinearAttention"
)
_OWN: dict[Call, str] = {
    Call.LOOP: "hand over use_cache=False, as batch.hf() does: a cache object makes the model forget positions",
    Call.BATCH2: "hand over one row: batch.hf() flattens all packs of a batch (batch_packs=N), batch size 1",
    Call.ALL_ONES_MASK: "leave attention_mask out of the batch: one of ones makes the model forget positions",
    Call.NO_SEQ_IDX: "hand over all of batch.hf(), seq_idx too",
    Call.POSITIONS: "hand over all of batch.hf(): this model does not infer boundaries from positions",
    Call.BOUNDARIES: "hand over position_ids too: batch.hf() has both",
    Call.MASK_4D: "hand over batch.hf() instead of a mask of your own, which every layer takes as it is",
    Call.IDS_ONLY: "hand over all of batch.hf(): nothing tells the model where examples end",
}


def advice(
    call: Call, verdict: Verdict, model: torch.nn.Module, *, attention: str, clean_with: str | None, trainer_clean: bool
) -> str:
    """One sentence.

    Args:
        call: The way of calling.
        verdict: On it.
        model: What was called.
        attention: Its implementation.
        clean_with: An attention with which this model was seen to be clean, if it was tried.
        trainer_clean: Whether `model(**batch.hf())` is clean.
    """
    if verdict is Verdict.CLEAN:
        return ""
    if verdict is Verdict.BLIND:
        return "nothing is proven: give the model weights under which its outputs depend on its inputs"
    if verdict is Verdict.REFUSED:
        return "nothing leaks, nothing trains: " + (_OWN.get(call) or "see the error")
    if trainer_clean and call in _OWN:
        return _OWN[call]
    if clean_with is not None:
        return f'build the model with attn_implementation="{clean_with}", with which it was seen to be clean'
    if found := mixers(model):
        return (
            f"{', '.join(found)} carries state over boundaries: with its kernels installed (causal-conv1d, mamba-ssm, "
            "flash-linear-attention) probe again; if it still leaks, train one example a row, not packs"
        )
    if attention == NAME:
        return "this model does not attend through transformers' attention interface: train one example a row"
    return "its masks are made without position_ids: no attention that was tried isolates; train one example a row"


def mixers(model: torch.nn.Module) -> list[str]:
    """Names of layers that carry a state or a convolution along the row."""
    names = {type(module).__name__ for module in model.modules()}
    inner = {
        name for name in names if _MIXERS.search(name) and not re.search(r"Model|ForCausalLM|Norm|Layer|Cache", name)
    }
    return sorted(inner)[:3]
