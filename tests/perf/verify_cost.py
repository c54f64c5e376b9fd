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
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench import Report, verify_replicas
from ddpbench.launch import starters

WARM = 3
Workload = tuple[nn.Module, Callable[[], Tensor]]  # and a batch of its inputs


def make_mlp(batch: int) -> Workload:
    """Return 8 × Linear(1024): much memory, little work on it."""
    layers = (nn.Linear(1024, 1024) for _ in range(8))
    return nn.Sequential(*layers), lambda: torch.randn(batch, 1024)


class Gpt(nn.Module):
    """4 causal layers of width 256 between 4096 tokens and their scores."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4096, 256)
        self.places = nn.Parameter(torch.zeros(length, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = nn.Linear(256, 4096)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(batch) + self.places, self.mask, is_causal=True)
        return self.scores(hidden)  # type: ignore[no-any-return]


def make_gpt(batch: int) -> Workload:
    """Return a model with little memory and much work on it."""
    return Gpt(64), lambda: torch.randint(4096, (batch, 64))


WORKLOADS: dict[str, tuple[Callable[[int], Workload], int]] = {
    "8 × Linear(1024), batch 256, Adam": (make_mlp, 256),
    "GPT of 4 layers, width 256, 16 sequences of 64, Adam": (make_gpt, 16),
}


def measure_slowest(call: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank, after a barrier."""
    dist.barrier()
    began = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure(title: str, rank: int, rounds: int) -> None:
    """Print the cost of each verification on this workload."""
    make, size = WORKLOADS[title]
    module, batch = make(size)
    replica = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(replica.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        replica(batch()).square().mean().backward()
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

    def share(name: str, of: str) -> float:
        pairs = zip(took[name][WARM:], took[of][WARM:], strict=True)
        return statistics.median(a / b for a, b in pairs) * 100

    ms = {name: statistics.median(times[WARM:]) * 1e3 for name, times in took.items()}
    if rank == 0:
        rows = [
            [name, report.nbytes / 1e6, ms[name], share(name, "step"),
             ms[f"all_reduce {name}"], share(name, f"all_reduce {name}")]
            for name, report in reports.items()
        ]  # fmt: skip
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
