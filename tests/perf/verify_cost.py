"""Measure what verify_replicas costs: of a DDP step on the CPU, and of all-reducing as many bytes.

    ./run_bench.sh python tests/perf/verify_cost.py [RANKS [ROUNDS [WORKLOADS]]]

Step, verifications and all_reduces take turns in one launch, each behind a barrier, in an order
that is drawn anew for each round, because the call after a step finds the step's caches. A time is
the slowest rank's, a figure the median over the rounds, a share the median of the rounds' own
ratios. Aims: a verification at most 2 % of a step and 20 % of the all_reduce. Exits with 1 when a
healthy replica is reported different.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel

from ddpbench import Report, verify_replicas
from ddpbench.catalog import workloads
from ddpbench.catalog.task import RankSetup
from ddpbench.launch import starters

WARM = 3


GPT = {"layers": 4, "width": 256, "sequence": 64, "vocabulary": 4096}
# Much memory and little work on it, and the other way round → workload, settings, batch.
WORKLOADS: dict[str, tuple[str, dict[str, int], int]] = {
    "8 × Linear(1024), batch 256, Adam": ("mlp", {"width": 1024, "depth": 8}, 256),
    "GPT of 4 layers, width 256, 16 sequences of 64, Adam": ("transformer", GPT, 16),
}


def measure_slowest(call: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of one call in the slowest rank; they begin after a barrier."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    took = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure(title: str, rank: int, rounds: int) -> None:
    """Print the cost of each verification on this workload."""
    name, settings, batch = WORKLOADS[title]
    setup = RankSetup(rank, dist.get_world_size(), batch, torch.device("cpu"), 0, None)
    task = workloads.get(name).build(settings, setup)
    replica = DistributedDataParallel(task.model)
    optimizer = torch.optim.Adam(replica.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(replica, task.batch(0)).backward()
        optimizer.step()

    ways: dict[str, Callable[[], Report]] = {
        "parameters": partial(verify_replicas, replica),
        "and the optimizer": partial(verify_replicas, replica, optimizer),
        "and gradients": partial(verify_replicas, replica, optimizer, gradients=True),
    }
    step()
    reports = {name: way() for name, way in ways.items()}
    buffers = {name: torch.zeros(report.nbytes // 4) for name, report in reports.items()}
    timed: dict[str, Callable[[], object]] = {"step": step}
    for name, way in ways.items():
        timed[name] = way
        timed[f"all_reduce {name}"] = partial(dist.all_reduce, buffers[name])
    took: dict[str, list[float]] = {name: [] for name in timed}
    order = random.Random(title)  # the same in every rank
    for _ in range(WARM + rounds):
        for name in order.sample(list(timed), len(timed)):
            took[name].append(measure_slowest(timed[name]))

    seconds = {name: np.array(times[WARM:]) for name, times in took.items()}
    ms = {name: np.median(times) * 1e3 for name, times in seconds.items()}
    rows = []
    for name, report in reports.items():
        of_step = np.median(seconds[name] / seconds["step"]) * 100
        reduced = f"all_reduce {name}"
        of_reduced = np.median(seconds[name] / seconds[reduced]) * 100
        rows.append([name, report.nbytes / 1e6, ms[name], of_step, ms[reduced], of_reduced])
    if rank == 0:
        print(f"\n{title}: a step takes {ms['step']:.1f} ms")
        head = ["verified", "MB", "ms", "% of a step", "all_reduce ms", "% of it"]
        print(tabulate(rows, head, floatfmt=".2f"), flush=True)
    if not all(report.equal for report in reports.values()):
        sys.exit("a healthy replica is reported different")


def main(ranks: int, rounds: int, workloads: int) -> int:
    """Measure the first workloads in every rank."""
    torch.set_num_threads(1)
    rank = int(os.environ["DDPBENCH_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for title in [*WORKLOADS][:workloads]:
        measure(title, rank, rounds)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    numbers = (*map(int, sys.argv[1:]), *(2, 20, len(WORKLOADS))[len(sys.argv) - 1 :])
    sys.exit(starters.run_forked(partial(main, *numbers), numbers[0]))
