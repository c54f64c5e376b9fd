"""Compare ddpbench's figure by OSU's definition with OSU's own: 2 ranks, the same MPI, this host.

    ./run_bench.sh python tests/perf/peers.py FOLDER [LAUNCHES]

FOLDER holds a build of the OSU Micro-Benchmarks (osu_allreduce, osu_allgather, osu_bcast) with the
MPI that ddpbench runs on. Each arm starts LAUNCHES (20) times, in random order:

osu       its own programs; all_reduce in place, as torch has it
ddpbench  a sweep on mpi, `--columns osu`: the mean over calls and ranks
direct    the same, but ddpbench's loop calls MPI without torch and its process group, on memory
          that begins with a page, as OSU's does: only the definition and the loop differ

Prints medians over launches, and ratios to OSU, the last with its 95 % interval (Hodges-Lehmann).
Exits with 1 where direct is off by more than 10 %, with 2 where there is no OSU.
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
from tabulate import tabulate

from ddpbench.catalog.operations import OPERATIONS, Buffers
from ddpbench.catalog.sizes import readable
from ddpbench.launch.placement import find_mpirun
from ddpbench.measure import loop, start
from ddpbench.mpi_backend.library import mpi
from ddpbench.verdicts import verdict

SIZES = "64K:64M:x4"
LEAST, LARGE, MOST = 2**16, 2**23, 2**26
# operation → the program and its options, and how many ranks' blocks make up the size
PROGRAMS = {
    "all_reduce": (("osu_allreduce", "-l"), 1),
    "all_gather": (("osu_allgather",), 2),
    "broadcast": (("osu_bcast",), 1),
}
ARMS = ("osu", "ddpbench", "direct")
BOUND = 0.10
DIRECT = "DDPBENCH_PEERS_DIRECT"  # set in the ranks of this arm, which import this module
Key = tuple[str, int]  # operation, total bytes
Figures = dict[Key, float]  # → µs


# --- changes in a rank of the arm `direct` --------------------------------------------------------


def allocate_pages(allocate: Callable[..., Buffers]) -> Callable[..., Buffers]:
    """Return a function that allocates the same buffers, in memory of its own pages."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).copy_(tensor)

    def allocated(*args: Any) -> Buffers:
        buffers = allocate(*args)
        output = move(buffers.output)
        shared = buffers.input.data_ptr() == buffers.output.data_ptr()
        return Buffers(output if shared else move(buffers.input), output)

    return allocated


def call_mpi(name: str) -> Callable[..., Callable[[], object]]:
    """Return what binds an operation to its MPI call."""

    def bind(_case: Any, buffers: Buffers, _group: Any, _rank: int) -> Callable[[], object]:
        comm, out, into = mpi().COMM_WORLD, buffers.input.numpy(), buffers.output.numpy()
        return {
            "all_reduce": lambda: comm.Allreduce(mpi().IN_PLACE, into),
            "all_gather": lambda: comm.Allgather(out, into),
            "broadcast": lambda: comm.Bcast(into),
        }[name]

    return bind


if os.environ.get(DIRECT):
    loop._allocate = allocate_pages(loop._allocate)
    start.STARTS["barrier"] = lambda group, device: mpi().COMM_WORLD.Barrier
    for operation in PROGRAMS:
        OPERATIONS[operation] = replace(OPERATIONS[operation], bind=call_mpi(operation))


# --- the arms -------------------------------------------------------------------------------------


def read_output(words: Sequence[str], **variables: str) -> str:
    """Return the output of a command. Raises CalledProcessError when it fails."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        words, env=environ, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    ).stdout


def launch_osu(folder: Path) -> Figures:
    """Run each of OSU's programs once, under the options that ddpbench gives mpirun."""
    mpirun = [find_mpirun() or "mpirun", "--oversubscribe", "-n", "2"]
    mpirun += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    figures = {}
    for operation, (program, ranks) in PROGRAMS.items():
        # Fewer calls of large messages than by default, as in ddpbench's time per case.
        for low, high, calls in ((LEAST, LARGE // 2, ()), (LARGE, MOST, ("-i", "20", "-x", "4"))):
            words = [*mpirun, str(folder / program[0]), *program[1:], *calls]
            words += ["-m", f"{low // ranks}:{high // ranks}", "-T", "mpi_float", "-M", f"{2**31}"]
            text = read_output(words)
            for row in re.finditer(r"^(\d+)\s+(\d+\.\d+)\s*$", text, re.MULTILINE):
                figures[operation, int(row[1]) * ranks] = float(row[2])
    return figures


def launch_ddpbench(direct: bool) -> Figures:
    """Run ddpbench's sweep once."""
    words = [sys.executable, "-m", "ddpbench", "collectives", "-n", "2", "--backend", "mpi"]
    words += ["--op", ",".join(PROGRAMS), "--sizes", SIZES, "--case-time", "0.2", "--launches", "1"]
    words += ["--quiet", "--format", "csv", "--columns", "op,size,osu", "--import", "peers"]
    text = read_output(words, **{DIRECT: "1" if direct else ""})
    return {(r["op"], int(r["size"])): float(r["osu"]) for r in csv.DictReader(io.StringIO(text))}


def main(folder: Path, launches: int) -> int:
    """Print the table; return the exit code."""
    missing = [words[0] for words, _ in PROGRAMS.values() if not (folder / words[0]).is_file()]
    if missing:
        print(f"{folder} has no {', '.join(missing)}: name the folder of a build of OSU's")
        return 2
    taken: dict[str, dict[Key, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
    for _ in range(launches):
        for arm in random.sample(ARMS, len(ARMS)):
            figures = launch_osu(folder) if arm == "osu" else launch_ddpbench(arm == "direct")
            for key, microseconds in figures.items():
                taken[arm][key].append(microseconds)
    rows, agrees = [], True
    for key in taken["ddpbench"]:
        medians = [float(np.median(taken[arm][key])) for arm in ARMS]
        ratios = [median / medians[0] for median in medians[1:]]
        shift = verdict.shift(np.array(taken["osu"][key]), np.array(taken["direct"][key]))
        bounds = f"{math.exp(shift.low):.2f} … {math.exp(shift.high):.2f}" if shift else "-"
        agrees = agrees and abs(ratios[-1] - 1) <= BOUND
        rows.append([key[0], readable(key[1]), *medians, *ratios, bounds])
    heads = ["op", "size", *(f"{arm} µs" for arm in ARMS)]
    heads += ["ddpbench / osu", "direct / osu", "95 %"]
    print(f"{launches} launches per arm, 2 ranks; medians of the mean over calls and ranks")
    print(tabulate(rows, heads, floatfmt=[""] * 2 + [".1f"] * 3 + [".2f"] * 3))
    return int(not agrees)


if __name__ == "__main__":
    if not sys.argv[1:]:
        print("name the folder of a build of the OSU Micro-Benchmarks")
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1]), int((*sys.argv[2:], "20")[0])))
