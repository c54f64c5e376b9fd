"""Measure what the watchdog costs: a collective, a DDP step, one heartbeat.

    ./run_bench.sh python tests/perf/watchdog_cost.py [BLOCKS [CALLS]]

Two ranks on gloo. BLOCKS (24) blocks of CALLS (4000) calls, or CALLS / 100 steps, with and without
`ddpbench.watchdog` take turns in one launch; the figure is the median over pairs of neighbouring
blocks, with its interval. Aim: at most 1 µs per collective. A command of ddpbench spends the time
of a heartbeat about once per second between timed spans, a user's rank twice per second in a thread
of its own.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from scipy import stats
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpbench
from ddpbench.hang.flight_recorder import Flight
from ddpbench.hang.watchdog import read_status
from ddpbench.launch import starters

RANKS, WARM = 2, 2


def measure_block(call: Callable[[], object], times: int) -> float:
    """Return the seconds of one call of the slowest rank, in a block after a barrier."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    took = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure_pairs(
    call: Callable[[], object], times: int, blocks: int
) -> tuple[list[float], list[float]]:
    """Return the seconds without and with the watchdog, block by block, in turns."""
    without: list[float] = []
    watched: list[float] = []
    for number in range(WARM + blocks):
        for on in (number % 2 == 0, number % 2 == 1):
            if on:
                with ddpbench.watchdog(timeout=60):
                    dist.barrier()
                    watched.append(measure_block(call, times))
                    dist.barrier()
            else:
                without.append(measure_block(call, times))
    return without[WARM:], watched[WARM:]


def describe(name: str, without: list[float], watched: list[float], unit: float) -> list[object]:
    """Return both medians, and the median difference with its 95 % interval, absolute and in %."""
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

    calls_taken = measure_pairs(lambda: dist.all_reduce(one), calls, blocks)
    steps_taken = measure_pairs(step, max(1, calls // 100), blocks)
    rows = [
        describe("all_reduce of 4 B, µs", *calls_taken, 1e6),
        describe("DDP step, 4 × Linear(1024), ms", *steps_taken, 1e3),
    ]
    flight, beats = Flight(), []
    for _ in range(200):
        began = time.perf_counter()
        read_status(flight, heartbeat=True)
        beats.append(time.perf_counter() - began)
    if rank == 0:
        head = ["", "without", "with", "difference", "%"]
        print(tabulate(rows, head, floatfmt=".2f"))
        print(f"a heartbeat: {statistics.median(beats) * 1e6:.0f} µs", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    blocks, calls = (*map(int, sys.argv[1:]), *(24, 4000)[len(sys.argv) - 1 :])
    sys.exit(starters.run_forked(partial(main, blocks, calls), RANKS))
