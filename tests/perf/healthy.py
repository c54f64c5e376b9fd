"""False alarms of the replica proof: healthy runs of `ddpbench ddp`, each with a seed of its own.

    ./run_bench.sh python tests/perf/healthy.py [RUNS]

Every run is a process group of 2 or 3 ranks on gloo, a workload, an optimizer and DDP's options in
turn, verified after each step. Exits with 1 when any says that replicas differ, or fails.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from rank_pool import RankPool

from ddpbench.records import store

WORKLOADS = ("linear", "mlp", "convnet", "transformer", "embedding", "contrastive", "regression")
OPTIONS = (
    (),
    ("--gradient-as-bucket-view", "--bucket-cap-mb", "0.05"),
    ("--find-unused-parameters", "--accumulate", "2"),
    ("--static-graph", "--amp", "bf16"),
)
SHAPES = {
    "mlp": ("--width", "64", "--depth", "3"),
    "convnet": ("--width", "8"),
    "transformer": ("--width", "64", "--layers", "2", "--sequence", "8", "--vocabulary", "99"),
    "embedding": ("--rows", "500", "--width", "8"),
    "regression": ("--epochs", "2"),
}


def main(runs: int) -> int:
    """Run them all; 1 if any raised an alarm."""
    pool, steps, alarms = RankPool(), 0, 0
    optimizers = itertools.cycle(("sgd", "adam", "adamw"))
    with tempfile.TemporaryDirectory() as name:
        for seed in range(runs):
            workload = WORKLOADS[seed % len(WORKLOADS)]
            words = (
                "ddp", "--workload", workload, *SHAPES.get(workload, ()), "--batch", "8",
                *OPTIONS[seed % len(OPTIONS)], "--optimizer", next(optimizers),
                "--rounds", "2", "--seed", str(seed), "--output", f"{name}/{seed}",
            )  # fmt: skip
            done = pool.call(2 + seed % 2, Path(name), *words)
            (result,) = store.read(Path(name) / str(seed)).steps
            fine = done.returncode == 0 and result.replicas is not None and result.replicas.ok
            if result.replicas is not None:
                steps += result.replicas.verified
            if not fine:
                alarms += 1
                print(f"seed {seed}: {' '.join(words)}\n{done.stdout}{done.stderr}", flush=True)
    pool.close()
    print(f"{runs} healthy runs, {steps} steps verified: {alarms} alarms")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 100))
