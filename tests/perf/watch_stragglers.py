"""Whether a watch finds planted stragglers, and finds none in healthy jobs.

    ./run_bench.sh python tests/perf/watch_stragglers.py [--runs N] [--seed S] [--only KIND,…]

Each run is a real job: four ranks, DDP on gloo, steps of about 0.1 s that are mostly sleep, so that
two cores suffice. Rank, phase and size are drawn anew: 5 to 50 % of a step. A run is right if the
findings above a note are the planted faults and no others, with rank, phase, size within 10 %,
period, and the first step within three. Exits with 1 when fewer are right than promised.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from torch.utils.data import DataLoader, Dataset

from ddpbench.launch import forks

RANKS = 4
PHASES = ("input", "forward", "backward", "optimizer")
SLEEPS = (0.010, 0.030, 0.040, 0.010)  # seconds in each phase of all ranks
STEP_SECONDS = 0.1  # about
STEPS = 72
LATE_BY = 3  # steps, by which the first late step may be off
LATE_BY_SECONDS = 1.0


@dataclass(frozen=True)
class Fault:
    """More sleep of one rank in one phase."""

    rank: int
    phase: str
    seconds: float
    every: int = 1
    since: int = 0

    def holds(self, step: int) -> bool:
        """Whether the rank is late in this step."""
        return step >= self.since and step % self.every == 0


@dataclass(frozen=True)
class Kind:
    """What is planted, and how many of 100 runs must be right."""

    faults: int
    promise: int
    least: float = 0.05  # of a step
    every: int = 1
    since: int = 0
    phases: tuple[str, ...] = PHASES
    buffers: bool = False  # that DDP broadcasts in forward
    share: float = 1.0  # of --runs


KINDS = {
    "straggler": Kind(1, 95),
    "healthy": Kind(0, 100),
    "two stragglers": Kind(2, 90, 0.1, share=0.2),
    "every fifth step": Kind(1, 90, 0.2, every=5, share=0.2),
    "late halfway": Kind(1, 90, 0.1, since=STEPS // 2, share=0.2),
    "late input, buffers broadcast in forward": Kind(
        1, 90, phases=("input",), buffers=True, share=0.2
    ),
    "healthy, buffers broadcast in forward": Kind(0, 100, buffers=True, share=0.2),
}


def draw_faults(kind: Kind, seed: int) -> list[Fault]:
    """Return what a run plants."""
    draw = np.random.default_rng(seed)
    return [
        Fault(
            int(rank),
            kind.phases[draw.integers(len(kind.phases))],
            STEP_SECONDS * draw.uniform(kind.least, 0.5),
            kind.every,
            kind.since,
        )
        for rank in draw.permutation(RANKS)[: kind.faults]
    ]


# --- the job --------------------------------------------------------------------------------------


class Pace:
    """How long this rank sleeps in each phase of the current step."""

    def __init__(self, rank: int, faults: Sequence[Fault]) -> None:
        self.step, self._faults = 0, [fault for fault in faults if fault.rank == rank]

    def sleep(self, phase: str) -> None:
        """Sleep as long as this phase takes."""
        late = sum(f.seconds for f in self._faults if f.phase == phase and f.holds(self.step))
        time.sleep(SLEEPS[PHASES.index(phase)] + late)


class Data(Dataset[Tensor]):
    """Batches that take time to load."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        self._pace.sleep("input")
        return torch.ones(16, 64) * index


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
    """A small MLP that takes time."""

    def __init__(self, pace: Pace, buffers: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 1)
        self.norm = nn.BatchNorm1d(64) if buffers else nn.Identity()
        self._pace = pace

    def forward(self, batch: Tensor) -> Tensor:
        """Return a loss for each sample."""
        self._pace.sleep("forward")
        hidden = self.norm(self.first(batch))
        return self.last(SlowBackward.apply(hidden, self._pace))


class SlowSgd(torch.optim.SGD):
    """SGD whose steps take time."""

    pace: Pace

    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        self.pace.sleep("optimizer")
        return super().step(closure)


def train(faults: Sequence[Fault], buffers: bool, path: Path) -> int:
    """Run a rank of the job under a watch; rank 0 stores its last report."""
    from ddpbench.watch.outputs import Settings
    from ddpbench.watch.watcher import Watcher

    rank = int(os.environ["DDPBENCH_RANK"])
    torch.set_num_threads(1)
    sys.stderr = errors = io.StringIO()
    report: dict[str, Any] = {}
    watcher = Watcher(Settings(output=None, on_report=report.update))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    pace = Pace(rank, faults)
    model = DistributedDataParallel(Model(pace, buffers))
    optimizer = SlowSgd(model.parameters(), lr=1e-3)
    optimizer.pace = pace
    began = []
    for step, batch in enumerate(DataLoader(Data(pace), batch_size=None)):
        began.append(time.time())
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        pace.step = step + 1
    watcher.close()
    if rank == 0:
        report |= {"began": began, "errors": errors.getvalue()}
        path.write_text(json.dumps(report))
    dist.destroy_process_group()
    return 0


# --- the verdicts ---------------------------------------------------------------------------------


def list_wrong(
    faults: Sequence[Fault], findings: Sequence[dict[str, Any]], began: Sequence[float]
) -> Iterator[str]:
    """Yield what is wrong with the findings on these faults. began: time of each step."""
    loud = [finding for finding in findings if finding["severity"] != "note"]
    places = {finding["place"].get("rank"): finding["place"] for finding in loud}
    planted = {fault.rank for fault in faults}
    for finding in loud:
        if finding["place"].get("rank") not in planted:
            yield f"not planted: {finding['sentence']}"
    for fault in faults:
        place = places.get(fault.rank)
        if place is None or "seconds" not in place:
            yield f"{fault}: not found"
        else:
            yield from (f"{fault}: {wrong}" for wrong in list_differences(fault, place, began))


def list_differences(fault: Fault, place: dict[str, Any], began: Sequence[float]) -> Iterator[str]:
    """Yield how a finding differs from its fault."""
    if place["phase"] != fault.phase:
        yield f"phase {place['phase']}"
    if abs(place["seconds"] / fault.seconds - 1) > 0.1:
        yield f"{place['seconds'] * 1e3:.2f} ms"
    if place["every"] != fault.every:
        yield f"every {place['every']}"
    if "until_step" in place:
        yield f"until step {place['until_step']}"
    since = place.get("since_step")
    if (since is None) != (fault.since == 0):
        yield f"since {since}"
    elif since is not None:
        seconds = place["since"] - began[fault.since]
        if abs(since - fault.since) > LATE_BY or abs(seconds) > LATE_BY_SECONDS:
            yield f"since step {since}, {seconds:+.2f} s"


@dataclass
class Result:
    """The runs of one kind."""

    runs: int = 0
    right: int = 0
    sizes: tuple[float, ...] = ()  # found / planted
    steps: tuple[float, ...] = ()  # seconds


def run_once(kind: Kind, seed: int, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Run a job; return what is wrong with its report, and the report."""
    faults, path = draw_faults(kind, seed), folder / f"{seed}.json"
    code = forks.run(partial(train, faults, kind.buffers, path), RANKS)
    if code or not path.exists():
        return [f"the job ended with code {code}"], {}
    report = json.loads(path.read_text())
    if "findings" not in report:
        return [f"no report: {report['errors']}"], report
    wrong = list(list_wrong(faults, report["findings"], report["began"]))
    places = {f["place"].get("rank"): f["place"] for f in report["findings"]}
    report["sizes"] = [
        places[fault.rank]["seconds"] / fault.seconds
        for fault in faults
        if "seconds" in places.get(fault.rank, {})
    ]
    return wrong, report


def run_kind(name: str, runs: int, seed: int, tell: Callable[[str], None]) -> Result:
    """Run all jobs of one kind."""
    kind, result = KINDS[name], Result()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(1, round(runs * kind.share))):
            wrong, report = run_once(kind, seed + number, Path(folder))
            result.runs += 1
            result.right += not wrong
            result.sizes += tuple(report.get("sizes", ()))
            if "began" in report:
                result.steps += (float(np.median(np.diff(report["began"]))),)
            for sentence in wrong:
                tell(f"{name}, seed {seed + number}: {sentence}")
            if errors := report.get("errors", "").partition("watch of rank")[2]:
                tell(f"{name}, seed {seed + number}: watch of rank{errors}")
    return result


def main() -> int:
    """Run all kinds and print the table; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description="Count the stragglers that a watch finds.")
    parser.add_argument("--runs", type=int, default=100, help="runs of the first two kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="words in the kinds to run, with commas")
    options = parser.parse_args()
    rows, broken = [], False
    for name, kind in KINDS.items():
        if options.only and not any(word in name for word in options.only.split(",")):
            continue
        result = run_kind(name, options.runs, options.seed, partial(print, flush=True))
        broken |= 100 * result.right < kind.promise * result.runs
        spread = np.percentile(result.sizes, [5, 50, 95]) if result.sizes else []
        rows.append(
            [
                name,
                result.runs,
                result.right,
                f"{kind.promise} of 100",
                f"{np.median(result.steps) * 1e3:.1f}" if result.steps else "",
                " ".join(f"{value:.3f}" for value in spread),
            ]
        )
    heads = ["planted", "runs", "right", "promised", "step ms", "size found / planted: 5, 50, 95 %"]
    print(tabulate(rows, heads))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
