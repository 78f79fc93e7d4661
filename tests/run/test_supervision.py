"""What is learned does not depend on packing."""

import numpy as np

from packsvc.encode import load_encoder
from packsvc.run import pack
from packsvc.sources import list_inputs, read_example, recognise, sample_rows
from tests.run.jobs import small_job, write_rows
from tests.run.test_again import segments


def test_m4_the_same_tokens_are_learned_with_and_without_packing(tmp_path, qwen3_path):
    write_rows(tmp_path / "data" / "a.jsonl", 60)
    job = small_job(tmp_path, qwen3_path)
    file = list_inputs(job.sources[0], job=job)[0]
    rows = sample_rows(file, limit=100)
    reading = recognise(rows, job.sources[0])
    alone = load_encoder(job).encode([read_example(r, reading, source_name="chat") for r in rows], source="chat")
    learned = {
        int(row): [int(i) for i in alone.input_ids[a:b][alone.loss_mask[a:b]]]
        for row, a, b in zip(alone.row, alone.offsets[:-1], alone.offsets[1:], strict=True)
    }
    pack(job, workers=0)
    packed = {o[1]: [i for i, m in zip(ids, mask, strict=True) if m] for _, o, ids, mask in segments(tmp_path / "out")}
    assert packed == learned
    assert len(packed) == 60
    assert all(len(tokens) > 1 for tokens in packed.values())
    assert np.sum(alone.loss_mask) == sum(map(len, packed.values()))
