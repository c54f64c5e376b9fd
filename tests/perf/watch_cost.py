"""What a watch costs: DDP steps of 5, 40 and 150 ms with and without it, and its memory.

    ./run_bench.sh python tests/perf/watch_cost.py [PAIRS [BACKEND …]]

Two ranks, on gloo under torchrun and on mpi under mpirun. Blocks of at least 6 s with and without
`ddpbench.watch` take turns in one launch, so that each has a round of reports; the figure is the
median over pairs of neighbouring blocks, with its 95 % interval. Aims: at most 1 %, the upper end
at most 2 %. Steps mostly sleep, as the host of a GPU mostly waits: steps that compute on two shared
cores vary by 10 % from block to block, and hide the cost. CPU is what all threads of the slower
rank use more, in % of the step: the most that a host without spare cores can lose. The last lines
are the memory of each rank after 20,000 and 100,000 tiny steps under watch. Run it alone.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from scipy import stats
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpbench

sys.path.insert(0, str(Path(__file__).parents[1]))

from command_lines import clean_environment, mpirun, torchrun

TARGETS = (0.005, 0.040, 0.150)  # seconds of a step
BLOCK_SECONDS, WARM = 6.0, 5
EARLY, LATE = 20_000, 100_000  # tiny steps


def make_step(width: int, depth: int) -> Callable[[float], None]:
    """Return a training step of DDP that sleeps for some seconds, too."""
    layers = [nn.Linear(width, width) for _ in range(depth)]
    replica = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-4)
    batch = torch.randn(8, width)

    def step(pause: float) -> None:
        if pause:
            time.sleep(pause)
        optimizer.zero_grad()
        replica(batch).square().mean().backward()
        optimizer.step()

    return step


def measure_block(step: Callable[[float], None], pause: float, count: int) -> tuple[float, float]:
    """Seconds of one step, and its CPU seconds, in the slower rank of a block."""
    for _ in range(WARM):
        step(pause)
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        step(pause)
    spent = [time.perf_counter() - began, time.process_time() - used]
    seconds = torch.tensor(spent, dtype=torch.float64) / count
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    wall, cpu = seconds.tolist()
    return wall, cpu


def compare(step: Callable[[float], None], target: float, pairs: int) -> list[str]:
    """A row of the table: the step without and with a watch, and what that costs."""
    pause = max(0.0, target - measure_block(step, 0.0, 200)[0])
    count = round(BLOCK_SECONDS / target)
    without, watched = [], []
    for pair in range(pairs):
        for on in (pair % 2 == 0, pair % 2 == 1):
            with contextlib.redirect_stderr(io.StringIO()):
                with ddpbench.watch(output=None) if on else contextlib.nullcontext():
                    (watched if on else without).append(measure_block(step, pause, count))
                dist.barrier()
    costs = [
        [100 * (b[what] - a[what]) / a[0] for a, b in zip(without, watched, strict=True)]
        for what in (0, 1)
    ]
    medians = (f"{statistics.median(w for w, _ in each) * 1e3:.2f}" for each in (without, watched))
    return [f"{dist.get_backend()}, {target * 1e3:.0f} ms", *medians, *map(describe, costs)]


def describe(percent: list[float]) -> str:
    """The median and its interval."""
    low, high = stats.quantile_test(percent).confidence_interval()
    return f"{statistics.median(percent):+.2f} [{low:+.2f}, {high:+.2f}]"


def measure_memory(step: Callable[[float], None]) -> str:
    """The memory of this rank after many steps under watch."""
    process, sizes = psutil.Process(), []
    with contextlib.redirect_stderr(io.StringIO()), ddpbench.watch(output=None):
        for number in range(1, LATE + 1):
            step(0.0)
            if number in (EARLY, LATE):
                sizes.append(process.memory_info().rss / 1e6)
    early, late = sizes
    return f"rank {dist.get_rank()}: {early:.1f} MB after {EARLY} steps, {late:.1f} after {LATE}"


def run_rank(backend: str, pairs: int) -> None:
    """Measure in one of the ranks."""
    torch.set_num_threads(1)
    if backend == "mpi":
        import ddpbench.mpi  # noqa: F401
    dist.init_process_group("mpi4py" if backend == "mpi" else backend)
    step = make_step(256, 4)
    rows = [compare(step, target, pairs) for target in TARGETS]
    if dist.get_rank() == 0:
        headings = ("step", "without, ms", "with, ms", "cost, %", "CPU, % of the step")
        print(tabulate(rows, headings, stralign="right"), flush=True)
    memory: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, measure_memory(make_step(8, 1)))
    if dist.get_rank() == 0:
        print(*memory, sep="\n", flush=True)
    dist.destroy_process_group()


def main(pairs: int, backends: list[str]) -> None:
    """Start the ranks of each backend."""
    for backend in backends:
        launcher = [*mpirun(2), sys.executable] if backend == "mpi" else torchrun(2)
        command = [*launcher, __file__, "rank", backend, str(pairs)]
        subprocess.run(command, env=clean_environment(), check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 12, sys.argv[2:] or ["gloo", "mpi"])
