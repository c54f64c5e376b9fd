"""Count the stragglers and pauses that a watch finds, and its false warnings on healthy jobs.

    ./run_bench.sh python tests/perf/watch_faults.py [--runs N] [--seed S] [--only KIND,…]

Each run is a real job: DDP on gloo, whose steps are mostly sleep, so that two cores suffice.
Stragglers: four ranks, 72 steps of 0.1 s; rank, phase and size (5 to 50 % of a step) are random.
Pauses: two ranks, steps of 4 to 12 ms; period (5 to 500 steps), size (0.05 to 0.5 s) and rank are
random. A run is right if the findings above a note are the planted faults and no others, with rank,
phase, period and size within 10 %; a straggler's first step within three; a pause's line, and its
share of the job within 10 %. Exits with 1 when fewer are right than promised.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddpbench.launch import starters
from ddpbench.records import store

PHASES = ("input", "forward", "backward", "optimizer")
SHARES = dict(zip(PHASES, (0.11, 0.33, 0.45, 0.11), strict=True))  # of a step's sleep
STEPS, STEP_SECONDS = 72, 0.1  # of a job with stragglers
LATE_BY, LATE_BY_SECONDS = 3, 1.0  # how far the first late step may be off
PERIODS, LEAST_STEPS, LEAST_PAUSES = (5, 500), 400, 5
SIZES, ONCE_SECONDS = (0.05, 0.5), 10.0
WORK_SECONDS = 0.003, 0.010  # of sleep in a step of a job with pauses
LEAST_SHARE = 0.04  # of the job: a watch must warn of such a pause


@dataclass(frozen=True)
class Fault:
    """Extra time of a rank (None: of all) in a phase of some steps, or after them ("other")."""

    rank: int | None
    phase: str
    seconds: float
    every: int = 1
    since: int = 0
    shift: int = 0

    def acts(self, step: int, rank: int) -> bool:
        """Return whether the rank is late in this step."""
        due = step >= self.since and (step + 1 + self.shift) % self.every == 0
        return due and self.rank in (None, rank)


@dataclass(frozen=True)
class Job:
    """A job and its faults."""

    ranks: int
    steps: int
    work_seconds: float
    faults: list[Fault]


# --- pauses: the line that must be named ends with PAUSE ------------------------------------------


def save(seconds: float, model: nn.Module) -> None:
    if seconds:
        time.sleep(seconds)  # PAUSE


def save_and_meet(seconds: float, model: nn.Module) -> None:
    save(seconds, model)
    dist.barrier()


def evaluate(seconds: float, model: nn.Module) -> None:
    with torch.no_grad():
        for _ in range(5):
            model(torch.ones(16, 64))
            time.sleep(seconds / 5)  # PAUSE


def collect(seconds: float, model: nn.Module) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        gc.collect()  # PAUSE


def wait_for_worker(seconds: float, worker: int) -> None:
    time.sleep(seconds)


def restart(seconds: float, model: nn.Module) -> None:
    data = TensorDataset(torch.ones(1))
    slow = partial(wait_for_worker, seconds)
    for _ in DataLoader(data, num_workers=1, worker_init_fn=slow):  # PAUSE
        pass


@dataclass(frozen=True)
class Kind:
    """Jobs with faults of one kind, and how many of 100 runs must be right.

    pause: what a rank does after a step; None: stragglers. everyone: all ranks pause; meets: those
    that do not pause call it as well; buffers: DDP broadcasts them in forward.
    """

    promise: int = 95
    faults: int = 1
    share: float = 1.0  # of --runs
    least: float = 0.05  # of a step
    every: int = 1
    since: int = 0
    buffers: bool = False
    phases: tuple[str, ...] = PHASES
    pause: Callable[[float, nn.Module], None] | None = None
    everyone: bool = False
    meets: bool = False


KINDS = {
    "straggler": Kind(),
    "healthy": Kind(100, faults=0),
    "two stragglers": Kind(90, faults=2, share=0.2, least=0.1),
    "every fifth step": Kind(90, share=0.2, least=0.2, every=5),
    "late halfway": Kind(90, share=0.2, least=0.1, since=STEPS // 2),
    "late input with buffers": Kind(90, share=0.2, buffers=True, phases=("input",)),
    "healthy with buffers": Kind(100, faults=0, share=0.2, buffers=True),
    "save": Kind(pause=save, share=0.2),
    "save and barrier": Kind(pause=save_and_meet, share=0.2, meets=True),
    "evaluate": Kind(pause=evaluate, share=0.2, everyone=True),
    "garbage collection": Kind(pause=collect, share=0.2),
    "restart of workers": Kind(pause=restart, share=0.2, everyone=True, phases=("input",)),
    "at different times": Kind(pause=save, share=0.2, faults=2),
    "once": Kind(pause=save, share=0.2),
    "healthy in short steps": Kind(100, pause=save, share=0.2, faults=0),
}


def draw_stragglers(kind: Kind, draw: np.random.Generator) -> Job:
    """Return a job with random stragglers."""
    ranks = draw.permutation(4)[: kind.faults]
    faults = [
        Fault(int(rank), kind.phases[draw.integers(len(kind.phases))],
              STEP_SECONDS * draw.uniform(kind.least, 0.5), kind.every, kind.since)
        for rank in ranks
    ]  # fmt: skip
    return Job(4, STEPS, 0.9 * STEP_SECONDS, faults)


def draw_pauses(name: str, draw: np.random.Generator) -> Job:
    """Return a job with random pauses: of one rank, of all, or of two in turn."""
    kind = KINDS[name]
    every = round(np.exp(draw.uniform(*np.log(PERIODS))))
    seconds = float(np.exp(draw.uniform(*np.log(SIZES))))
    work_seconds = float(draw.uniform(*WORK_SECONDS))
    steps = max(LEAST_STEPS, LEAST_PAUSES * every)
    if name == "once":
        seconds, every = ONCE_SECONDS, steps // 2 + 1
    first = int(draw.integers(2))
    phase = "input" if kind.phases == ("input",) else "other"
    faults = [
        Fault(None if kind.everyone else (first + number) % 2, phase, seconds, every,
              shift=number * (every // 2))
        for number in range(kind.faults)
    ]  # fmt: skip
    return Job(2, steps, work_seconds, faults)


# --- the job --------------------------------------------------------------------------------------


class Pace:
    """How long this rank sleeps in each phase of the current step."""

    def __init__(self, rank: int, job: Job, late: bool) -> None:
        self.step, self._rank, self._job = 0, rank, job
        self._faults = job.faults if late else []

    def sleep(self, phase: str) -> None:
        """Sleep as long as this phase takes."""
        late = [f for f in self._faults if f.phase == phase and f.acts(self.step, self._rank)]
        time.sleep(SHARES[phase] * self._job.work_seconds + sum(f.seconds for f in late))


class Data(Dataset[Tensor]):
    """Batches that take time to load."""

    def __init__(self, pace: Pace, steps: int) -> None:
        self._pace, self._steps = pace, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Tensor:
        self._pace.sleep("input")
        return torch.ones(16, 64) * (index % 100)


class SlowBackward(torch.autograd.Function):
    """The identity, with time in backward."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.pace.sleep("backward")
        return gradient, None


class Model(nn.Module):
    """A small MLP that takes time while it is trained."""

    def __init__(self, pace: Pace, buffers: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 1)
        self.norm = nn.BatchNorm1d(64) if buffers else nn.Identity()
        self._pace = pace

    def forward(self, batch: Tensor) -> Tensor:
        """Return a value for each sample."""
        if torch.is_grad_enabled():
            self._pace.sleep("forward")
        hidden = self.norm(self.first(batch))
        loss: Tensor = self.last(SlowBackward.apply(hidden, self._pace))  # type: ignore[no-untyped-call]
        return loss


class SlowSgd(torch.optim.SGD):
    """SGD whose steps take time."""

    pace: Pace

    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        self.pace.sleep("optimizer")
        return super().step(closure)


def pause(kind: Kind, job: Job, step: int, rank: int, model: nn.Module) -> bool:
    """Pause after a step if that is due; return whether this rank has paused."""
    assert kind.pause is not None
    due = [fault for fault in job.faults if fault.acts(step, rank)]
    if step + 1 == job.steps or not (due or kind.meets):
        return False
    if due:
        kind.pause(due[0].seconds, model)
    elif any(fault.acts(step, other) for fault in job.faults for other in range(job.ranks)):
        kind.pause(0.0, model)
    return bool(due)


def train(kind: Kind, job: Job, folder: Path) -> int:
    """Run a rank of the job under a watch; store when it took how long."""
    from ddpbench.watch.outputs import Settings
    from ddpbench.watch.watcher import Watcher

    rank = int(os.environ["DDPBENCH_RANK"])
    torch.set_num_threads(1)
    with (folder / f"{rank}.log").open("w") as log, contextlib.redirect_stderr(log):
        started = time.perf_counter()
        watcher = Watcher(Settings(output=folder))
        dist.init_process_group("gloo", rank=rank, world_size=job.ranks)
        pace = Pace(rank, job, late=kind.pause is None)
        model = DistributedDataParallel(Model(pace, kind.buffers))
        optimizer = SlowSgd(model.parameters(), lr=1e-3)
        optimizer.pace = pace
        began, ended, paused = [], [], []
        for step, batch in enumerate(DataLoader(Data(pace, job.steps), batch_size=None)):
            began.append(time.time())
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
            pace.step = step + 1
            ended.append(time.perf_counter())
            if kind.pause is not None and pause(kind, job, step, rank, model.module):
                paused.append(time.perf_counter() - ended[-1])
        wall = [time.perf_counter() - started]
        watcher.close()
        wall.append(time.perf_counter() - started)
        dist.destroy_process_group()
    truth = {"began": began, "stepping": ended[-1] - ended[0], "paused": paused, "wall": wall}
    (folder / f"{rank}.json").write_text(json.dumps(truth))
    return 0


# --- the verdicts ---------------------------------------------------------------------------------


def list_wrong(kind: Kind, job: Job, folder: Path, sizes: list[float]) -> Iterator[str]:
    """Yield what is wrong with the stored run; add each size, as a share of the planted one."""
    truths = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(job.ranks)]
    (path,) = folder.glob("*/run.json")
    run = store.read(path.parent)
    yield from list_wrong_balance(run.steps[0].watched, truths[0])
    loud = [finding for finding in run.findings if finding.severity != "note"]
    planted = {fault.rank for fault in job.faults}
    for finding in loud:
        if finding.place.get("rank") not in planted:
            yield f"not planted: {finding.sentence}"
    places = {finding.place.get("rank"): finding.place for finding in loud}
    for fault in job.faults:
        place, seconds, share = places.get(fault.rank, {}), fault.seconds, 1.0
        if kind.pause is not None:
            # Of pauses of all ranks, the slowest one's time is lost.
            ranks = range(job.ranks) if fault.rank is None else [fault.rank]
            paused = np.max([truths[rank]["paused"] for rank in ranks], axis=0)
            seconds = float(np.median(paused))
            share = float(np.sum(paused)) / truths[0]["stepping"]
        if "seconds" in place:
            sizes.append(place["seconds"] / seconds)
            differences = list_differences(fault, place, seconds, job)
            yield from (f"{fault}: {difference}" for difference in differences)
            if kind.pause is None:
                yield from list_wrong_start(fault, place, truths[0]["began"])
            else:
                yield from list_wrong_pause(place, share)
        elif share >= LEAST_SHARE:
            yield f"{fault}: not found"


def list_wrong_balance(watched: Any, truth: dict[str, Any]) -> Iterator[str]:
    """Yield where the balance of the job's time differs from the measured one."""
    balance = watched.balance if watched is not None else None
    least, most = truth["wall"]  # before and after the watch was closed
    if balance is None or not 0.98 * least <= balance.wall_seconds <= 1.02 * most:
        yield f"{balance} of {least:.2f} to {most:.2f} s"
    elif abs(balance.stepping_seconds / truth["stepping"] - 1) > 0.02:
        yield f"{balance.stepping_seconds:.2f} s of steps instead of {truth['stepping']:.2f}"


def list_differences(
    fault: Fault, place: dict[str, Any], seconds: float, job: Job
) -> Iterator[str]:
    """Yield how a finding differs from its fault in phase, size and period."""
    if place["phase"] != fault.phase:
        yield f"phase {place['phase']}"
    if abs(place["seconds"] / seconds - 1) > 0.1:
        yield f"{place['seconds'] * 1e3:.2f} ms instead of {seconds * 1e3:.2f}"
    if place["every"] != (fault.every if 2 * fault.every <= job.steps else 0):
        yield f"every {place['every']}"


def list_wrong_start(fault: Fault, place: dict[str, Any], began: list[float]) -> Iterator[str]:
    """Yield where the first late step differs. began: time of each step."""
    if "until_step" in place:
        yield f"{fault}: until step {place['until_step']}"
    since = place.get("since_step")
    if (since is None) != (fault.since == 0):
        yield f"{fault}: since {since}"
    elif since is not None:
        seconds = place["since"] - began[fault.since]
        if abs(since - fault.since) > LATE_BY or abs(seconds) > LATE_BY_SECONDS:
            yield f"{fault}: since step {since}, {seconds:+.2f} s"


def list_wrong_pause(place: dict[str, Any], share: float) -> Iterator[str]:
    """Yield a wrong share of the job, and a line that does not pause."""
    if abs(place["share"] - share) > max(0.02, 0.1 * share):
        yield f"share {place['share']:.1%} instead of {share:.1%}"
    text = Path(__file__).read_text().splitlines()
    number = int(place["line"].split()[0].rpartition(":")[2] or 0) if place["line"] else 0
    if not number or not text[number - 1].endswith("# PAUSE"):
        yield f"line {place['line'] or 'unknown'}"


def run_kind(name: str, runs: int, seed: int) -> tuple[int, list[float]]:
    """Run all jobs of one kind; return how many were right, and the sizes, found / planted."""
    kind, right = KINDS[name], 0
    sizes: list[float] = []
    for number in range(seed, seed + runs):
        draw = np.random.default_rng([number, list(KINDS).index(name)])
        job = draw_pauses(name, draw) if kind.pause else draw_stragglers(kind, draw)
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            if code := starters.run_forked(partial(train, kind, job, folder), job.ranks):
                wrong = [f"exit code {code}"]
            else:
                wrong = list(list_wrong(kind, job, folder, sizes))
            logs = "".join(log.read_text() for log in folder.glob("*.log"))
        wrong += [logs] if "watch of rank" in logs else []  # the watch has given up
        right += not wrong
        for sentence in wrong:
            print(f"{name}, seed {number}: {sentence}", flush=True)
    return right, sizes


def main() -> int:
    """Run all kinds and print the table; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description="Count the faults that a watch finds.")
    parser.add_argument("--runs", type=int, default=100, help="runs of the first two kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds to run, with commas")
    options = parser.parse_args()
    rows, broken = [], False
    for name, kind in KINDS.items():
        if not options.only or name in options.only.split(","):
            runs = max(1, round(options.runs * kind.share))
            right, sizes = run_kind(name, runs, options.seed)
            broken |= 100 * right < kind.promise * runs
            shares = ""
            if sizes:
                shares = " ".join(f"{each:.3f}" for each in np.percentile(sizes, [5, 50, 95]))
            rows.append([name, runs, right, f"{kind.promise} of 100", shares])
    heads = ["planted", "runs", "right", "promised", "size found / planted: 5, 50, 95 %"]
    print(tabulate(rows, heads))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
