"""A DDP step over mpi4py's group and over gloo, in turn in one launch: overlap, equality, speed.

    ./run_bench.sh python tests/perf/mpi_step.py [RANKS]

Prints the time line of one backward over mpi (when each bucket was handed over and when its
all_reduce had ended, against the hand-over of the last bucket, which is the end of the compute),
and both step times (medians of the slowest rank's). Exits with 1 when no bucket ended during the
compute, or the replicas differ in a bit after any step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel

from ddpbench.runtime import launch, starters
from ddpbench.runtime.mpi_group import NAME, register
from ddpbench.runtime.mpi_library import library, mpi, world

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
        mpi().COMM_WORLD.Barrier()
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
        mpi().COMM_WORLD.Bcast(first.numpy(), 0)
        same = torch.equal(first.view(torch.int32), mine.view(torch.int32))
        return bool(mpi().COMM_WORLD.allreduce(int(same), mpi().MIN))


def main() -> None:
    """In every rank."""
    rank, size = world()
    torch.set_num_threads(1)
    register()
    store = dist.FileStore(sys.argv[2], size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    arms = {"mpi": Arm(dist.new_group(backend=NAME)), "gloo": Arm(dist.new_group())}
    equal, overlapped = True, 0
    for step in range(WARM + STEPS):
        batch = torch.randn(
            BATCH, WIDTH, generator=torch.Generator().manual_seed(step * size + rank)
        )
        for arm in arms.values():
            arm.step(batch)
            equal = equal and arm.equal()
        one = arms["mpi"]
        overlapped += step >= WARM and min(one.ended.values()) < one.handed[-1]
    times = {}
    for name, arm in arms.items():
        slowest = [max(each) for each in zip(*mpi().COMM_WORLD.allgather(arm.took), strict=True)]
        times[name] = statistics.median(slowest[WARM:]) * 1e3
    if rank == 0:
        one, last = arms["mpi"], arms["mpi"].handed[-1]
        rows = [
            [i, (begin - one.backward) * 1e3, (one.ended[i] - one.backward) * 1e3]
            for i, begin in enumerate(one.handed)
        ]
        print(f"{library()}, torch {torch.__version__}, {size} ranks, {DEPTH} x Linear({WIDTH})")
        print(tabulate(rows, ["bucket", "handed over, ms", "reduced, ms"], floatfmt=".2f"))
        print(f"last bucket handed over {(last - one.backward) * 1e3:.2f} ms after backward began")
        print(f"steps in which a bucket was reduced before: {overlapped} of {STEPS}")
        print(f"replicas equal after each of {WARM + STEPS} steps on both: {equal}")
        print(f"step: mpi {times['mpi']:.2f} ms, gloo {times['gloo']:.2f} ms, ", end="")
        print(f"gloo / mpi {times['gloo'] / times['mpi']:.2f}")
    dist.destroy_process_group()
    sys.exit(not (equal and overlapped > STEPS / 2))


if __name__ == "__main__":
    if launch.placement() is None:
        with tempfile.TemporaryDirectory() as folder:
            words = [__file__, "rank", str(Path(folder) / "store")]
            sys.exit(starters.mpirun(words, int(sys.argv[1]) if sys.argv[1:] else 2))
    main()
