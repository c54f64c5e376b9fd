"""Measure what ddpbench costs rank 0 as ranks grow: the data of many ranks through its own code.

    python tests/perf/scale.py [WORLD_SIZE …]

The ranks are simulated below torch.distributed: a gather gives as many stamps as there would be
ranks, each time other ones, and every rank reports the facts of this one. All else is what rank 0
of a sweep runs: repetitions, control, recorder, store, tables. Three cases of 5000 repetitions, the
most there are, 8 ranks per host, each world in a fresh process. Seconds are CPU time of this
process, without the network. facts and end: once per launch; gather, summary and store: per case.
memory: the most, above what the imports take.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate

from ddpbench.catalog import backends
from ddpbench.catalog.operations import OPERATIONS
from ddpbench.hang.status_board import RankIdentity
from ddpbench.launch.placement import Placement
from ddpbench.measure import repetitions
from ddpbench.records import store
from ddpbench.records.schema import Case, Plan, Result, Run
from ddpbench.runtime import cpu
from ddpbench.runtime.network import Endpoint
from ddpbench.runtime.subgroups import Subgroup, divide_ranks
from ddpbench.runtime.world import World
from ddpbench.session import launches, recorder

WORLDS = (16, 1024, 16384)
CASES, A_HOST, CALL_NS = 3, 8, 100_000
SHOWN: Any = SimpleNamespace(device="cpu", format="table", columns=None, quiet=False)
MADE_UP = [0.0]  # seconds that the simulation itself took, which are no cost of ddpbench's
PLAN = Plan(check=False, precision=1e-9, slice_seconds=1e6)  # to the most repetitions


def simulate(size: int) -> World:
    """Rank 0 of so many; what torch.distributed would carry is made up here."""
    noise = np.random.default_rng(1)

    def gather(mine: torch.Tensor, parts: list[torch.Tensor], dst: int) -> None:
        began = time.process_time()
        late = noise.integers(0, CALL_NS, (len(parts), len(mine), 3), dtype=np.int32)
        late[:, :, 0] //= 10
        late[:, :, 2] = 0
        stamps = torch.from_numpy(mine.numpy() + late)
        for part, its in zip(parts, stamps, strict=True):
            part.copy_(its)
        MADE_UP[0] += time.process_time() - began

    def repeated(parts: list[torch.Tensor], mine: torch.Tensor) -> None:
        began = time.process_time()
        for part in parts:
            part.copy_(mine)
        MADE_UP[0] += time.process_time() - began

    fakes: dict[str, Any] = {
        "gather": gather,
        "all_gather": repeated,
        "all_reduce": lambda *_, **__: None,
        "broadcast": lambda *_, **__: None,
    }
    for name, fake in fakes.items():
        setattr(dist, name, fake)
    hosts = {rank: f"host{rank // A_HOST}" for rank in range(size)}
    who = tuple(RankIdentity(rank, host, rank, f"boot of {host}") for rank, host in hosts.items())
    watchdog: Any = SimpleNamespace(signal=None, rearm=lambda: None, phase=lambda what: None)
    net = tuple(Endpoint(r, its.host, its.boot_id, "", (), {}) for r, its in enumerate(who))
    place = Placement("torchrun", 0, size, 0, A_HOST)
    return World(place, who, net, watchdog, timedelta(seconds=60))


class Bench:
    """A case that takes no time."""

    calls = generation = 1
    page_faults, unhidden, hides_launch = 0, 0, False

    def __init__(self, case: Case, plan: Plan, world: World, *_: object) -> None:
        self.case, self.operation, self.plan = case, OPERATIONS[case.operation], plan
        self.world = world
        self.at = 0

    def repeat(self, count: int, batch: int = 1) -> Any:
        """Stamps of calls one after the other."""
        entry = self.at + 2 * CALL_NS * np.arange(count)
        self.at += 2 * CALL_NS * count
        return np.column_stack([entry, entry + CALL_NS, np.full(count, -1)])

    def begin(self) -> None:
        """Do nothing."""

    rest = refill = begin


def measured(size: int, folder: Path) -> dict[str, float]:
    """One launch of CASES cases; seconds and MB by name."""
    spent: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(name: str, share: int = 1) -> Iterator[None]:
        began, made_up = time.process_time(), MADE_UP[0]
        yield
        seconds = time.process_time() - began - (MADE_UP[0] - made_up)
        spent[name] = spent.get(name, 0.0) + seconds / share

    repetitions.Bench = Bench  # type: ignore[assignment,misc]
    for name in ("scipy.stats", "pyarrow.parquet", "pandas"):
        import_module(name)
    world = simulate(size)
    backend, hosts = backends.get("gloo"), len(world.hosts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with timed("facts s"):
        run = Run("", "collectives", (), PLAN, store.format_now(), backends=("gloo",))
        store.create(folder, run, "scale")
        context = launches.LaunchContext(
            world, backend, "gloo", cast(Any, None), SHOWN, PLAN, folder, cast(Any, None), 0,
            contextlib.ExitStack(),
        )  # fmt: skip
        record = context.gather_recorder(CASES)
    for number in range(CASES):
        case = Case(
            "all_reduce", "tensor", "gloo", "native", "cpu", "float32", "sum", None, 4 << number,
            1 << number, True, False, "isolated", "barrier", 1, size, (A_HOST,) * hosts,
        )  # fmt: skip
        nothing = cast(Any, None)
        team = Subgroup(divide_ranks("world", [range(size)]), nothing, nothing)
        with timed("gather s", CASES):
            samples = repetitions.measure(
                case, PLAN, world, team, nothing, shortest_seconds=0.0, objection=None
            )
        with timed("summary s", CASES):
            world.agree_others_share(cpu.CpuMeter())
            wrong = tuple(repetitions.gather_wrong(world, samples))
            result = Result(case, 0, 1.0, 4.0, 4, wrong=wrong)
            outcome = repetitions.summarise_result(result, samples, 0.0)
        with timed("store s", CASES):
            record.add(*outcome)
        assert record.failure is None
        assert outcome[0].summary is not None
        assert outcome[0].summary.repetitions == PLAN.max_repetitions
    with timed("end s"), contextlib.redirect_stderr(io.StringIO()):
        assert [*record.agree_cases((), str)] == []  # stores the end of the launch
        with contextlib.redirect_stdout(io.StringIO()):
            recorder.finish(folder, SHOWN)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = len(store.read_samples(folder))
    return {
        **spent,
        "memory MB": (after - before) * 1024 / 1e6,
        "rows a case": rows / CASES,
        "samples MB": (folder / "samples.parquet").stat().st_size / 1e6,
        "run.json MB": (folder / "run.json").stat().st_size / 1e6,
    }


def print_worlds(measure: Callable[[int], dict[str, float]], worlds: Sequence[int]) -> None:
    """Print a row per world of the command line, each measured in a fresh process."""
    script, *words = sys.argv
    if words[:1] == ["--one"]:
        print(json.dumps(measure(int(words[1]))))
        return
    rows = []
    for world in map(int, words or worlds):
        command = [sys.executable, script, "--one", str(world)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append({"ranks": world, **json.loads(done.stdout)})
    print(tabulate(rows, headers="keys", floatfmt=".4g"))


def measure_launch(size: int) -> dict[str, float]:
    """Measure one launch in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return measured(size, Path(folder) / "run")


if __name__ == "__main__":
    print_worlds(measure_launch, WORLDS)
