"""Whether a watch finds pauses of random periods and sizes, and none in healthy jobs.

    ./run_bench.sh python tests/perf/watch_pauses.py [--runs N] [--seed S] [--only KIND,…]

Each run is a real job: two ranks, DDP on gloo, steps of 4 to 12 ms that are mostly sleep. What
pauses, its period (5 to 500 steps), its size (0.05 to 0.5 s) and its rank are drawn anew. A run is
right if the findings above a note are the planted pause and no other, with rank, period, size and
share of the job's time within 10 %, and line, and the parts of the balance add up to the time of
the job within 2 %. Exits with 1 when fewer runs are right than promised.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpbench.launch import forks
from ddpbench.records import store

RANKS = 2
PERIODS = 5, 500  # steps
SIZES = 0.05, 0.5  # seconds
WORK = 0.003, 0.010  # seconds of sleep in a step
LEAST_STEPS, LEAST_PAUSES = 400, 5
ONCE_SECONDS = 10.0


@dataclass(frozen=True)
class Pause:
    """What is planted. rank: None: in all of them."""

    kind: str
    rank: int | None
    every: int
    seconds: float
    work_seconds: float

    @property
    def steps(self) -> int:
        """Of the job."""
        return max(LEAST_STEPS, LEAST_PAUSES * self.every)

    def holds(self, step: int, rank: int) -> bool:
        """Whether there is a pause after this step."""
        if self.kind == "healthy":
            return False
        if self.kind == "once":
            return step == self.steps // 2 and rank == self.rank
        shift = rank * (self.every // 2) if self.kind == "at different times" else 0
        return (step + 1 + shift) % self.every == 0 and self.rank in (None, rank)


# --- what pauses: the line that must be named ends with PAUSE -------------------------------------


def save(seconds: float, model: nn.Module) -> None:
    time.sleep(seconds)  # PAUSE


def save_and_meet(seconds: float, model: nn.Module) -> None:
    if seconds:
        time.sleep(seconds)  # PAUSE
    dist.barrier()


def evaluate(seconds: float, model: nn.Module) -> None:
    with torch.no_grad():
        for _ in range(5):
            model(torch.ones(4, 64))
            time.sleep(seconds / 5)  # PAUSE


def evaluate_and_meet(seconds: float, model: nn.Module) -> None:
    evaluate(seconds, model)
    dist.barrier()


def collect(seconds: float, model: nn.Module) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        gc.collect()  # PAUSE


def log(seconds: float, model: nn.Module) -> None:
    model.weight.sum().item()  # type: ignore[operator, union-attr]
    time.sleep(seconds)  # PAUSE


def wait_for_worker(seconds: float, worker: int) -> None:
    time.sleep(seconds)


def restart(seconds: float, model: nn.Module) -> None:
    data = TensorDataset(torch.ones(1))
    slow = partial(wait_for_worker, seconds)
    for _ in DataLoader(data, num_workers=1, worker_init_fn=slow):  # PAUSE
        pass


@dataclass(frozen=True)
class Kind:
    """Who pauses, in which phase, and how many of 100 runs must be right."""

    play: Callable[[float, nn.Module], None]
    everyone: bool = False
    phase: str = "other"
    promise: int = 95
    meets: bool = False  # those that do not pause call it as well


KINDS = {
    "save": Kind(save),
    "save and barrier": Kind(save_and_meet, meets=True),
    "evaluate": Kind(evaluate, everyone=True),
    "evaluate and barrier": Kind(evaluate_and_meet, everyone=True),
    "garbage collection": Kind(collect),
    "log": Kind(log),
    "restart of workers": Kind(restart, everyone=True, phase="input"),
    "at different times": Kind(save, everyone=True),
    "once": Kind(save),
    "healthy": Kind(save, promise=100),
}


def draw(name: str, seed: int) -> Pause:
    """Return what a run plants."""
    random = np.random.default_rng([seed, list(KINDS).index(name)])
    every = round(np.exp(random.uniform(*np.log(PERIODS))))
    seconds = ONCE_SECONDS if name == "once" else float(np.exp(random.uniform(*np.log(SIZES))))
    rank = None if KINDS[name].everyone else int(random.integers(RANKS))
    return Pause(name, rank, every, seconds, float(random.uniform(*WORK)))


def train(pause: Pause, folder: Path) -> int:
    """Run a rank of the job under a watch."""
    from ddpbench.watch.outputs import Settings
    from ddpbench.watch.watcher import Watcher

    rank, kind = int(os.environ["DDPBENCH_RANK"]), KINDS[pause.kind]
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):
        began = time.perf_counter()
        watcher = Watcher(Settings(output=folder))
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        model = DistributedDataParallel(nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        paused, first, last = [], 0.0, 0.0
        for step in range(pause.steps):
            time.sleep(pause.work_seconds)
            optimizer.zero_grad()
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            last = time.perf_counter()
            first = first or last
            holds = pause.holds(step, rank)
            if step + 1 < pause.steps and (holds or (kind.meets and pause.holds(step, pause.rank))):
                kind.play(pause.seconds if holds else 0.0, model.module)
                paused += [time.perf_counter() - last] if holds else []
        wall = [time.perf_counter() - began]
        watcher.close()
        wall.append(time.perf_counter() - began)
        dist.destroy_process_group()
    truth = {"paused": paused, "stepping": last - first, "wall": wall}
    (folder / f"{rank}.json").write_text(json.dumps(truth))
    return 0


# --- the verdicts ---------------------------------------------------------------------------------


def list_wrong(pause: Pause, folder: Path) -> Iterator[str]:
    """Yield what is wrong with what the watch says."""
    truth = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    (path,) = folder.glob("*/run.json")
    run = store.read(path.parent)
    watched = run.steps[0].watched
    balance = watched.balance if watched is not None else None
    least, most = truth[0]["wall"]  # before and after the watch was closed
    if balance is None or not 0.98 * least <= balance.wall_seconds <= 1.02 * most:
        yield f"{balance} of {least:.2f} to {most:.2f} s"
    elif abs(balance.stepping_seconds / truth[0]["stepping"] - 1) > 0.02:
        yield f"{balance.stepping_seconds:.2f} s of steps instead of {truth[0]['stepping']:.2f}"
    loud = [finding for finding in run.findings if finding.severity != "note"]
    ranks = [pause.rank]
    if pause.kind == "at different times":
        ranks = [*range(RANKS)]
    if pause.kind == "healthy":
        ranks = []
    found = {finding.place.get("rank"): finding for finding in loud}
    for finding in loud:
        if finding.code != "pauses" or finding.place.get("rank") not in ranks:
            yield f"not planted: {finding.sentence}"
    for rank in ranks:
        # Of what all ranks do, the slowest one's time is lost.
        those = truth if rank is None else [truth[rank]]
        paused = np.max([one["paused"] for one in those], axis=0)
        share = float(np.sum(paused)) / truth[0]["stepping"]
        if rank in found:
            place = found[rank].place
            yield from list_differences(pause, place, float(np.median(paused)), share)
        elif share >= 0.04:  # a watch warns from 3 %
            yield f"rank {rank}: not found"


def list_differences(
    pause: Pause, place: dict[str, Any], seconds: float, share: float
) -> Iterator[str]:
    """Yield how a finding differs from what was planted."""
    kind = KINDS[pause.kind]
    if place["phase"] != kind.phase:
        yield f"phase {place['phase']}"
    if abs(place["seconds"] / seconds - 1) > 0.1:
        yield f"{place['seconds'] * 1e3:.2f} ms instead of {seconds * 1e3:.2f}"
    if place["every"] != (0 if pause.kind == "once" else pause.every):
        yield f"every {place['every']}"
    if abs(place["share"] - share) > max(0.02, 0.1 * share):
        yield f"share {place['share']:.1%} instead of {share:.1%}"
    text = Path(__file__).read_text().splitlines()
    number = int(place["line"].split()[0].rpartition(":")[2] or 0) if place["line"] else 0
    if not number or not text[number - 1].endswith("# PAUSE"):
        yield f"line {place['line'] or 'unknown'}"


def run_kind(name: str, runs: int, seed: int) -> int:
    """Run all jobs of one kind; return how many were right."""
    right = 0
    for number in range(seed, seed + runs):
        pause = draw(name, number)
        with tempfile.TemporaryDirectory() as folder:
            code = forks.run(partial(train, pause, Path(folder)), RANKS)
            wrong = [f"exit code {code}"] if code else [*list_wrong(pause, Path(folder))]
        right += not wrong
        for sentence in wrong:
            print(f"{number}: {asdict(pause)}: {sentence}", flush=True)
    return right


def main() -> int:
    """Run all kinds and print the table; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description="Count the pauses that a watch finds.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds to run, with commas")
    options = parser.parse_args()
    rows, broken = [], False
    for name, kind in KINDS.items():
        if not options.only or name in options.only.split(","):
            right = run_kind(name, options.runs, options.seed)
            broken |= 100 * right < kind.promise * options.runs
            rows.append([name, options.runs, right, f"{kind.promise} of 100"])
    print(tabulate(rows, ["planted", "runs", "right", "promised"]))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
