"""What verify_replicas costs: of a DDP step on the CPU, and of all-reducing the same bytes by gloo.

    ./run_bench.sh python tests/perf/verify_cost.py [RANKS [ROUNDS [WORKLOADS]]]

Step, floors, verifications and all_reduces take turns in one launch, each behind a barrier, in an
order that is drawn anew for each round: what always follows a step finds the step's caches. A time
is the slowest rank's, a figure the median over the rounds, a share the median of the rounds' own
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
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench import Report, verify_replicas
from ddpbench.launch import forks
from ddpbench.replicas.digest import of_cpu

WARM = 3
Workload = tuple[nn.Module, Callable[[], Tensor]]  # and a batch of its inputs


def mlp(batch: int) -> Workload:
    """8 × Linear(1024): much memory, little work on it."""
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), lambda: torch.randn(
        batch, 1024
    )


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


def gpt(batch: int) -> Workload:
    """Little memory, much work on it."""
    return Gpt(64), lambda: torch.randint(4096, (batch, 64))


ADAM, SGD = partial(torch.optim.Adam, lr=1e-4), partial(torch.optim.SGD, lr=1e-4)
WORKLOADS: dict[str, tuple[Callable[[int], Workload], int, Callable[..., Any]]] = {
    "8 × Linear(1024), batch 64, Adam": (mlp, 64, ADAM),
    "8 × Linear(1024), batch 256, SGD": (mlp, 256, SGD),
    "8 × Linear(1024), batch 256, Adam": (mlp, 256, ADAM),
    "GPT of 4 layers, width 256, 16 sequences of 64, Adam": (gpt, 16, ADAM),
}


def slowest(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank, started together."""
    dist.barrier()
    began = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure(title: str, rank: int, rounds: int) -> None:
    """One table: what each verification costs on this workload."""
    make, size, optimize = WORKLOADS[title]
    module, batch = make(size)
    replica = DistributedDataParallel(module)
    optimizer = optimize(replica.parameters())

    def step() -> None:
        optimizer.zero_grad()
        replica(batch()).square().mean().backward()
        optimizer.step()

    tensors = [parameter.detach() for parameter in module.parameters()]
    few = torch.zeros(30, dtype=torch.int64)
    ways: dict[str, Callable[[], Report]] = {
        "parameters": partial(verify_replicas, replica),
        "and the optimizer": partial(verify_replicas, replica, optimizer),
        "and gradients": partial(verify_replicas, replica, optimizer, gradients=True),
    }
    step()
    reports = {name: way() for name, way in ways.items()}
    buffers = {name: torch.zeros(report.nbytes // 4) for name, report in reports.items()}
    timed: dict[str, Callable[[], object]] = {
        "step": step,
        "torch.sum of each parameter": lambda: [t.sum() for t in tensors],
        "xxh3 of each parameter": lambda: [of_cpu(t) for t in tensors],
        "all_reduce of 240 bytes": lambda: dist.all_reduce(few),
    }
    for name, way in ways.items():
        timed[name] = way
        timed[f"all_reduce {name}"] = partial(dist.all_reduce, buffers[name])
    took: dict[str, list[float]] = {name: [] for name in timed}
    order = random.Random(title)  # the same in every rank
    for _ in range(WARM + rounds):
        for name in order.sample(list(timed), len(timed)):
            took[name].append(slowest(timed[name]))

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
        print("floors: " + ", ".join(f"{name} {ms[name]:.2f} ms" for name in list(timed)[1:4]))
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
    sys.exit(forks.run(partial(main, *numbers), numbers[0]))
