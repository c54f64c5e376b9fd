"""What ddpbench adds to a bare script: processes of their own, launch by launch in random order.

    ./run_bench.sh python tests/perf/overhead.py [gloo|mpi …] [LAUNCHES]

all_reduce on 2 ranks. A block has a launch of `bare.py`, one of `ddpbench collectives` and one of
the same with `--start none`, as users run them: ranks that are forked for gloo, started by mpirun
for mpi, where both sides use ddpbench's process group over mpi4py. LAUNCHES (20) blocks. Three
definitions: the median and the lower quartile of the slowest rank's time after a barrier, and the
mean over ranks and calls without one. A ratio's interval is over blocks, for all rows together 95 %
(each row's share of 5 % is the same). Exits with 1 where an interval lies above 1.02.
"""

from __future__ import annotations

import math
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from ddpbench.catalog.sizes import readable
from ddpbench.launch import starters
from ddpbench.nested_runs.turns import Side, Variant
from ddpbench.records import store
from ddpbench.verdicts.verdict import Shift, paired_shift

SIZES = (4, 2**16, 2**20, 2**24)
BOUND, LAUNCHES, SECONDS = 1.02, 20, 0.3
FEWEST = 10  # launches; of fewer pairs, so many rows together have no interval
BARE = str(Path(__file__).with_name("bare.py"))
Stamps = npt.NDArray[np.int64]  # [rank, repetition, 2]: entry and exit in ns
Case = tuple[str, int]  # start, bytes


def _slowest(stamps: Stamps) -> npt.NDArray[np.float64]:
    return np.asarray((stamps[:, :, 1] - stamps[:, :, 0]).max(axis=0), dtype=np.float64)


# name → (start, seconds of a launch)
DEFINITIONS: dict[str, tuple[str, Callable[[Stamps], float]]] = {
    "median of t_max": ("barrier", lambda s: float(np.median(_slowest(s))) * 1e-9),
    "lower quartile of t_max": ("barrier", lambda s: float(np.percentile(_slowest(s), 25)) * 1e-9),
    "mean over ranks, no barrier": ("none", lambda s: float(np.diff(s).mean()) * 1e-9),
}


@dataclass
class Arm:
    """One side: `launch` measures once and adds to `launches`, or `read` does at the end."""

    launch: Callable[[int], None]
    read: Callable[[], None] = lambda: None
    launches: list[dict[Case, Stamps]] = field(default_factory=list)


def bare(backend: str, folder: Path) -> Arm:
    """The script, two processes in sessions of their own as torchrun makes them, or mpirun's."""

    def launch(seed: int) -> None:
        out = folder / f"bare-{len(arm.launches)}"
        words = [BARE, backend, str(out), str(seed), str(SECONDS), *map(str, SIZES)]
        if backend == "mpi":
            code = starters.mpirun(words, 2)
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            meet = {
                **os.environ,
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            ranks = [
                subprocess.Popen(
                    [sys.executable, *words], env={**meet, "RANK": str(r)}, start_new_session=True
                )
                for r in range(2)
            ]
            code = max(abs(rank.wait()) for rank in ranks)
        if code:
            sys.exit(f"bare.py on {backend} ended with exit code {code}")
        parts = [np.load(f"{out}.{rank}.npz") for rank in range(2)]
        arm.launches.append(
            {(start, nbytes): np.stack([part[f"{start}/{nbytes}"] for part in parts])
             for start, _ in DEFINITIONS.values() for nbytes in SIZES}
        )  # fmt: skip

    arm = Arm(launch)
    return arm


def ddpbench(
    backend: str, start: str, folder: Path, blocks: int, environ: Mapping[str, str] | None = None
) -> Arm:
    """The command, which stores a run of as many launches."""
    sizes = ",".join(map(str, SIZES))
    words = ["collectives", "--device=cpu", f"--backend={backend}", "-n=2", "--op=all_reduce",
             f"--sizes={sizes}", f"--slice={SECONDS}", f"--start={start}"]  # fmt: skip
    side = Side(
        Variant(start, sys.executable, environ or {}, ()), words, folder, [f"--launches={blocks}"]
    )

    def read() -> None:
        side.close()
        run = store.read(folder)
        sizes = {result.case.key: result.case.nbytes for result in run.results}
        samples = store.read_samples(folder)
        for _, each in samples[~samples["warm_up"]].groupby("launch"):
            found = {}
            for key, rows in each.groupby("case"):
                ranks = [rows[rows["rank"] == rank].sort_values("repetition") for rank in range(2)]
                stamps = [rank[["entry_ns", "exit_ns"]].to_numpy(np.int64) for rank in ranks]
                found[start, sizes[str(key)]] = np.stack(stamps)
            arm.launches.append(found)

    arm = Arm(lambda seed: side.turn(), read)
    return arm


def compared(
    base: Sequence[dict[Case, Stamps]], new: Mapping[str, Sequence[dict[Case, Stamps]]],
    confidence: float,
) -> Iterator[tuple[str, int, float, float, Shift]]:  # fmt: skip
    """Definition, bytes, both medians over launches, and the shift in pairs. new: by start."""
    for name, (start, figure) in DEFINITIONS.items():
        for nbytes in SIZES:
            case = start, nbytes
            theirs, ours = (
                np.array([figure(launch[case]) for launch in launches])
                for launches in (base, new[start])
            )
            shift = paired_shift(theirs, ours, confidence)
            assert shift is not None
            yield name, nbytes, float(np.median(theirs)), float(np.median(ours)), shift


def main(words: Sequence[str]) -> int:
    """Measure each backend by itself: ranks that poll would take gloo's cores."""
    blocks = next((int(word) for word in words if word.isdecimal()), LAUNCHES)
    if blocks < FEWEST:
        sys.exit(f"give at least {FEWEST} launches")
    backends = [word for word in words if not word.isdecimal()] or ["gloo", "mpi"]
    confidence = 1 - 0.05 / (len(backends) * len(DEFINITIONS) * len(SIZES))
    order, rows, clear = random.Random(), [], False
    for backend in backends:
        with tempfile.TemporaryDirectory(prefix="ddpbench-") as name:
            folder = Path(name)
            arms = {"bare": bare(backend, folder)}
            for start in ("barrier", "none"):
                arms[start] = ddpbench(backend, start, folder / start, blocks)
            for _ in range(blocks):
                for arm in order.sample(list(arms.values()), len(arms)):
                    arm.launch(order.randrange(2**31))
            for arm in arms.values():
                arm.read()
            new = {start: arms[start].launches for start in ("barrier", "none")}
            for what, nbytes, theirs, ours, shift in compared(
                arms["bare"].launches, new, confidence
            ):
                clear |= shift.low > math.log(BOUND)
                ratio, low, high = np.exp([shift.estimate, shift.low, shift.high])
                rows.append([backend, what, readable(nbytes), theirs * 1e6, ours * 1e6, ratio,
                             f"{low:.3f} … {high:.3f}"])  # fmt: skip
    heads = ["backend", "definition", "size", "bare µs", "ddpbench µs", "ratio", "interval"]
    print(tabulate(rows, heads, floatfmt=("", "", "", ".1f", ".1f", ".3f")))
    print(f"{blocks} launches a side; bound {BOUND}")
    return int(clear)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
