"""Training to the end: losses and verdicts, in real ranks.

One job plays everything in all its ranks and leaves what it saw in files. A rank runs this very
file: `python test_training.py FOLDER SIZE`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from command_lines import run_command
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

from ddpbench.catalog import workloads
from ddpbench.catalog.task import RankSetup, Task, Training
from ddpbench.catalog.workloads import WORKLOADS
from ddpbench.launch import forks, placement
from ddpbench.launch.placement import Placement
from ddpbench.measure import training
from ddpbench.records.schema import Epoch
from ddpbench.runtime.meeting import Rendezvous
from ddpbench.runtime.world import World, join_world

CPU = torch.device("cpu")
SMALL = {"width": 16, "depth": 3}


@dataclass
class Bench:
    """One rank, and what a training in it is made of."""

    world: World
    tested: Any
    folder: Path
    seed: int = 3
    settings: dict[str, int] = field(default_factory=lambda: SMALL)
    rate: float = 0.002

    def setup(self, rank: int | None = None) -> RankSetup:
        """Return the setup of this rank, or of another without a group."""
        size = self.world.world_size
        if rank is None:
            return RankSetup(self.world.rank, size, 8, CPU, self.seed, self.tested)
        return RankSetup(rank, size, 8, CPU, self.seed, None)

    def task(self, rank: int | None = None) -> Task:
        """The regression."""
        return WORKLOADS["regression"].build(self.settings, self.setup(rank))

    def train(
        self, epochs: int, verify: training.Verify | None = None, task: Task | None = None
    ) -> tuple[Epoch, ...]:  # fmt: skip
        """All ranks together."""
        return training.train(
            self.world, self.tested, task or self.task(),
            lambda model: torch.optim.Adam(model.parameters(), lr=self.rate),
            epochs, verify=verify,
        )  # fmt: skip


def validated(module: nn.Module, shares: list[Training]) -> float:
    """The loss of all these samples, in float64, without a group."""
    with torch.no_grad():
        pairs = [pair for share in shares for pair, _ in share.validation]
        x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return float((module(x) - y).double().square().mean())


# --- the plays: each runs in every rank, and returns what its test looks at


def play_losses(bench: Bench) -> Any:
    """At a learning rate of 0 the weights stay, so that one process can compute what comes out."""
    bench.rate = 0.0
    task = bench.task()
    (epoch,) = bench.train(1, task=task)
    others = [bench.task(rank).training for rank in range(bench.world.world_size)]
    shares = [share for share in others if share is not None]
    total = samples = 0.0
    with torch.no_grad():
        for share in shares:
            for (x, y), size in share.batches(1):
                total += float((task.model(x) - y).double().square().sum())
                samples += size
    return {
        "got": [epoch.train_loss, epoch.validation_loss],
        "wanted": [total / samples, validated(task.model, shares)],
        "batches": [len(share.validation) for share in shares],
        "samples": samples,
        "seconds": epoch.seconds,
    }


def play_diverged(bench: Bench) -> Any:
    """A learning rate with which the loss becomes infinite, then NaN."""
    bench.rate = 1e30
    epochs = bench.train(2)
    return [[e.train_loss, e.validation_loss] for e in epochs]


def play_verified(bench: Bench) -> Any:
    """Replicas that are found to differ in one step."""
    steps: list[int] = []

    def verify(model: nn.Module, optimizer: torch.optim.Optimizer) -> training.Check:
        assert isinstance(model, DistributedDataParallel)
        assert isinstance(optimizer, torch.optim.Adam)
        return lambda step: steps.append(step) or step != workloads.STEPS + 2

    epochs = bench.train(3, verify=verify)
    return {"steps": steps, "equal": [epoch.replicas_equal for epoch in epochs]}


def play_interrupted(bench: Bench) -> Any:
    """The last rank gets SIGINT in the second epoch. The last play: the watchdog waits now."""

    def verify(*_: object) -> training.Check:
        return lambda step: step != workloads.STEPS + 1 or bool(interrupt())

    def interrupt() -> None:
        if bench.world.rank == bench.world.world_size - 1:
            os.kill(os.getpid(), signal.SIGINT)

    return [epoch.number for epoch in bench.train(4, verify=verify)]


def play_converged(bench: Bench) -> Any:
    """The regression as it is, to the end of 20 epochs."""
    workload = WORKLOADS["regression"]
    settings = {name: values["cpu"] for name, values in workload.settings.items()}
    setup = replace(bench.setup(), batch=workload.batch["cpu"])
    task = workload.build(settings, setup)
    assert task.training is not None
    whole = workload.build(settings, replace(setup, rank=0, world_size=1)).training
    assert whole is not None
    start = validated(task.model, [whole])
    epochs = training.train(
        bench.world, bench.tested, task,
        lambda model: torch.optim.Adam(model.parameters(), lr=workload.learning_rate),
        20,
    )  # fmt: skip
    return [start, *(epoch.validation_loss for epoch in epochs)]


PLAYS: dict[str, Callable[[Bench], Any]] = {
    name: play for name, play in globals().items() if name.startswith("play_")
}


def run_rank(folder: Path) -> int:
    """Run all plays in this rank."""
    torch.set_num_threads(1)
    own = placement.read_placement()
    assert isinstance(own, Placement)
    with join_world(own, Rendezvous()) as world, world.agree_group("gloo") as tested:
        names = sorted(PLAYS, key="play_interrupted".__eq__)
        outcomes = {name: PLAYS[name](Bench(world, tested, folder)) for name in names}
    (folder / f"{own.rank}.json").write_text(json.dumps(outcomes))
    return 0


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """(ranks, play) → what each rank saw; the ranks run all plays at once."""

    @cache
    def run(size: int) -> list[Any]:
        folder = tmp_path_factory.mktemp(f"ranks-{size}")
        done = run_command([*warm_python(), __file__, str(folder), str(size)], folder)
        assert done.returncode == 0, done.stderr
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]

    return lambda size, name: [one[f"play_{name}"] for one in run(size)]


Played = Callable[[int, str], list[Any]]
SIZES = pytest.mark.parametrize("size", [1, 3])


@SIZES
def test_losses_are_of_all_samples(played: Played, size: int) -> None:
    """Training and validation loss are what one process computes over the samples of all ranks,
    the same number in every rank, though the ranks have unequal shares of the validation."""
    seen = played(size, "losses")
    for one in seen:
        assert one["got"] == pytest.approx(one["wanted"], rel=1e-6)
        assert one["got"] == seen[0]["got"]
        assert one["seconds"] == seen[0]["seconds"] > 0
        assert one["samples"] == 16 * 8 * size
    if size == 3:
        assert seen[0]["batches"] == [43, 42, 42]


@SIZES
def test_a_training_that_diverges_goes_on_without_losses(played: Played, size: int) -> None:
    """A loss that is infinite or NaN is stored as unknown: no file holds such a number."""
    for one in played(size, "diverged"):
        assert one == [[None] * 2] * 2


@SIZES
def test_steps_are_verified(played: Played, size: int) -> None:
    """After each step, counted over all epochs; an epoch in which the replicas once differed says
    so."""
    for one in played(size, "verified"):
        assert one["steps"] == list(range(1, 3 * workloads.STEPS + 1))
        assert one["equal"] == [True, False, True]


@SIZES
def test_an_interrupted_rank_ends_all(played: Played, size: int) -> None:
    """After the epoch, in all ranks."""
    assert played(size, "interrupted") == [[1, 2]] * size


@SIZES
def test_regression_converges(played: Played, size: int) -> None:
    """On any number of ranks the validation loss falls below a tenth of what it was before the
    training, and of what it was after the first epoch."""
    for start, first, *_, last in played(size, "converged"):
        assert last < 0.1 * first < start


def test_other_tasks_do_not_train() -> None:
    """A task without a training is refused before anything is made."""
    task = WORKLOADS["linear"].build({}, RankSetup(0, 1, 2, CPU, 0, None))
    with pytest.raises(ValueError, match="cannot be trained"):
        training.train(mock.Mock(), mock.Mock(), task, mock.Mock(), 1)


if __name__ == "__main__":
    sys.exit(forks.run(lambda: run_rank(Path(sys.argv[1])), int(sys.argv[2])))
