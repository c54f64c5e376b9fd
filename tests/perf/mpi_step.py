"""A DDP step over mpi4py's group and over gloo: overlap, equality, speed.

    ./run_bench.sh python tests/perf/mpi_step.py [RANKS [LAUNCHES]]

Each backend has launches of its own, for gloo's threads sleep where MPI's ranks poll; which comes
first is drawn for each pair. Prints the time line of one backward over mpi (when each bucket was
handed over and when its all_reduce had ended, against the hand-over of the last bucket, which is
the end of the compute), and both step times (of a launch the median of the slowest rank's, of these
the median, and of the pairs' ratios the interval over launches). Exits with 1 when no bucket ended
during the compute, or the replicas differ in a bit after any step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launches import by_turns, shown
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel

from ddpbench.launch import placement
from ddpbench.mpi_backend.group import NAME, register
from ddpbench.mpi_backend.library import library

STEPS, WARM, WIDTH, DEPTH, BATCH = 60, 5, 1024, 8, 64


class Arm:
    """A replica on one backend, its stamps, and what its steps took."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
        model = torch.nn.Sequential(*layers)
        self.replica = DistributedDataParallel(model, process_group=group, bucket_cap_mb=4)
        self.replica.register_comm_hook(group, self.hook)
        self.optimizer = torch.optim.SGD(self.replica.parameters(), lr=0.01)
        self.handed: list[float] = []
        self.ended: dict[int, float] = {}
        self.took: list[float] = []

    def hook(self, group, bucket):  # without annotations, which DDP would read
        """DDP's own reduction, with a stamp before and one behind it."""
        self.handed.append(time.perf_counter())
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.SUM, group, async_op=True)

        index = bucket.index()

        def then(done: torch.futures.Future[Any]) -> torch.Tensor:
            self.ended[index] = time.perf_counter()
            mean: torch.Tensor = done.value()[0].div_(dist.get_world_size(group))
            return mean

        return work.get_future().then(then)

    def step(self, batch: torch.Tensor) -> None:
        self.handed, self.ended = [], {}
        dist.barrier()
        began = time.perf_counter()
        loss = self.replica(batch).square().mean()
        self.backward = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        self.took.append(time.perf_counter() - began)
        self.optimizer.zero_grad()

    def equal(self) -> bool:
        """Whether all ranks' parameters have the same bits."""
        mine = torch.cat([p.detach().view(-1) for p in self.replica.parameters()])
        first = mine.clone()
        dist.broadcast(first, 0)
        same = torch.tensor(int(torch.equal(first.view(torch.int32), mine.view(torch.int32))))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        return bool(same)


def measure(kind: str, out: Path) -> None:
    """In every rank of a launch; rank 0 writes what it found."""
    place = placement.read_placement()
    assert place is not None
    rank, size = place.rank, place.world_size
    torch.set_num_threads(1)
    register()
    dist.init_process_group(
        NAME if kind == "mpi" else kind, store=dist.FileStore(str(out.with_suffix(".store")), size),
        rank=rank, world_size=size, timeout=timedelta(seconds=60),
    )  # fmt: skip
    arm, equal, overlapped = Arm(dist.group.WORLD), True, 0
    for step in range(WARM + STEPS):
        batch = torch.randn(
            BATCH, WIDTH, generator=torch.Generator().manual_seed(step * size + rank)
        )
        arm.step(batch)
        equal = equal and arm.equal()
        overlapped += step >= WARM and min(arm.ended.values()) < arm.handed[-1]
    slowest = torch.tensor(arm.took[WARM:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        rows = [
            [i, (begin - arm.backward) * 1e3, (arm.ended[i] - arm.backward) * 1e3]
            for i, begin in enumerate(arm.handed)
        ]
        found = {"rows": rows, "equal": equal, "overlapped": overlapped}
        found["ms"] = statistics.median(slowest.tolist()) * 1e3
        found["library"] = library() if kind == "mpi" else kind
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def main(ranks: int, launches: int) -> int:
    """Start the launches, print what they found."""
    found = by_turns(__file__, ranks, launches)
    one = found["mpi"][-1]
    print(f"{one['library']}, torch {torch.__version__}, {ranks} ranks, {DEPTH} x Linear({WIDTH})")
    print(tabulate(one["rows"], ["bucket", "handed over, ms", "reduced, ms"], floatfmt=".2f"))
    print(f"last bucket handed over {one['rows'][-1][1]:.2f} ms after backward began")
    overlapped = [each["overlapped"] for each in found["mpi"]]
    print(f"steps in which a bucket was reduced before: {overlapped} of {STEPS}")
    equal = all(each["equal"] for kind in found for each in found[kind])
    print(f"replicas equal after each of {WARM + STEPS} steps in all launches: {equal}")
    times = {kind: [each["ms"] for each in found[kind]] for kind in found}
    ratios = [b / a for a, b in zip(times["mpi"], times["gloo"], strict=True)]
    middle = {kind: statistics.median(each) for kind, each in times.items()}
    print(f"step, {launches} launches each: mpi {middle['mpi']:.2f} ms, gloo {middle['gloo']:.2f}")
    print(f"gloo / mpi {shown(ratios)}")
    return int(not (equal and min(overlapped) > STEPS / 2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(*map(int, (*sys.argv[1:], *("2", "6")[len(sys.argv) - 1 :]))))
