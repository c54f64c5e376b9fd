"""Measure what the process group over mpi4py costs above the MPI call that it makes.

    ./run_bench.sh python tests/perf/mpi_speed.py [RANKS [LAUNCHES [SIZE,… [BLOCKS]]]]

The floor is torch's own dispatch to a group that does nothing (its "fake" backend) plus the bare
mpi4py call on the same memory. "least" is a Python group that only makes that bare call. A time is
the median of the slowest rank's, in µs.

The arms of a launch take turns in blocks, in an order that is drawn anew for each block: a call
that always comes after the same neighbour inherits its caches. For the same reason the call that
does nothing comes each time after a bare call that is not timed. A ratio is the median over blocks
of the ratios of their medians; every figure is the median over launches, with its 95 % interval
over launches. Without arguments: 2 ranks, 8 launches, three sizes, 60 blocks.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import quantile_test
from tabulate import tabulate

from ddpbench.launch import starters, supervise
from ddpbench.mpi_backend.group import NAME, register
from ddpbench.mpi_backend.library import library, mpi, world

SIZES = {"4 B": 1, "1 MiB": 1 << 18, "16 MiB": 1 << 22}
OPERATIONS = ("all_reduce", "broadcast", "all_gather")
ARMS = ("bare", "fake", "least", "mpi")
RATIOS: dict[str, tuple[str, ...]] = {  # mpi over the sum of some arms
    "mpi / (bare + fake)": ("bare", "fake"),
    "mpi / least": ("least",),
}
Calls = dict[str, Callable[[], Any]]


class Least(dist.ProcessGroup):  # type: ignore[misc]
    """A group that makes one prepared MPI call for each operation."""

    bare: Callable[[], Any]

    def allreduce(self, *_: Any) -> None:
        self.bare()

    broadcast = all_gather_single = _allgather_base = allreduce


def create_least(given: Any, _: Any) -> dist.ProcessGroup:
    """Return the group that torch asks for."""
    return Least(given.group_rank, given.group_size)


def make_arms(op: str, count: int, groups: dict[str, Any]) -> Calls:
    """Return a call per arm, all on the same tensors."""
    comm, (_, size) = groups["comm"], world()
    one, whole = torch.zeros(count), torch.zeros(count * size)  # zeros: summed again and again
    small, large = one.numpy(), whole.numpy()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "all_reduce": (
            lambda: comm.Allreduce(mpi().IN_PLACE, small),
            lambda group: dist.all_reduce(one, group=group),
        ),
        "broadcast": (
            lambda: comm.Bcast(small, 0),
            lambda group: dist.broadcast(one, 0, group=group),
        ),
        "all_gather": (
            lambda: comm.Allgather(small, large),
            lambda group: gather(whole, one, group=group),
        ),
    }
    bare, call = calls[op]
    groups["least"].bare = bare
    return {"bare": bare} | {name: partial(call, groups[name]) for name in ARMS[1:]}


def measure_blocks(
    calls: Calls, count: int, groups: dict[str, Any], seed: str, blocks: int
) -> dict[str, list[float]]:
    """Return arm → block → the median over repetitions of the slowest rank's time, in µs."""
    comm, many = groups["comm"], max(2, min(100, 2_600_000 // count))
    taken: dict[str, list[list[float]]] = {arm: [] for arm in calls}
    order = random.Random(seed)  # the same in every rank
    for _ in range(blocks + 1):
        for arm in order.sample(list(calls), len(calls)):
            call = calls[arm]
            taken[arm].append([])
            for _ in range(many):
                if arm == "fake":
                    calls["bare"]()
                comm.Barrier()
                began = time.perf_counter_ns()
                call()
                taken[arm][-1].append(time.perf_counter_ns() - began)
    medians = {}
    for arm, times in taken.items():
        own = torch.tensor(times[1:], dtype=torch.float64)  # the first block warms up
        every = torch.empty(dist.get_world_size(), *own.shape, dtype=torch.float64)
        comm.Allgather(own.numpy(), every.numpy())
        medians[arm] = (np.median(every.numpy().max(axis=0), axis=1) / 1e3).tolist()
    return medians


def run_rank(out: Path, sizes: Sequence[str], blocks: int) -> None:
    """Run one rank of a launch; rank 0 writes the medians."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"

    torch.set_num_threads(1)
    rank, size = world()
    register()
    dist.Backend.register_backend("least", create_least, extended_api=True, devices=["cpu"])
    store = dist.FileStore(str(out.with_suffix(".store")), size)
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    groups: dict[str, Any] = {"comm": mpi().COMM_WORLD.Dup(), "fake": dist.group.WORLD}
    groups |= {key: dist.new_group(backend=name) for key, name in (("mpi", NAME), ("least",) * 2)}
    medians = {}
    for op in OPERATIONS:
        for label in sizes:
            calls, seed = make_arms(op, SIZES[label], groups), f"{out.name}/{op}/{label}"
            medians[f"{op} {label}"] = measure_blocks(calls, SIZES[label], groups, seed, blocks)
    if rank == 0:
        out.write_text(json.dumps({"library": library(), "medians": medians}))
    dist.destroy_process_group()


def divide(blocks: dict[str, list[float]], below: tuple[str, ...]) -> float:
    """Return mpi over the sum of some arms, in one launch."""
    floors = np.sum([blocks[arm] for arm in below], axis=0)
    return float(np.median(np.array(blocks["mpi"]) / floors))


def describe(values: Sequence[float]) -> str:
    """Return the median over launches and its 95 % interval, which needs six launches."""
    text = f"{statistics.median(values):.3f}"
    if len(values) < 6:
        return text
    interval = quantile_test(values).confidence_interval()
    return f"{text} [{interval.low:.3f}, {interval.high:.3f}]"


def main(ranks: int, launches: int, sizes: str, blocks: str) -> None:
    """Start the launches, print the table."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(launches):
            out = Path(folder) / str(number)
            line = [__file__, "--rank", str(out), sizes, blocks]
            if code := starters.start("mpirun", line, None, ranks, supervise.Deadline()):
                raise SystemExit(code)
            results.append(json.loads(out.read_text()))
    print(
        f"{results[0]['library']}, torch {torch.__version__}, {ranks} ranks, {launches} "
        "launches; µs: medians over launches"
    )
    rows = []
    for key in results[0]["medians"]:
        taken = [result["medians"][key] for result in results]
        medians = [statistics.median(statistics.median(t[arm]) for t in taken) for arm in ARMS]
        ratios = [describe([divide(t, below) for t in taken]) for below in RATIOS.values()]
        rows.append([key, *(f"{median:.2f}" for median in medians), *ratios])
    print(tabulate(rows, ["", *ARMS, *RATIOS], disable_numparse=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        name, labels, count = sys.argv[2:]
        run_rank(Path(name), labels.split(","), int(count))
    else:
        defaults = ("2", "8", ",".join(SIZES), "60")
        ranks, launches, chosen, blocks = (*sys.argv[1:], *defaults[len(sys.argv) - 1 :])
        main(int(ranks), int(launches), chosen, blocks)
