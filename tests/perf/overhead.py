"""What ddpbench's loop adds to a bare one: both in one launch, interleaved, on the same group.

    python tests/perf/overhead.py [gloo|mpi …]

A bare loop is barrier, stamp, call, stamp. Prints the medians of t_max and their ratio; exits with
1 when a ratio is above its bound: 1.05 at 4 B, 1.02 at 1 MiB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate

from ddpbench.analysis import stats
from ddpbench.catalog import backends
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.catalog.sizes import readable
from ddpbench.measure.loop import Bench, settle
from ddpbench.records.schema import Case, Plan
from ddpbench.runtime import agree, group, launch, starters
from ddpbench.runtime.teams import Team, split

BOUNDS = {4: 1.05, 2**20: 1.02}
BLOCKS, BLOCK = 300, 20


def bare(tensor: torch.Tensor, tested: dist.ProcessGroup, count: int) -> list[list[int]]:
    """The loop a user would write."""
    stamps = []
    for _ in range(count):
        dist.barrier(group=tested)
        began = time.perf_counter_ns()
        dist.all_reduce(tensor, group=tested)
        stamps.append([began, time.perf_counter_ns(), -1])
    return stamps


def measured(backend: str) -> list[list[object]]:
    """Rows of one launch, in rank 0; every rank takes part."""
    place = launch.placement()
    assert place is not None
    settle()
    entry, rows = backends.get(backend), []
    with group.opened(place, group.Rendezvous()) as ranks:
        name = entry.register() if entry.register else backend
        with ranks.tested(name) as tested:
            for nbytes, bound in BOUNDS.items():
                case = Case(
                    "all_reduce", "tensor", backend, entry.provider("cpu"), "cpu", "float32", "sum",
                    None, nbytes, nbytes // 4, True, False, "isolated", "barrier", 1,
                    ranks.world_size, (ranks.world_size,),
                )  # fmt: skip
                team = Team(
                    split("world", [range(ranks.world_size)]), tested, tested, 0, ranks.rank
                )
                device = torch.device("cpu")
                bench = Bench(case, OPERATIONS["all_reduce"], Plan(), ranks, team, device)
                bench.rest()
                tensor = torch.zeros(nbytes // 4)
                ours, theirs = [], []
                for block in range(BLOCKS):
                    ranks.watchdog.rearm()
                    # In turn, and the first of a pair in turn: drift meets both alike.
                    for mine in (block % 2 == 0, block % 2 == 1):
                        if mine:
                            ours.append(bench.repeat(BLOCK))
                        else:
                            theirs.append(np.array(bare(tensor, tested, BLOCK), dtype=np.int64))
                    agree.decision(ranks, 0)
                both = [
                    agree.at_rank_0(ranks, np.concatenate(part[20:])) for part in (theirs, ours)
                ]
                if ranks.rank == 0:
                    medians = [float(np.median(stats.t_max(p, 1))) for p in both if p is not None]
                    ratio = medians[1] / medians[0]
                    rows.append(
                        [
                            backend,
                            readable(nbytes),
                            medians[0] * 1e6,
                            medians[1] * 1e6,
                            ratio,
                            bound,
                        ]
                    )
    return rows


def main(names: Sequence[str]) -> int:
    """Start a launch a backend; in a rank, measure."""
    if launch.placement() is None:
        codes = [
            starters.STARTERS[backends.get(name).launcher]([__file__, name], 2)
            for name in names or ("gloo", "mpi")
        ]
        return max(codes)
    rows = measured(names[0])
    if not rows:
        return 0
    heads = ["backend", "size", "bare µs", "ddpbench µs", "ratio", "bound"]
    print(tabulate(rows, heads, floatfmt=".3f"))
    return int(any(float(str(row[4])) > float(str(row[5])) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
