"""Measure what ddpbench adds to a bare script: launches of both in random order.

    ./run_bench.sh python tests/perf/overhead.py [gloo|mpi …] [LAUNCHES [SECONDS]]

all_reduce on 2 ranks. A block has a launch of `bare.py`, one of `ddpbench collectives` and one of
the same with `--sync none`, as users run them: forked ranks for gloo, mpirun for mpi, where both
sides use ddpbench's process group over mpi4py. LAUNCHES (20) blocks. Two definitions: the median of
the slowest rank's time after a barrier, and the mean over ranks and calls without one. A case has
SECONDS (0.3). A ratio's interval is over blocks, and 95 % for all rows together; fewer than 10
blocks have none. Exits with 1 if an interval is above 1.02.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from ddpbench.catalog.sizes import readable
from ddpbench.launch import starters
from ddpbench.launch.placement import free_port
from ddpbench.records import store
from ddpbench.verdicts.verdict import paired_shift

SIZES = (4, 2**16, 2**20, 2**24)
BOUND, LAUNCHES, SECONDS = 1.02, 20, 0.3
ARMS = ("bare", "barrier", "none")  # the script, and the command by its start
BARE = str(Path(__file__).with_name("bare.py"))
Stamps = npt.NDArray[np.int64]  # [rank, repetition, 2]: entry and exit in ns
Case = tuple[str, int]  # start, bytes


def find_median(stamps: Stamps) -> float:
    """Return the median of the slowest rank's time in seconds."""
    return float(np.median((stamps[:, :, 1] - stamps[:, :, 0]).max(axis=0))) * 1e-9


def find_mean(stamps: Stamps) -> float:
    """Return the mean over ranks and calls in seconds."""
    return float(np.diff(stamps).mean()) * 1e-9


# name → (start, seconds of a launch)
DEFINITIONS: dict[str, tuple[str, Callable[[Stamps], float]]] = {
    "median of t_max": ("barrier", find_median),
    "mean over ranks, no barrier": ("none", find_mean),
}


def launch_bare(backend: str, out: Path, seed: int, seconds: float) -> dict[Case, Stamps]:
    """Run the script once: two processes in sessions of their own as torchrun's, or mpirun's."""
    words = [BARE, backend, str(out), str(seed), str(seconds), *map(str, SIZES)]
    if backend == "mpi":
        code = starters.mpirun(words, 2)
    else:
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, **meet, "RANK": str(rank)},
                start_new_session=True,
            )
            for rank in range(2)
        ]
        code = max(abs(rank.wait()) for rank in ranks)
    if code:
        sys.exit(f"bare.py on {backend} ended with exit code {code}")
    parts = [np.load(f"{out}.{rank}.npz") for rank in range(2)]
    cases = [(start, nbytes) for start, _ in DEFINITIONS.values() for nbytes in SIZES]
    return {case: np.stack([part["{}/{}".format(*case)] for part in parts]) for case in cases}


def launch_ddpbench(
    backend: str, start: str, out: Path, seed: int, seconds: float
) -> dict[Case, Stamps]:
    """Run the command once."""
    words = ["collectives", "--device=cpu", f"--backend={backend}", "-n=2", "--op=all_reduce",
             f"--sizes={','.join(map(str, SIZES))}", f"--case-time={seconds}", f"--sync={start}",
             "--launches=1", f"--seed={seed}", "--quiet", f"--output={out}"]  # fmt: skip
    command = [sys.executable, "-m", "ddpbench", *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    sizes = {result.case.key: result.case.nbytes for result in store.read(out).results}
    samples, stamps = store.read_samples(out), {}
    for key, rows in samples[~samples["warm_up"]].groupby("case"):
        ranks = [rows[rows["rank"] == rank].sort_values("repetition") for rank in range(2)]
        pairs = [rank[["entry_ns", "exit_ns"]].to_numpy(np.int64) for rank in ranks]
        stamps[start, sizes[str(key)]] = np.stack(pairs)
    return stamps


def main(words: Sequence[str]) -> int:
    """Measure each backend by itself: ranks that poll would take gloo's cores."""
    backends = [word for word in words if word.isalpha()] or ["gloo", "mpi"]
    numbers = [float(word) for word in words if not word.isalpha()]
    launches_per_side, seconds = (*numbers, *(LAUNCHES, SECONDS)[len(numbers) :])
    blocks = int(launches_per_side)
    confidence = 1 - 0.05 / (len(backends) * len(DEFINITIONS) * len(SIZES))
    order, rows, clear = random.Random(), [], False
    for backend in backends:
        with tempfile.TemporaryDirectory(prefix="ddpbench-") as name:
            launches: dict[str, list[dict[Case, Stamps]]] = {arm: [] for arm in ARMS}
            for block in range(blocks):
                for arm in order.sample(ARMS, len(ARMS)):
                    out, seed = Path(name) / f"{arm}-{block}", order.randrange(2**31)
                    launches[arm].append(
                        launch_bare(backend, out, seed, seconds) if arm == "bare"
                        else launch_ddpbench(backend, arm, out, seed, seconds)
                    )  # fmt: skip
            for (title, (start, define)), nbytes in itertools.product(DEFINITIONS.items(), SIZES):
                bare, own = (
                    np.array([define(launch[start, nbytes]) for launch in launches[arm]])
                    for arm in ("bare", start)
                )
                ratio, interval = np.median(own) / np.median(bare), "-"
                if (shift := paired_shift(bare, own, confidence)) is not None:
                    clear |= shift.low > math.log(BOUND)
                    ratio, low, high = np.exp([shift.estimate, shift.low, shift.high])
                    interval = f"{low:.3f} … {high:.3f}"
                medians = np.median(bare) * 1e6, np.median(own) * 1e6
                rows.append([backend, title, readable(nbytes), *medians, ratio, interval])
    heads = ["backend", "definition", "size", "bare µs", "ddpbench µs", "ratio", "interval"]
    print(tabulate(rows, heads, floatfmt=("", "", "", ".1f", ".1f", ".3f")))
    print(f"{blocks} launches per side; bound {BOUND}")
    return int(clear)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
