"""Whether ddpbench's figure by OSU's definition is OSU's own: 2 ranks, the same MPI, this host.

    ./run_bench.sh python tests/perf/peers.py FOLDER [LAUNCHES]

FOLDER holds a build of the OSU Micro-Benchmarks (osu_allreduce, osu_allgather, osu_bcast) with the
MPI that ddpbench runs on. A block starts each arm once, in random order; each start is a launch:

osu       its own programs; all_reduce in place, as torch has it
ddpbench  a sweep on mpi, `--columns osu`: the mean over calls and ranks
paged     the same, but in memory that begins with a page, as OSU's does
direct    the same as paged, but ddpbench's loop calls MPI without torch and its process group: what
          is left is the definition, the loop and the memory
idle      a process group that does nothing: torch's dispatch while the caches are warm

Prints medians over launches, the quartiles of OSU and ddpbench, and ratios to OSU of medians, the
last with its 95 % interval (Hodges-Lehmann). Exits with 1 where direct is off by more than 10 %,
with 2 where there is no OSU.
"""

from __future__ import annotations

import csv
import io
import math
import mmap
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate

from ddpbench.catalog.operations import OPERATIONS, Buffers
from ddpbench.catalog.sizes import readable
from ddpbench.launch.placement import find_mpirun
from ddpbench.measure import loop, start
from ddpbench.mpi_backend.library import mpi
from ddpbench.verdicts import verdict

SIZES = "64K:64M:x4"
LEAST, LARGE, MOST = 2**16, 2**23, 2**26
# operation → the program and its options, and of how many ranks its size is one's block
PROGRAMS = {
    "all_reduce": (("osu_allreduce", "-l"), 1),
    "all_gather": (("osu_allgather",), 2),
    "broadcast": (("osu_bcast",), 1),
}
ARMS = ("osu", "ddpbench", "paged", "direct", "idle")
BOUND = 0.10
CHANGES = "DDPBENCH_PEERS"  # what a rank that imports this module changes
Key = tuple[str, int]  # operation, total bytes
Figures = dict[Key, float]  # → µs


# --- what is changed in a rank --------------------------------------------------------------------


class Idle(dist.ProcessGroup):  # type: ignore[misc]
    """A group that does nothing."""

    def allreduce(self, *_: Any, **__: Any) -> None:
        """Return at once."""

    broadcast = all_gather_single = _allgather_base = barrier = allreduce


def paged(allocate: Callable[..., Buffers]) -> Callable[..., Buffers]:
    """The same buffers, in memory of its own pages."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).copy_(tensor)

    def allocated(*args: Any) -> Buffers:
        buffers = allocate(*args)
        output = moved(buffers.output)
        shared = buffers.input.data_ptr() == buffers.output.data_ptr()
        return Buffers(output if shared else moved(buffers.input), output)

    return allocated


def direct(name: str) -> Callable[..., Callable[[], object]]:
    """What binds an operation to the MPI call that it comes to."""

    def bind(_case: Any, buffers: Buffers, _group: Any, _rank: int) -> Callable[[], object]:
        comm, out, into = mpi().COMM_WORLD, buffers.input.numpy(), buffers.output.numpy()
        return {
            "all_reduce": lambda: comm.Allreduce(mpi().IN_PLACE, into),
            "all_gather": lambda: comm.Allgather(out, into),
            "broadcast": lambda: comm.Bcast(into),
        }[name]

    return bind


def change(names: Sequence[str]) -> None:
    """In a rank, before anything is measured."""
    if "idle" in names:
        dist.Backend.register_backend(
            "idle", lambda given, _: Idle(given.group_rank, given.group_size),
            extended_api=True, devices=["cpu"],
        )  # fmt: skip
    if "paged" in names:
        loop._allocate = paged(loop._allocate)
    if "direct" in names:
        start.STARTS["barrier"] = lambda group, device: mpi().COMM_WORLD.Barrier
        for name in PROGRAMS:
            OPERATIONS[name] = replace(OPERATIONS[name], bind=direct(name))


# --- the arms -------------------------------------------------------------------------------------


def printed(words: Sequence[str], changes: str = "") -> str:
    """What a command prints. Raises CalledProcessError when it fails."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, CHANGES: changes}
    return subprocess.run(
        words, env=environ, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    ).stdout


def osu(folder: Path) -> Figures:
    """One launch of each program of OSU's, under the options that ddpbench gives mpirun; of large
    messages fewer calls than by default, as ddpbench's slice has them."""
    mpirun = [find_mpirun() or "mpirun", "--oversubscribe", "-n", "2"]
    mpirun += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    found = {}
    for operation, (program, ranks) in PROGRAMS.items():
        for low, high, calls in ((LEAST, LARGE // 2, ()), (LARGE, MOST, ("-i", "20", "-x", "4"))):
            words = [*mpirun, str(folder / program[0]), *program[1:], *calls]
            words += ["-m", f"{low // ranks}:{high // ranks}", "-T", "mpi_float", "-M", f"{2**31}"]
            for row in re.finditer(r"^(\d+)\s+(\d+\.\d+)\s*$", printed(words), re.MULTILINE):
                found[operation, int(row[1]) * ranks] = float(row[2])
    return found


def ddpbench(backend: str, changes: str = "") -> Figures:
    """One launch of ddpbench's sweep."""
    words = [sys.executable, "-m", "ddpbench", "collectives", "-n", "2", "--backend", backend]
    words += ["--op", ",".join(PROGRAMS), "--sizes", SIZES, "--case-time", "0.2", "--launches", "1"]
    words += ["--quiet", "--format", "csv", "--columns", "op,size,osu", "--import", "peers"]
    words += ["--no-check", "--peak-bandwidth", "1e9"] if backend == "idle" else []
    text = printed(words, changes)
    return {(r["op"], int(r["size"])): float(r["osu"]) for r in csv.DictReader(io.StringIO(text))}


def block(folder: Path, taken: dict[str, dict[Key, list[float]]]) -> None:
    """Start each arm once and add its figures."""
    arms = {
        "osu": lambda: osu(folder),
        "ddpbench": lambda: ddpbench("mpi"),
        "paged": lambda: ddpbench("mpi", "paged"),
        "direct": lambda: ddpbench("mpi", "paged,direct"),
        "idle": lambda: ddpbench("idle", "idle"),
    }
    for arm in random.sample(ARMS, len(ARMS)):
        for key, figure in arms[arm]().items():
            taken[arm][key].append(figure)


def table(taken: dict[str, dict[Key, list[float]]]) -> tuple[str, bool]:
    """The table, and whether direct agrees with OSU everywhere."""
    rows, agrees = [], True
    for key in taken["ddpbench"]:
        figures = {arm: np.array(taken[arm][key]) for arm in ARMS}
        medians = {arm: float(np.median(each)) for arm, each in figures.items()}
        ratios = [medians[arm] / medians["osu"] for arm in ("ddpbench", "paged", "direct")]
        spans = ["{:.1f} … {:.1f}".format(*np.percentile(figures[a], [25, 75])) for a in ARMS[:2]]
        shift = verdict.shift(figures["osu"], figures["direct"])
        bounds = f"{math.exp(shift.low):.2f} … {math.exp(shift.high):.2f}" if shift else "-"
        agrees = agrees and abs(ratios[-1] - 1) <= BOUND
        rows.append([key[0], readable(key[1]), *medians.values(), *spans, *ratios, bounds])
    heads = ["op", "size", *ARMS, "osu 25 … 75 %", "ddpbench 25 … 75 %"]
    heads += ["ddpbench / osu", "paged / osu", "direct / osu", "95 %"]
    return tabulate(rows, heads, floatfmt=[""] * 2 + [".1f"] * 7 + [".2f"] * 4), agrees


def main(folder: Path, launches: int) -> int:
    """The exit code."""
    missing = [words[0] for words, _ in PROGRAMS.values() if not (folder / words[0]).is_file()]
    if missing:
        print(f"{folder} has no {', '.join(missing)}: name the folder of a build of OSU's")
        return 2
    taken: dict[str, dict[Key, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
    for _ in range(launches):
        block(folder, taken)
    text, agrees = table(taken)
    print(f"{launches} launches an arm, 2 ranks; medians of µs a call, mean over calls and ranks")
    print(text)
    return int(not agrees)


if __name__ != "__main__":  # in a rank
    change(os.environ.get(CHANGES, "").split(","))
elif not sys.argv[1:]:
    print("name the folder of a build of the OSU Micro-Benchmarks")
    sys.exit(2)
else:
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 20))
