"""What the process group over mpi4py costs above the MPI call that it makes, and beside gloo.

    ./run_bench.sh python tests/perf/mpi_speed.py [RANKS]

The floor is torch's own dispatch to a group that does nothing (its "fake" backend) plus the bare
mpi4py call on the same memory. "least" is a Python group that does nothing but that bare call: what
is left for a better group to gain. All arms are interleaved in one launch; a time is the median of
the slowest rank's, in µs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from ddpbench.runtime import launch, starters
from ddpbench.runtime.mpi_group import NAME, register
from ddpbench.runtime.mpi_library import library, mpi, world

SIZES = {"4 B": 1, "1 MiB": 1 << 18, "16 MiB": 1 << 22}
ARMS = ("bare", "fake", "least", "mpi", "async", "gloo")
BLOCKS = 12


class Least(dist.ProcessGroup):  # type: ignore[misc]
    """A group that makes one prepared MPI call, whatever it is asked."""

    bare: Callable[[], Any]

    def allreduce(self, *_: Any) -> None:
        self.bare()

    broadcast = all_gather_single = _allgather_base = allreduce


def arms(op: str, count: int, groups: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Arm → call, all on the same tensors."""
    comm, (_, size) = mpi().COMM_WORLD.Dup(), world()
    one, whole = torch.ones(count), torch.ones(count * size)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda group, later: dist.all_reduce(one, group=group, async_op=later),
        "broadcast": lambda group, later: dist.broadcast(one, 0, group=group, async_op=later),
        "all_gather": lambda group, later: gather(whole, one, group=group, async_op=later),
    }
    one.zero_()  # summed again and again
    small, large = one.numpy(), whole.numpy()
    bare: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.Allreduce(mpi().IN_PLACE, small),
        "broadcast": lambda: comm.Bcast(small, 0),
        "all_gather": lambda: comm.Allgather(small, large),
    }
    groups["least"].bare = bare[op]
    found: dict[str, Callable[[], Any]] = {"bare": bare[op]}
    for name, group in groups.items():
        found[name] = partial(calls[op], group, False)
    found["async"] = lambda: calls[op](groups["mpi"], True).wait()
    return found


def measure(calls: dict[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """Arm → median over repetitions of the slowest rank's time, in µs; blocks of arms in turn."""
    comm, size = mpi().COMM_WORLD, world()[1]
    many = max(8, min(400, int(2e7 / (count + 1) / 4)))
    taken: dict[str, list[float]] = {arm: [] for arm in calls}
    for block in range(BLOCKS + 1):
        for arm, call in calls.items():
            mine = torch.empty(many, dtype=torch.float64)
            for repetition in range(many):
                comm.Barrier()
                began = time.perf_counter_ns()
                call()
                mine[repetition] = time.perf_counter_ns() - began
            every = torch.empty(size, many, dtype=torch.float64)
            comm.Allgather(mine.numpy(), every.numpy())
            if block:  # the first one warms up
                taken[arm] += every.max(0).values.div(1000).tolist()
    return {arm: statistics.median(times) for arm, times in taken.items()}


def main() -> None:
    """In every rank."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"

    rank, size = world()
    torch.set_num_threads(1)
    register()
    dist.Backend.register_backend("least", least, extended_api=True, devices=["cpu"])
    store = dist.FileStore(sys.argv[2], size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    names = {"fake": "fake", "least": "least", "mpi": NAME}
    groups: dict[str, Any] = {key: dist.new_group(backend=name) for key, name in names.items()}
    groups["gloo"] = dist.group.WORLD
    rows = []
    for op in ("all_reduce", "broadcast", "all_gather"):
        for label, count in SIZES.items():
            t = measure(arms(op, count, groups), count)
            floor = t["bare"] + t["fake"]
            ratios = t["mpi"] / floor, t["mpi"] / t["bare"], t["mpi"] / t["least"]
            ratios = *ratios, t["async"] / t["mpi"], t["gloo"] / t["mpi"]
            rows.append([op, label, *(t[arm] for arm in ARMS), *ratios])
    if rank == 0:
        heads = ["op", "size", *ARMS, "mpi / (bare + fake)", "mpi / bare", "mpi / least"]
        print(f"{library()}, torch {torch.__version__}, {size} ranks; times in µs")
        print(tabulate(rows, [*heads, "async / mpi", "gloo / mpi"], floatfmt=".2f"))
    dist.destroy_process_group()


def least(given: Any, _: Any) -> dist.ProcessGroup:
    """The creator of a Least group."""
    return Least(given.group_rank, given.group_size)


if __name__ == "__main__":
    if launch.placement() is None:
        with tempfile.TemporaryDirectory() as folder:
            words = [__file__, "rank", str(Path(folder) / "store")]
            sys.exit(starters.mpirun(words, int(sys.argv[1]) if sys.argv[1:] else 2))
    main()
