"""Steps of models divided over a mesh: they learn what one process learns on the joined batch.

Four ranks over gloo take the steps of all cases and leave their losses in files. They run this very
file: `python test_parallel_steps.py FOLDER`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import run_command
from frozen import Frozen
from stored_steps import a_step_case
from torch import Tensor
from warm_python import warm_python

from ddpbench.catalog.parallel import WAYS
from ddpbench.catalog.task import RankSetup, Task
from ddpbench.catalog.workloads import WORKLOADS
from ddpbench.launch import placement, starters
from ddpbench.launch.placement import Placement
from ddpbench.measure.communication import SCATTERS
from ddpbench.measure.sharded_step import (
    agree_meshes,
    build_sharded,
    find_refusal,
)
from ddpbench.measure.step import Marks
from ddpbench.records.schema import StepCase
from ddpbench.runtime.world import World, join_world

CPU = torch.device("cpu")
RANKS, STEPS, RATE = 4, 3, 0.1
SETTINGS = {
    "transformer": {"layers": 2, "width": 128, "sequence": 8, "vocabulary": 32},
    "mlp": {"width": 16, "depth": 5},
}


@dataclass(frozen=True)
class Job:
    """One case: a workload in a way of parallel training."""

    way: str
    mesh: tuple[int, ...]
    workload: str = "transformer"
    accumulate: int = 1
    prefetch: bool = True
    reshard: bool = True

    @property
    def case(self) -> StepCase:
        """The case of a step."""
        shards = WAYS[self.way].shards
        return a_step_case(
            workload=self.workload,
            parallel=self.way,
            mesh=self.mesh,
            accumulate=self.accumulate,
            world_size=RANKS,
            prefetch=self.prefetch if shards else None,
            reshard_after_forward=self.reshard if shards else None,
        )


JOBS = {
    "fsdp": Job("fsdp", (4,)),
    "fsdp, two micro-batches": Job("fsdp", (4,), accumulate=2),
    "fsdp, no prefetch, no reshard": Job("fsdp", (4,), prefetch=False, reshard=False),
    "hsdp": Job("hsdp", (2, 2)),
    "hsdp, one replica": Job("hsdp", (1, 4), "mlp"),
    "tp": Job("tp", (4,), "mlp"),
    "fsdp+tp": Job("fsdp+tp", (2, 2)),
}


def make_task(job: Job, rank: int, ranks: int, whole: bool) -> Task:
    """The workload in one rank of those with batches of their own."""
    setup = RankSetup(rank, ranks, 2, CPU, seed=3, group=None, whole=whole)
    return WORKLOADS[job.workload].build(SETTINGS[job.workload], setup)


# --- in the ranks ---------------------------------------------------------------------------------


def train(world: World, group: Any, job: Job) -> dict[str, Any]:
    """Take the steps. Return the losses."""
    with contextlib.ExitStack() as closing:
        meshes = agree_meshes(
            world, WAYS[job.way], job.mesh,
            torch_name="gloo", whole=group, device=CPU, closing=closing,
        )  # fmt: skip
        sharing, plan = meshes.ranks_per_batch, WORKLOADS[job.workload].plan
        assert plan is not None
        task = make_task(job, world.rank // sharing, RANKS // sharing, whole=False)
        replica = build_sharded(
            task, job.case, plan, RATE, mesh=meshes.tested, device=CPU, group=group
        )
        losses = []
        for _ in range(STEPS):
            replica.choose_arm("ddp")
            replica.step(replica.batches(), Marks(CPU).mark)
            assert replica.loss is not None
            losses.append(float(replica.loss))
        return {"losses": losses}


def try_averages(world: World, group: Any) -> dict[str, str | None]:
    """What is said of ways on gloo; and if its reduce_scatter sums, as torch 2.7's does."""
    seen = {}
    with contextlib.ExitStack() as closing:
        for name, sums in (("fsdp", False), ("hsdp", False), ("fsdp+tp", True), ("tp", True)):
            meshes = agree_meshes(
                world, WAYS[name], (4,) if len(WAYS[name].dimensions) == 1 else (2, 2),
                torch_name="gloo", whole=group, device=CPU, closing=closing,
            )  # fmt: skip
            with pytest.MonkeyPatch.context() as patch:
                for call in SCATTERS if sums else ():
                    if hasattr(dist, call):
                        patch.setattr(dist, call, _make_sum(getattr(dist, call)))
                seen[name] = find_refusal(world, meshes, "gloo")
    return seen


def _make_sum(real: Any) -> Any:
    def reduce_scatter(output: Tensor, whole: Tensor, op: Any, group: Any) -> None:
        real(output, whole, op=dist.ReduceOp.SUM, group=group)

    return reduce_scatter


def play(folder: Path) -> int:
    """Take the steps of all cases in this rank."""
    place = placement.read_placement()
    assert isinstance(place, Placement)
    torch.set_num_threads(1)
    with join_world(place) as world, world.agree_group("gloo") as group:
        seen: dict[str, Any] = {name: train(world, group, job) for name, job in JOBS.items()}
        seen["averages"] = try_averages(world, group)
    (folder / f"rank-{place.rank}").write_text(json.dumps(seen))
    return 0


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank left."""
    folder = tmp_path_factory.mktemp("parallel")
    done = run_command([*warm_python(), __file__, str(folder)], folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(RANKS)]


def train_alone(job: Job) -> list[float]:
    """Return the loss of each step of one process on the joined batches of all ranks."""
    ranks = job.case.data_ranks
    tasks = [make_task(job, rank, ranks, whole=True) for rank in range(ranks)]
    model, losses = tasks[0].model, []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(job.accumulate):
            parts = [task.batch(step * job.accumulate + micro) for task in tasks]
            batch = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
            loss: Tensor = tasks[0].loss(model, batch)
            (loss / job.accumulate).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", JOBS)
def test_the_ranks_learn_what_one_process_learns_on_the_joined_batch(
    seen: list[Any], name: str
) -> None:
    """The mean loss of the ranks is that of one process in each of three steps, so that weights,
    batches, gradients and accumulation are right; ranks along tp have one loss."""
    job = JOBS[name]
    losses = torch.tensor([rank[name]["losses"] for rank in seen], dtype=torch.float64)
    assert losses.mean(0).tolist() == pytest.approx(train_alone(job), rel=2e-5)
    first, second = losses[0], losses[-1]
    assert torch.equal(first, second) == (job.case.data_ranks == 1)


def test_a_backend_that_sums_in_place_of_averaging_is_refused(
    seen: list[Any], frozen: Frozen
) -> None:
    """The trial looks at the result: reduce_scatter of torch 2.7's gloo does not raise. All ranks
    say the same; where no gradient is averaged, nothing is tried."""
    said = seen[0]["averages"]
    assert said["fsdp"] is said["hsdp"] is said["tp"] is None
    frozen.text(said["fsdp+tp"].replace(str(torch.__version__), "VERSION"))
    assert [rank["averages"] for rank in seen] == [said] * RANKS


if __name__ == "__main__":
    sys.exit(starters.run_forked(lambda: play(Path(sys.argv[1])), RANKS))
