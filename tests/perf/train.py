"""A training script with DDP on gloo and without ddpbench; rank 0 writes its durations.

    torchrun --nproc-per-node 2 tests/perf/train.py BATCH STEPS FILE

Each rank is bound to a core, because then steps vary less. FILE receives JSON: seconds and CPU
seconds per step of the slower rank, from barrier to barrier.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM, WIDTH = 50, 256


def main(batch: int, steps: int, file: Path) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(batch, WIDTH)
    for step in range(-WARM, steps):
        if step == 0:
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    cpu = time.process_time() - used
    dist.barrier()
    taken = torch.tensor([time.perf_counter() - began, cpu], dtype=torch.float64) / steps
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(taken.tolist()))
    time.sleep(0.5)  # gloo may hang where its group is freed right after a call
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
