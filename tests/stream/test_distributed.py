"""Under torchrun with gloo: ranks from the process group, the token mean over all of them, and the plain order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from packsvc.stream import PackStream
from tests.stream.oracle import steps_of
from tests.stream.outputs import Written

PROGRAM = """
import json, sys, torch, torch.distributed as dist
from packsvc.stream import PackStream
dist.init_process_group("gloo")
stream = PackStream(sys.argv[1], batch_packs=2)
assert (stream.rank, stream.world_size) == (dist.get_rank(), dist.get_world_size())
steps, sums = [], []
for batch in stream:
    mine = torch.tensor([batch.num_loss_tokens])
    dist.all_reduce(mine)
    assert int(mine) == batch.num_loss_tokens_global
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batch.pack_indices)
    steps.append([pack for part in parts for pack in part])
if dist.get_rank() == 0:
    open(sys.argv[2], "w").write(json.dumps(steps))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_process_group_read_what_one_process_reads(small: Written, tmp_path: Path):
    program, answer = tmp_path / "program.py", tmp_path / "steps.json"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run([*command, small.path, str(answer)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = steps_of(PackStream(small.path, batch_packs=4))
    assert json.loads(answer.read_text()) == [list(step) for step in expected]
