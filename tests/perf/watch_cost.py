"""Compare launches of a training script with and without a watch, from outside.

    ./run_bench.sh python tests/perf/watch_cost.py [PAIRS [SECONDS [MILLISECONDS …]]]

`train.py` on 2 ranks under torchrun, as it is and under `-m ddpbench.watch`, which stores its run.
A pair is one launch of each, in random order. 20 PAIRS for each step length of 5, 13 and 40 ms,
with training loops of 10 SECONDS: 27 minutes; at least 6 pairs have an interval. A launch has fresh
processes, and its steps compute, each rank on one core, so whatever the watch does delays them. The
figures are the median ratios of watched to bare launches, with 95 % intervals: the wall time of a
step and the CPU time of a rank between two barriers, and the wall time and the CPU time of the
launch with its start and its end. The aim is 1.01 at most. Run it alone.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpi_speed import describe
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))

from command_lines import clean_environment

TRAIN = str(Path(__file__).with_name("train.py"))
BATCHES = {5: 16, 13: 240, 40: 1000}  # milliseconds of a step, about → rows of its batch
FIGURES = ("step", "CPU of a rank", "launch", "CPU of the launch")


def launch(folder: str, watched: bool, batch: int, steps: int) -> list[float]:
    """Train once. Return FIGURES in seconds."""
    out = Path(folder) / "out.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    watch = ["-m", "ddpbench.watch"] if watched else []
    began, before = time.perf_counter(), os.times()
    subprocess.run(
        [*torchrun, *watch, TRAIN, str(batch), str(steps), str(out)],
        cwd=folder,
        env=clean_environment(),
        check=True,
        capture_output=True,
    )
    wall, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    step, rank = json.loads(out.read_text())
    return [step, rank, wall, cpu]


def measure(milliseconds: int, pairs: int, seconds: float) -> list[str]:
    """Return a row of the table; print the ratios of each pair."""
    batch, steps = BATCHES[milliseconds], round(seconds / milliseconds * 1e3)
    bare, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(pairs):
            order = random.sample((False, True), 2)
            taken = {watched: launch(folder, watched, batch, steps) for watched in order}
            bare.append(taken[False][0] * 1e3)
            ratios.append([b / a for a, b in zip(taken[False], taken[True], strict=True)])
            print(f"{milliseconds} ms:", *(f"{ratio:.4f}" for ratio in ratios[-1]), flush=True)
    return [f"{statistics.median(bare):.1f} ms", *map(describe, zip(*ratios, strict=True))]


def main(words: list[str]) -> None:
    pairs, seconds, *lengths = [*map(int, words), *(20, 10)[len(words) :]]
    if unknown := set(lengths) - set(BATCHES):
        sys.exit(f"unknown step length {min(unknown)}: choose {', '.join(map(str, BATCHES))}")
    rows = [measure(length, pairs, seconds) for length in lengths or BATCHES]
    print(tabulate(rows, ["bare step", *FIGURES]))


if __name__ == "__main__":
    main(sys.argv[1:])
