"""Why launches of MPI over shared memory differ by a factor of three: what moves meanwhile.

    ./run_bench.sh python tests/perf/slow_mode.py [SECONDS]

Two ranks, one launch, the same pages. Look by look: how long a cache line takes between the ranks'
cores and back (measure.calibrate.Handoff), an all_reduce of 1 MiB (the median of 100, bare mpi4py),
a copy of 1 MiB within one core, and the handoff again. Looks are divided at 1.5 × the quickest
handoff: near, and apart; those whose two handoffs lie on either side belong to neither. Then the
kernel's own copy between processes, by which Open MPI moves large messages, of 1 MiB for some
distances between the places of source and target in their pages.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time

import numpy as np
from tabulate import tabulate

from ddpbench.launch import placement, starters
from ddpbench.measure.calibrate import Handoff
from ddpbench.mpi_backend.library import mpi
from ddpbench.runtime.meeting import Rendezvous
from ddpbench.runtime.world import join_world

NBYTES, CALLS = 1 << 20, 100
DISTANCES = (-16, 0, 16, 32, 64)


def looks(seconds: float) -> list[tuple[float, ...]]:
    """Handoff, all_reduce, copy and handoff in µs, look by look; in every rank."""
    import torch

    place = placement.read_placement()
    assert place is not None
    comm = mpi().COMM_WORLD
    found: list[tuple[float, ...]] = []
    with join_world(place, Rendezvous()) as world:
        torch.set_num_threads(1)
        handoff = Handoff(world)
        ours, copy = np.zeros(NBYTES // 4, np.float32), np.zeros(NBYTES // 4, np.float32)
        until = time.monotonic() + seconds
        while comm.bcast(time.monotonic() < until):
            world.watchdog.rearm()
            told = comm.bcast(handoff.measure_seconds())
            taken, copies = [], []
            for _ in range(CALLS):
                comm.Barrier()
                began = time.perf_counter()
                comm.Allreduce(mpi().IN_PLACE, ours)
                taken.append(time.perf_counter() - began)
            slowest = np.max(comm.allgather(taken), axis=0)
            for _ in range(5):
                began = time.perf_counter()
                np.copyto(copy, ours)
                copies.append(time.perf_counter() - began)
            again = comm.bcast(handoff.measure_seconds())
            if told and again:
                medians = told, float(np.median(slowest)), statistics.median(copies), again
                found.append(tuple(1e6 * value for value in medians))
    return found


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def copied(distance: int) -> float:
    """The kernel's copy of 1 MiB to that many bytes beyond the source's place in its page, µs."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = np.ones(2 * NBYTES, np.uint8), np.ones(2 * NBYTES, np.uint8)
    start, target_start = source.ctypes.data + 64, target.ctypes.data
    at = target_start + (start + distance - target_start) % 4096
    ends = [ctypes.byref(_Piece(place, NBYTES)) for place in (at, start)]
    taken = []
    for _ in range(31):
        began = time.perf_counter()
        count = libc.process_vm_readv(os.getpid(), ends[0], 1, ends[1], 1, 0)
        taken.append(time.perf_counter() - began)
        if count != NBYTES:
            raise OSError(ctypes.get_errno(), "process_vm_readv")
    return 1e6 * min(taken)


def main(seconds: float) -> None:
    """In every rank; rank 0 prints."""
    found = looks(seconds)
    if mpi().COMM_WORLD.Get_rank():
        return
    # A busy machine may leave no look: see `Handoff`.
    border = 1.5 * min((min(before, after) for before, *_, after in found), default=0.0)
    rows = []
    for name, its in (
        ("near", [each[:3] for each in found if max(each[0], each[3]) <= border]),
        ("apart", [each[:3] for each in found if min(each[0], each[3]) > border]),
    ):
        columns = list(zip(*its, strict=True)) or [()] * 3
        ends = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" if c else "-"
                for c in columns]  # fmt: skip
        rows.append([name, len(its), *ends])
    heads = ["cores", "looks", "handoff µs", "all_reduce 1 MiB µs", "copy in one core µs"]
    print(tabulate(rows, heads))
    rows = [[distance, f"{copied(distance):.0f}"] for distance in DISTANCES]
    print(tabulate(rows, ["target beyond source in its page, bytes", "kernel's copy of 1 MiB, µs"]))


if __name__ == "__main__":
    if placement.read_placement() is None:
        sys.exit(starters.mpirun([__file__, *sys.argv[1:]], 2))
    main(float(sys.argv[1]) if sys.argv[1:] else 60.0)
