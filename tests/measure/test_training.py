"""Training to the end: losses, checkpoints and resumption, in real ranks.

One job plays everything in all its ranks and leaves what it saw in files. A rank runs this very
file: `python test_training.py FOLDER SIZE PLAY…`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import mpi_jobs
import psutil
import pytest
import torch
import torch.distributed as dist
from frozen import Frozen
from patience import PATIENCE_SECONDS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

from ddpbench.catalog import workloads
from ddpbench.catalog.task import RankSetup, Task, Training
from ddpbench.catalog.workloads import WORKLOADS
from ddpbench.launch.placement import Placement, Refused
from ddpbench.measure import training
from ddpbench.records.load import Load
from ddpbench.records.schema import Epoch
from ddpbench.runtime.meeting import Rendezvous
from ddpbench.runtime.world import World, join_world

CPU = torch.device("cpu")
SMALL = {"width": 16, "depth": 3}


FULL = "No space left on device"  # the words of the kernel


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
        self, epochs: int, checkpoint: str | None = None, resume: bool = False,
        verify: training.Verify | None = None, seen: Callable[[Epoch], Any] = str,
        task: Task | None = None,
    ) -> tuple[Epoch, ...]:  # fmt: skip
        """All ranks together."""
        path = self.folder / checkpoint if checkpoint else None
        return training.train(
            self.world, self.tested, task or self.task(),
            lambda model: torch.optim.Adam(model.parameters(), lr=self.rate),
            epochs, checkpoint=path, resume=resume, verify=verify, report=seen,
        )  # fmt: skip

    def refusal(self, *arguments: Any, **more: Any) -> str:
        """The sentence with which this rank's training is refused."""
        try:
            self.train(*arguments, **more)
        except Refused as refused:
            return str(refused)
        return "not refused"


def losses(epochs: tuple[Epoch, ...]) -> list[Any]:
    """What must be the same bit for bit."""
    return [[e.number, e.train_loss.hex(), e.validation_loss.hex()] for e in epochs]


def validated(module: nn.Module, shares: list[Training]) -> float:
    """The loss of all these samples, in float64, without a group."""
    with torch.no_grad():
        pairs = [pair for share in shares for pair, _ in share.validation]
        x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return float((module(x) - y).double().square().mean())


# --- the plays: each runs in every rank, and returns what its test looks at


def play_resumed(bench: Bench) -> Any:
    """Four epochs at once, and in three goes with other random numbers drawn between."""
    one, other = bench.task(), bench.task()
    whole = bench.train(4, task=one)
    torch.rand(3)
    parts = bench.train(1, "resumed.pt")
    torch.rand(3)
    parts += bench.train(2, "resumed.pt", resume=True)
    parts += bench.train(4, "resumed.pt", resume=True, task=other)
    weights = [bytes(nn.utils.parameters_to_vector(task.model.parameters()).detach()
                     .view(torch.uint8).tolist()).hex() for task in (one, other)]  # fmt: skip
    return {"whole": losses(whole), "parts": losses(parts), "weights": weights}


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
        "parts": epoch.train_losses,
        "load": asdict(epoch.load or Load(0.0, 0.0, 0)),
        "resident": psutil.Process().memory_info().rss,
    }


def play_diverged(bench: Bench) -> Any:
    """A learning rate with which the loss becomes infinite, then NaN."""
    bench.rate = 1e30
    epochs = bench.train(2)
    return [[e.train_loss, e.validation_loss, e.train_losses[-1]] for e in epochs]


def play_start(bench: Bench) -> Any:
    """What comes before the first epoch leaves weights, buffers and random state as they are."""
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[1].running_mean += bench.world.rank
    replica = DistributedDataParallel(model, process_group=bench.tested)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    once = Training(lambda _: iter([(torch.ones(4, 2), 4)]), (), {})
    task = Task(model, lambda step: None, lambda model, batch: model(batch).square().mean(), once)
    training._build_buckets(replica, task, once)
    return {
        "same": all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        "random": torch.equal(random, torch.get_rng_state()),
        "gradients": [p.grad is None for p in model.parameters()],
    }


def play_verified(bench: Bench) -> Any:
    """Replicas that are found to differ in one step, over a resumption."""
    steps: list[int] = []

    def verify(model: nn.Module, optimizer: torch.optim.Optimizer) -> training.Check:
        assert isinstance(model, DistributedDataParallel)
        assert isinstance(optimizer, torch.optim.Adam)
        return lambda step: steps.append(step) or step != workloads.STEPS + 2

    epochs = bench.train(1, "verified.pt", verify=verify)
    epochs += bench.train(3, "verified.pt", resume=True, verify=verify)
    return {"steps": steps, "equal": [epoch.replicas_equal for epoch in epochs]}


def play_seen(bench: Bench) -> Any:
    """Epochs are told one by one, with the checkpoint there."""
    path, told = bench.folder / "seen.pt", []

    def seen(epoch: Epoch) -> None:
        dist.barrier()
        stored = torch.load(path, weights_only=True)
        told.append([epoch.number, stored["epoch"], stored["step"]])
        dist.barrier()

    bench.train(2, "seen.pt", seen=seen)
    dist.barrier()
    left = [path.name for path in bench.folder.glob(".*")]
    return {"told": told, "left": left}


def play_refused(bench: Bench) -> Any:
    """What a checkpoint can have against being gone on from, by name."""
    if bench.world.rank == 0:
        (bench.folder / "text.pt").write_text("no checkpoint")
        (bench.folder / "empty.pt").write_bytes(b"")
        torch.save({"weights": torch.ones(3)}, bench.folder / "foreign.pt")
    bench.train(1, "good.pt")
    if bench.world.rank == 0:
        content = (bench.folder / "good.pt").read_bytes()
        (bench.folder / "half.pt").write_bytes(content[: len(content) // 2])
        stored = torch.load(bench.folder / "good.pt", weights_only=True)
        stored["model"].popitem()
        torch.save(stored, bench.folder / "lacking.pt")
    again = {"resume": True}
    names = ("missing", "text", "empty", "foreign", "half", "lacking")
    told = {name: bench.refusal(2, f"{name}.pt", **again) for name in names}
    told["done"] = bench.refusal(1, "good.pt", **again)
    told["width"] = replace(bench, settings={**SMALL, "width": 8}).refusal(2, "good.pt", **again)
    told["seed"] = replace(bench, seed=4).refusal(2, "good.pt", **again)
    told["rate"] = replace(bench, rate=0.5).refusal(2, "good.pt", **again)
    told["folder"] = bench.refusal(2, "none/good.pt")
    return told


def play_full_disk(bench: Bench) -> Any:
    """The disk is full after a few bytes, when the second epoch is to be saved."""
    bench.train(1, "full.pt")

    def write(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, FULL, str(path))

    with mock.patch.object(Path, "write_bytes", write):
        told = bench.refusal(2, "full.pt", resume=True)
    dist.barrier()
    stored = torch.load(bench.folder / "full.pt", weights_only=True)
    return {"told": told, "epoch": stored["epoch"], "left": len(list(bench.folder.glob(".full*")))}


def play_interrupted(bench: Bench) -> Any:
    """The last rank gets SIGINT after the second epoch. The last play: the watchdog waits now."""

    def seen(epoch: Epoch) -> None:
        if epoch.number == 2 and bench.world.rank == bench.world.world_size - 1:
            os.kill(os.getpid(), signal.SIGINT)

    epochs = bench.train(4, "interrupted.pt", seen=seen)
    stored = torch.load(bench.folder / "interrupted.pt", weights_only=True)
    return {"trained": [epoch.number for epoch in epochs], "stored": stored["epoch"]}


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


def job(folder: Path, rank: int, size: int, *names: str) -> None:
    """These plays, in one of the ranks."""
    torch.set_num_threads(1)
    place = Placement("torchrun", rank, size, rank, size)
    outcomes: dict[str, Any] = {}
    meeting = Rendezvous(f"file://{folder / 'store'}", timeout_seconds=60)
    with join_world(place, meeting) as world, world.agree_group("gloo") as tested:
        for name in names:
            try:
                outcomes[name] = PLAYS[name](Bench(world, tested, folder))
            except Exception:
                outcomes[name] = traceback.format_exc()
                break
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """(ranks, play) → what each rank saw; the ranks play all there is at once."""

    @cache
    def run(size: int) -> list[Any]:
        folder = tmp_path_factory.mktemp(f"ranks-{size}")
        names = sorted(PLAYS, key="play_interrupted".__eq__)
        words = [*warm_python(), __file__, str(folder), str(size), *names]
        ranks = subprocess.Popen(
            words, env=mpi_jobs.ENVIRONMENT, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            said = ranks.communicate(timeout=PATIENCE_SECONDS)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
        paths = [folder / f"{rank}.json" for rank in range(size)]
        assert all(path.exists() for path in paths), said
        return [json.loads(path.read_text()) for path in paths]

    def outcomes(size: int, name: str) -> list[Any]:
        seen = [one.get(f"play_{name}", one) for one in run(size)]
        assert not any("Traceback" in str(one) for one in seen), "\n".join(map(str, seen))
        return seen

    return outcomes


Played = Callable[[int, str], list[Any]]
SIZES = pytest.mark.parametrize("size", [1, 3])


@SIZES
def test_resuming_changes_no_bit(played: Played, size: int) -> None:
    """Losses and final weights of a training that was resumed twice are those of one that was not,
    in every rank."""
    seen = played(size, "resumed")
    first = seen[0]
    assert [number for number, *_ in first["whole"]] == [1, 2, 3, 4]
    assert first["parts"] == first["whole"]
    assert len({loss for _, *both in first["whole"] for loss in both}) == 8
    assert len({weights for one in seen for weights in one["weights"]}) == 1
    assert all(one["whole"] == one["parts"] == first["whole"] for one in seen)


@SIZES
def test_losses_are_of_all_samples(played: Played, size: int) -> None:
    """Training and validation loss are what one process computes over the samples of all ranks,
    the same number in every rank, though the ranks have unequal shares of the validation."""
    seen = played(size, "losses")
    for one in seen:
        assert one["got"] == pytest.approx(one["wanted"], rel=1e-6)
        assert one["got"] == seen[0]["got"]
        assert one["seconds"] == seen[0]["seconds"] > 0
        assert one["samples"] == 16 * 8 * size - (size == 1)
    if size == 3:
        assert seen[0]["batches"] == [43, 42, 42]


@SIZES
def test_an_epoch_has_losses_of_its_steps_and_a_load(played: Played, size: int) -> None:
    """The epoch's 16 steps have a loss each, whose mean is the epoch's; memory is that of the rank
    that has most. All ranks have the same record."""
    seen = played(size, "losses")
    for one in seen:
        assert len(one["parts"]) == workloads.STEPS
        assert sum(one["parts"]) / workloads.STEPS == pytest.approx(one["got"][0], rel=0.01)
        assert (one["parts"], one["load"]) == (seen[0]["parts"], seen[0]["load"])
        assert 0 < one["load"]["cpu_cores"] <= one["load"]["most_cpu_cores"]
        assert one["load"]["memory_nbytes"] == pytest.approx(one["resident"], rel=0.2)
        assert one["load"]["gpu_share"] is None


@SIZES
def test_a_training_that_diverges_goes_on_without_losses(played: Played, size: int) -> None:
    """A loss that is infinite or NaN is stored as unknown: no file holds such a number."""
    for one in played(size, "diverged"):
        assert one == [[None] * 3] * 2


@SIZES
def test_the_start_leaves_no_trace(played: Played, size: int) -> None:
    """The backward that makes DDP sort its buckets changes neither weights, buffers, gradients nor
    random state."""
    for one in played(size, "start"):
        assert one == {"same": True, "random": True, "gradients": [True] * 4}


@SIZES
def test_steps_are_verified(played: Played, size: int) -> None:
    """After each step, counted over all epochs, resumed ones too; an epoch in which the replicas
    once differed says so."""
    for one in played(size, "verified"):
        assert one["steps"] == list(range(1, 3 * workloads.STEPS + 1))
        assert one["equal"] == [True, False, True]


@SIZES
def test_each_epoch_is_told_and_kept(played: Played, size: int) -> None:
    """In order, in every rank, when its checkpoint is there; nothing else is left in the folder."""
    for one in played(size, "seen"):
        assert one == {"told": [[1, 1, 16], [2, 2, 32]], "left": []}


REFUSED = ["missing", "foreign", "done", "width", "seed", "rate", "folder"]
# The reason is in torch's own words.
DAMAGED = {"text": "damaged", "empty": "damaged", "half": "damaged", "lacking": "another model"}


@SIZES
@pytest.mark.parametrize("case", [*REFUSED, *DAMAGED])
def test_a_bad_checkpoint_is_one_sentence(
    played: Played, size: int, case: str, frozen: Frozen
) -> None:
    """All ranks together refuse, with the same sentence; none waits for another."""
    (told,) = {one[case] for one in played(size, "refused")}
    assert "\n" not in told
    if case in DAMAGED:
        assert f"{case}.pt is " in told
        assert DAMAGED[case] in told
    else:
        frozen.text(re.sub(r"/\S+/ranks-\d+/", "", told))


@SIZES
def test_a_full_disk_is_one_sentence(played: Played, size: int) -> None:
    """In all ranks; the checkpoint before stays, and nothing half-written."""
    for one in played(size, "full_disk"):
        assert FULL in one["told"]
        assert "epoch 2" in one["told"]
        assert (one["epoch"], one["left"]) == (1, 0)


@SIZES
def test_an_interrupted_rank_ends_all(played: Played, size: int) -> None:
    """After the epoch, in all ranks, with that epoch's checkpoint."""
    for one in played(size, "interrupted"):
        assert one == {"trained": [1, 2], "stored": 2}


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


def main(folder: Path, size: int, *names: str) -> None:
    """All ranks, forked from one process: importing torch each time would take longest."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=job, args=(folder, rank, size, *names)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
