"""Is packed training on a GPU exact, and what does it gain? One JSON line per figure; under 8 minutes.

    make gpu                                    (python benchmarks/gpu.py | tee benchmarks/results/gpu.jsonl)
    python benchmarks/gpu.py --device cpu       the same code at toy size, to see that it runs; its figures mean nothing

Written for torch 2.11 + CUDA 13 and Python 3.12 without flash-attn: `varlen_attention` then uses PyTorch's own varlen
kernel; with flash-attn installed it uses that, and each line names which. Needs torch, numpy, pyarrow, fsspec and
transformers (5.17 will do); packsvc need not be installed, its repository is enough, and neither ray nor pydantic nor a
network is used. What is missing is named, and nothing is measured then.

    kernel     the kernel in bf16 beside the segment loop in bf16, both against the loop in float32: error over error
    isolation  other segments after one was replaced: exactly the same bits, and no gradient into it
    stream     does taking a batch wait for the device; tokens/s of the stream over those of a training step
    step       packed batches beside the same examples padded to the longest of a batch (sdpa with a mask): real
               tokens/s and peak memory. The usual claim is three times on short examples
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import reporting

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "numpy", "pyarrow", "fsspec", "transformers")
sys.path[:0] = [str(ROOT)]


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    lengths: tuple[int, ...]
    head_dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    seq_len: int
    num_tokens: int
    batch_packs: int
    steps: int
    repeats: int


FULL = Scale(
    lengths=(513, 1, 130, 2048, 64, 900, 777, 3), head_dim=64, hidden=1024, layers=12, heads=16, kv_heads=4,
    vocabulary=32_000, seq_len=8192, num_tokens=24_000_000, batch_packs=2, steps=8, repeats=3,
)  # fmt: skip
TOY = Scale(
    lengths=(9, 1, 5, 16), head_dim=8, hidden=32, layers=1, heads=4, kv_heads=2,
    vocabulary=256, seq_len=512, num_tokens=12_000, batch_packs=2, steps=2, repeats=3,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"gpu.py needs {', '.join(missing)}; nothing was measured")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "gpu.py needs a CUDA device, and PyTorch sees none; nothing was measured (--device cpu shows that it runs)"
        )
    run(device, FULL if device == "cuda" else TOY)


def run(device: str, scale: Scale) -> None:
    """All parts, one after the other."""
    started = time.perf_counter()
    kernel(device, scale)
    isolation(device, scale)
    with tempfile.TemporaryDirectory() as folder:
        out = write(Path(folder) / "out", scale)
        steps(device, scale, out)
    report("seconds_in_all", [time.perf_counter() - started], goal=480, better="lower", unit="s", against="the limit")


# --- kernel ----------------------------------------------------------------------------------------------------------


def tensors(device: str, scale: Scale, kv_heads: int, seed: int = 0) -> list[Any]:
    """q, k, v in bf16."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = [(scale.heads, scale.head_dim), (kv_heads, scale.head_dim), (kv_heads, scale.head_dim)]
    made = [torch.randn(sum(scale.lengths), *shape, generator=generator) for shape in shapes]
    return [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in made]


def kernel(device: str, scale: Scale) -> None:
    """Error of the kernel over the error of the slow twin in the same dtype, both against float32."""
    import torch

    from packsvc.attention import varlen_attention
    from packsvc.attention.varlen import segment_attention

    offsets = torch.tensor([0, *scale.lengths]).cumsum(0).int().to(device)
    bounds, root = offsets.tolist(), scale.head_dim**-0.5
    ratios: dict[str, list[float]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    for kv_heads in (scale.heads, scale.kv_heads):
        for window in (None, max(2, max(scale.lengths) // 8)):
            given = tensors(device, scale, kv_heads)
            wide = [tensor.detach().float().requires_grad_() for tensor in given]
            upstream = torch.randn(sum(scale.lengths), scale.heads, scale.head_dim, device=device)

            def results(out: Any, of: list[Any], upstream: Any = upstream) -> list[Any]:
                return [out.detach(), *torch.autograd.grad(out, of, upstream.to(out.dtype))]

            exact = results(segment_attention(*wide, bounds, window, scale=root), wide)
            twin = results(segment_attention(*given, bounds, window, scale=root), given)
            fast = results(varlen_attention(*given, offsets, max(scale.lengths), window), given)
            for name, reference, slow, found in zip(ratios, exact, twin, fast, strict=True):
                allowed = float((slow.float() - reference).abs().max()) + 1e-6
                ratios[name].append(float((found.float() - reference).abs().max()) / allowed)
    for name, values in ratios.items():
        against = f"the segment loop in bf16; {kernel_name(device)}; grouped or not, window or not"
        report(f"kernel_error_{name}", values, goal=2.0, better="lower", unit="ratio", against=against, worst=True)


def kernel_name(device: str) -> str:
    """Which kernel `varlen_attention` takes."""
    from packsvc.attention.kernels import flash_kernel, torch_kernel

    if device != "cuda":
        return "segment loop (no CUDA)"
    return "flash-attn" if flash_kernel() else "torch.nn.attention.varlen" if torch_kernel() else "segment loop"


def isolation(device: str, scale: Scale) -> None:
    """Replace the first segment: what changes in the others, and what of their loss reaches it."""
    import torch

    from packsvc.attention import varlen_attention

    offsets = torch.tensor([0, *scale.lengths]).cumsum(0).int().to(device)
    first, longest = scale.lengths[0], max(scale.lengths)
    changes, gradients, seen = [], [], []
    for seed in range(scale.repeats):
        given = tensors(device, scale, scale.kv_heads, seed)
        other = [tensor.detach().clone() for tensor in given]
        for tensor in other:
            tensor[:first] = torch.randn_like(tensor[:first])
        before = varlen_attention(*given, offsets, longest)
        after = varlen_attention(*other, offsets, longest)
        changes.append(float((before[first:] - after[first:]).detach().abs().max()))
        seen.append(float((before[:first] - after[:first]).detach().abs().max()))
        reached = torch.autograd.grad(before[first:].float().square().sum(), given)
        gradients.append(max(float(gradient[:first].abs().max()) for gradient in reached))
    against = f"the same batch before; {kernel_name(device)}"
    report("isolation_change", changes, goal=0.0, better="lower", unit="absolute", against=against, worst=True)
    report("isolation_gradient", gradients, goal=0.0, better="lower", unit="absolute", against=against, worst=True)
    report("isolation_control", seen, goal=0.1, better="higher", unit="absolute", against=against + "; must be seen")


# --- stream and step -------------------------------------------------------------------------------------------------


def write(folder: Path, scale: Scale) -> Path:
    """A packed output of synthetic examples, lengths lognormal with median 350 (what fits), 55 % trained."""
    sys.path[:0] = [str(Path(__file__).parent)]
    import stream as writing

    writing.VOCABULARY = scale.vocabulary
    writer = writing.PacksvcWriter(folder, scale.seq_len, "zstd:1")
    for packs in writing.groups(scale.num_tokens, scale.seq_len):
        writer.add(packs)
    writer.close()
    return folder


def model_for(scale: Scale, device: str, attention: str) -> Any:
    """A Llama in bf16 with random weights, the same for each attention."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=3 * scale.hidden,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.kv_heads,
        max_position_embeddings=scale.seq_len,
    )
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return made.to(device, torch.bfloat16).train()


def padded(batch: Any) -> dict[str, Any]:
    """The same examples as rows, padded to the longest, with the mask that goes with it."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    spans = list(pairwise(batch.cu_seqlens.tolist()))
    ids = [batch.input_ids[a:b].long() for a, b in spans]
    labels = [batch.labels[a:b].long() for a, b in spans]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(piece) for piece in ids], batch_first=True),
        "use_cache": False,
    }


def steps(device: str, scale: Scale, out: Path) -> None:
    """The stream beside training steps, and packed steps beside padded ones on the same examples."""
    from packsvc import PackStream
    from packsvc.attention import register

    def stream(**options: Any) -> Any:
        return PackStream(out, rank=0, world_size=1, batch_packs=scale.batch_packs, seed=0, **options)

    packed_model = model_for(scale, device, register())
    with stream(device=device) as reading:
        host_wait(device, scale, reading)
    with stream(device=device) as reading:
        batches = list(islice(reading, scale.steps))
    packed = measure(device, scale, packed_model, [batch.hf() for batch in batches])
    del packed_model
    # A fifth of the examples a step: a pack's worth of padded rows with logits does not fit most devices.
    small = [few(batch) for batch in batches]
    padded_model = model_for(scale, device, "sdpa")
    rows = [padded(batch) for batch in small]
    rowwise = measure(device, scale, padded_model, rows)
    del padded_model
    packed_model = model_for(scale, device, register())
    narrow = measure(device, scale, packed_model, [batch.hf() for batch in small])

    tokens = sum(batch.num_tokens for batch in batches)
    few_tokens = sum(batch.num_tokens for batch in small)
    share = 1 - few_tokens / sum(row["input_ids"].numel() for row in rows)
    size = f"Llama of {sum(p.numel() for p in packed_model.parameters()) / 1e6:.0f} M parameters in bf16"
    report(
        "train_tokens_per_second",
        [tokens / s for s in packed.seconds],
        goal=None,
        better="higher",
        unit="tokens/s",
        against=size,
    )
    rates = stream_rates(scale, stream, device)
    ratio = [rate * seconds / tokens for rate, seconds in zip(rates, packed.seconds, strict=True)]
    report(
        "stream_over_training", ratio, goal=10.0, better="higher", unit="ratio", against=f"tokens/s of the step: {size}"
    )
    gains = [slow / fast for slow, fast in zip(rowwise.seconds, narrow.seconds, strict=True)]
    what = f"the same {len(small[0].cu_seqlens) - 1} examples a step padded ({share:.0%} padding), sdpa; {size}"
    report("packed_over_padded_speed", gains, goal=2.0, better="higher", unit="ratio", against=what)
    memory = [narrow.peak_bytes / max(1, rowwise.peak_bytes)]
    report("packed_over_padded_peak_memory", memory, goal=1.0, better="lower", unit="ratio", against=what)
    report(
        "peak_memory",
        [packed.peak_bytes / 2**30],
        goal=None,
        better="lower",
        unit="GiB",
        against=f"a step of {tokens // len(batches)} tokens; {size}",
    )


def few(batch: Any) -> Any:
    """The first fifth of a batch's segments, as a batch."""
    from packsvc.probe import pack_of

    lengths = batch.cu_seqlens.diff().tolist()
    kept = lengths[: max(2, len(lengths) // 5)]
    end = sum(kept)
    made = pack_of(batch.input_ids[:end].cpu(), batch.labels[:end].cpu() >= 0, kept)
    return made.to(batch.input_ids.device)


@dataclass(frozen=True)
class Measured:
    """Seconds of one pass over the batches, by repeat, and the peak of memory."""

    seconds: list[float]
    peak_bytes: int


def measure(device: str, scale: Scale, model: Any, rows: Sequence[dict[str, Any]]) -> Measured:
    """Forward, backward and optimizer step on each batch; the first pass only warms up."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(scale.repeats + 1):
        start = time.perf_counter()
        for row in rows:
            model(**row).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return Measured(seconds=seconds[1:], peak_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else 0)


def host_wait(device: str, scale: Scale, reading: Any) -> None:
    """Keep the device busy, then take batches: the host must get them long before the device is done."""
    import torch

    batches = iter(reading)
    first = next(batches)
    width = 8192 if device == "cuda" else 64
    square = torch.randn(width, width, device=device)
    wait(device)
    shares = []
    for _ in range(scale.repeats):
        start = time.perf_counter()
        for _ in range(40):
            square = (square @ square).tanh()
        for _ in range(4):
            batch = next(batches, first)
        taken = time.perf_counter() - start
        wait(device)
        shares.append(taken / (time.perf_counter() - start))
        if not math.isfinite(float(batch.input_ids.sum())):
            raise AssertionError("ids are not numbers")
    against = "time until the device was done with work queued before; 4 batches taken meanwhile"
    report("host_wait_share", shares, goal=0.5, better="lower", unit="ratio", against=against)


def stream_rates(scale: Scale, stream: Callable[..., Any], device: str) -> list[float]:
    """Tokens a second of the stream by itself, onto the device."""
    rates = []
    for repeat in range(scale.repeats):
        with stream(device=device, epoch=repeat) as reading:
            batches = iter(reading)
            next(batches)
            start, tokens = time.perf_counter(), 0
            for batch in islice(batches, 40 * scale.steps):
                tokens += batch.num_tokens
            wait(device)
            rates.append(tokens / (time.perf_counter() - start))
    return rates


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


# --- lines -----------------------------------------------------------------------------------------------------------


def report(figure: str, values: Sequence[float], **line: Any) -> None:
    """See `reporting.report`."""
    reporting.report("gpu", figure, values, hardware=hardware(), **line)


def hardware() -> str:
    """The device, or that there was none, and what ran on it."""
    import torch
    import transformers

    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"no GPU ({platform.machine()}, {os.cpu_count()} cores): toy size"
    )
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device}, {libraries}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
