"""What the watchdog costs: a collective, a DDP step, one heartbeat, one call over mpi4py.

    ./run_bench.sh python tests/perf/watchdog_cost.py [BLOCKS [CALLS]]

Two ranks on gloo. BLOCKS (24) blocks of CALLS (4000) calls, or CALLS / 100 steps, with and without
`ddpbench.watchdog` take turns in one launch; the figure is the median over pairs of neighbouring
blocks, with its interval. Aims: no more than 1 µs per collective. The heartbeat's own time is
measured too: it is what a command of ddpbench spends about once a second between timed spans, and a
user's rank twice a second in a thread of its own.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import timeit
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from scipy import stats
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpbench
from ddpbench.hang.flight_recorder import Flight
from ddpbench.hang.watchdog import read_status
from ddpbench.launch import forks

RANKS, WARM = 2, 2


def block(call: Callable[[], object], times: int) -> float:
    """Seconds of one call, the slowest rank's, in a block that all start together."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    took = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def pairs(call: Callable[[], object], times: int, blocks: int) -> tuple[list[float], list[float]]:
    """Seconds without and with the watchdog, block by block; which comes first takes turns."""
    without: list[float] = []
    watched: list[float] = []
    for number in range(WARM + blocks):
        for on in (number % 2 == 0, number % 2 == 1):
            if on:
                with ddpbench.watchdog(timeout=60):
                    dist.barrier()
                    watched.append(block(call, times))
                    dist.barrier()
            else:
                without.append(block(call, times))
    return without[WARM:], watched[WARM:]


def row(name: str, without: list[float], watched: list[float], unit: float) -> list[object]:
    """Both medians, and the median of the differences with its 95 % interval, absolute and in %."""
    differences = [b - a for a, b in zip(without, watched, strict=True)]
    ratios = [100 * (b / a - 1) for a, b in zip(without, watched, strict=True)]
    cells: list[object] = [
        name,
        statistics.median(without) * unit,
        statistics.median(watched) * unit,
    ]
    for values, scale in ((differences, unit), (ratios, 1.0)):
        low, high = stats.quantile_test(values).confidence_interval()
        cells.append(
            f"{statistics.median(values) * scale:.2f} [{low * scale:.2f}, {high * scale:.2f}]"
        )
    return cells


def noted(calls: int) -> float:
    """Seconds that the count of a call over mpi4py takes: its three statements, alone."""
    queue = type("Queue", (), {})()
    past: deque[object] = deque(maxlen=64)
    names = {"queue": queue, "count": count(1).__next__, "keep": past.append, "kind": torch.float32}
    many = 250 * calls
    new = "queue.running = noted = (count(), 'all_reduce', kind, 4)\nkeep(noted)"
    with_it, before = (
        min(timeit.repeat(code, globals=names, number=many, repeat=5))
        for code in (new, "queue.running = kind")
    )
    return (with_it - before) / many


def main(blocks: int, calls: int) -> int:
    """Measure in every rank; rank 0 prints."""
    torch.set_num_threads(1)
    rank = int(os.environ["DDPBENCH_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    one = torch.zeros(1)
    layers = (nn.Linear(1024, 1024) for _ in range(4))
    replica = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-4)
    batch = torch.randn(64, 1024)

    def step() -> None:
        optimizer.zero_grad()
        replica(batch).square().mean().backward()
        optimizer.step()

    rows = [
        row("all_reduce of 4 B, µs", *pairs(lambda: dist.all_reduce(one), calls, blocks), 1e6),
        row("DDP step, 4 × Linear(1024), ms", *pairs(step, max(1, calls // 100), blocks), 1e3),
    ]
    flight, beats = Flight(), []
    for _ in range(200):
        began = time.perf_counter()
        read_status(flight, heartbeat=True)
        beats.append(time.perf_counter() - began)
    if rank == 0:
        head = ["", "without", "with", "difference", "%"]
        print(tabulate(rows, head, floatfmt=".2f"))
        print(f"the words of a heartbeat: {statistics.median(beats) * 1e6:.0f} µs")
        print(f"the count of a call over mpi4py: {noted(calls) * 1e9:.0f} ns", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    blocks, calls = (*map(int, sys.argv[1:]), *(24, 4000)[len(sys.argv) - 1 :])
    sys.exit(forks.run(partial(main, blocks, calls), RANKS))
