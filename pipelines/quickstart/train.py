"""Streams packed shards into a small, randomly initialised Llama on the CPU, and proves that packing changed nothing.

    python pipelines/quickstart/train.py [OUT]        # default: the out/ beside this file

For the first batch it prints the packed loss and the loss of the same examples one by one; they must agree. To be quick
on a CPU the model knows only the tokens of the packs it trains on, a few thousand of the tokenizer's.
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from packsvc import PackStream
from packsvc.attention import register

STEPS = 8
out = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "out"
stream = PackStream(out, seed=0, remainder="pad")
known = torch.cat([batch.input_ids for batch in islice(stream, STEPS)]).unique()
stream.set_epoch(0)


def row_of(batch):
    """What the model is called with: `batch.hf()`, ids and labels renumbered for its small vocabulary."""
    row = batch.hf()
    row["input_ids"] = torch.searchsorted(known, row["input_ids"])
    row["labels"] = torch.where(row["labels"] < 0, -100, torch.searchsorted(known, row["labels"]))
    return row


def one_by_one(model, batch):
    """The token-mean loss of a batch's examples, each in a forward pass of its own."""
    row, total = row_of(batch), 0.0
    for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        boundaries = torch.tensor([0, stop - start], dtype=torch.int32)
        alone = {"cu_seq_lens_q": boundaries, "max_length_q": int(stop - start), "use_cache": False}
        logits = model(input_ids=row["input_ids"][:, start:stop], **alone).logits[0, :-1]
        labels = row["labels"][0, start + 1 : stop]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).item()
    return total / batch.num_loss_tokens


torch.manual_seed(0)
size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(known), max_position_embeddings=1 << 17, **size)
model = AutoModelForCausalLM.from_config(config, attn_implementation=register())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step, batch in enumerate(islice(stream, STEPS)):
    if step == 0:
        with torch.no_grad():
            packed, alone = model(**row_of(batch)).loss.item(), one_by_one(model, batch)
        print(f"first batch: {batch.num_segments} examples, {batch.num_tokens} tokens, {batch.num_loss_tokens} targets")
        print(f"packed loss {packed:.6f}   one by one {alone:.6f}   difference {abs(packed - alone):.1e}")
        if not abs(packed - alone) <= 1e-4:
            sys.exit("packed and one by one differ: examples saw each other")
    loss = model(**row_of(batch)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1:2d} of {min(STEPS, len(stream))}: {batch.num_segments:2d} examples, loss {loss.item():.4f}")
