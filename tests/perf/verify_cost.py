"""What verify_replicas costs: of a DDP step on the CPU, and of all-reducing the same bytes by gloo.

    ./run_bench.sh python tests/perf/verify_cost.py [RANKS]

Step, verifications and all_reduce take turns in one launch, each behind a barrier; a time is the
slowest rank's, the figures are medians over the rounds. Aims: a verification at most 2 % of a step
and 20 % of the all_reduce. Exits with 1 when a healthy replica is reported different.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench import verify_replicas

ROUNDS, WARM = 40, 5


def mlp() -> tuple[nn.Module, Callable[[], Tensor]]:
    """8 × Linear(1024), batch 64: much memory, little work on it."""
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), lambda: torch.randn(64, 1024)


def transformer() -> tuple[nn.Module, Callable[[], Tensor]]:
    """4 layers of width 256, 16 sequences of 64: little memory, much work on it."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return encoder, lambda: torch.randn(16, 64, 256)


def slowest(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank, started together."""
    dist.barrier()
    began = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure(rank: int, make: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]) -> None:
    """One table: what each verification costs on this workload."""
    module, batch = make()
    replica = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(replica.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        replica(batch()).square().mean().backward()
        optimizer.step()

    tensors = [parameter.detach() for parameter in module.parameters()]
    ways: dict[str, Callable[[], object]] = {
        "parameters": lambda: verify_replicas(replica, gradients=False, finite=False),
        "parameters, finite": lambda: verify_replicas(replica, gradients=False),
        "and Adam's state": lambda: verify_replicas(replica, optimizer),
        "and gradients": lambda: verify_replicas(replica, optimizer, gradients=True),
    }
    step()
    healthy = all(bool(getattr(way(), "ok", False)) for way in ways.values())
    nbytes = {name: getattr(way(), "nbytes", 0) for name, way in ways.items()}
    buffers = {name: torch.zeros(nbytes[name] // 4) for name in ways}
    took: dict[str, list[float]] = {}
    for _ in range(WARM + ROUNDS):
        took.setdefault("step", []).append(slowest(step))
        took.setdefault("sum", []).append(slowest(lambda: [t.sum() for t in tensors]))
        for name, way in ways.items():
            took.setdefault(name, []).append(slowest(way))
    for _ in range(WARM + 10):  # the large ones less often, beside a verification of their own
        for name, buffer in buffers.items():
            reduce = slowest(lambda buffer=buffer: dist.all_reduce(buffer))  # type: ignore[misc]
            took.setdefault(f"all_reduce {name}", []).append(reduce)
            took.setdefault(f"beside {name}", []).append(slowest(ways[name]))
    ms = {name: statistics.median(times[WARM:]) * 1e3 for name, times in took.items()}
    if rank == 0:
        rows = [
            [name, nbytes[name] / 1e6, ms[name], ms[name] / ms["step"] * 100,
             ms[f"all_reduce {name}"], ms[f"beside {name}"] / ms[f"all_reduce {name}"] * 100]
            for name in ways
        ]  # fmt: skip
        print(f"{make.__doc__}\na step with Adam: {ms['step']:.2f} ms")
        print(f"the least of reading the parameters once, torch.sum of each: {ms['sum']:.2f} ms")
        head = ["verified", "MB", "ms", "% of a step", "all_reduce ms", "% of it"]
        print(tabulate(rows, head, floatfmt=".2f"), flush=True)
    if not healthy:
        sys.exit("a healthy replica is reported different")


def main(rank: int, size: int, store: str) -> None:
    """In every rank."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit
    )
    for make in (mlp, transformer):
        measure(rank, make)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(main, (ranks, store), ranks)  # type: ignore[no-untyped-call]
