"""Count false alarms of the replica check in healthy runs of `ddpbench ddp`, each with its seed.

    ./run_bench.sh python tests/perf/healthy.py [RUNS]

Every second run is a DDP step of 2 or 3 ranks on gloo, with a workload, an optimizer and DDP's
options in turn, the others a step of 4 ranks on a mesh; all are verified after each step. Exits
with 1 when any says that replicas differ, or fails.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from rank_pool import RankPool

from ddpbench.records import store

WORKLOADS = ("linear", "mlp", "convnet", "transformer", "embedding", "contrastive")
OPTIONS = (
    (),
    ("--gradient-as-bucket-view", "--bucket-cap-mb", "0.05"),
    ("--find-unused-parameters", "--accumulate", "2"),
    ("--static-graph", "--amp", "bf16"),
)
SHAPES = {
    "mlp": ("--width", "64", "--depth", "3"),
    "convnet": ("--width", "8"),
    "transformer": ("--width", "256", "--layers", "2", "--sequence", "8", "--vocabulary", "99"),
    "embedding": ("--rows", "500", "--width", "8"),
}
MESHES = tuple(itertools.product(("fsdp", "hsdp", "tp", "fsdp+tp"), ("mlp", "transformer")))
OPTIMIZERS = ("sgd", "adam", "adamw")


def describe_run(seed: int) -> tuple[int, str, tuple[str, ...]]:
    """Return the number of ranks, the workload and the options of a run."""
    turn, on_mesh = divmod(seed, 2)
    if on_mesh:
        way, workload = MESHES[turn % len(MESHES)]
        return 4, workload, ("--parallel", way)
    return 2 + turn % 2, WORKLOADS[turn % len(WORKLOADS)], OPTIONS[turn % len(OPTIONS)]


def main(runs: int) -> int:
    """Run them all; 1 if any raised an alarm."""
    pool, steps, alarms = RankPool(), 0, 0
    with tempfile.TemporaryDirectory() as name:
        for seed in range(runs):
            ranks, workload, options = describe_run(seed)
            words = (
                "ddp", "--workload", workload, *SHAPES.get(workload, ()), "--batch", "8",
                *options, "--optimizer", OPTIMIZERS[seed % 3],
                "--rounds", "2", "--seed", str(seed), "--output", f"{name}/{seed}",
            )  # fmt: skip
            done = pool.call(ranks, Path(name), *words)
            replicas = None
            if done.returncode == 0:
                replicas = store.read(Path(name) / str(seed)).steps[0].replicas
            if replicas is None or replicas.failed:
                alarms += 1
                print(f"seed {seed}: {' '.join(words)}\n{done.stdout}{done.stderr}", flush=True)
            else:
                steps += replicas.verified
    pool.close()
    print(f"{runs} healthy runs, {steps} steps verified: {alarms} alarms")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 100))
