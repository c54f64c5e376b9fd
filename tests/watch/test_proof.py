"""Replicas are compared while a job trains: in real ranks, with a real observer."""

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import run_command
from frozen import Frozen
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from warm_python import warm_python

from ddpbench.launch import starters
from ddpbench.watch import proof
from ddpbench.watch.observe.phases import Observer
from ddpbench.watch.observe.steps import Marks

pytestmark = pytest.mark.thorough
Change = Callable[[int, nn.Module], object]


def train(rank: int, steps: int, change: Change, every: int, model: nn.Module) -> dict[str, Any]:
    """Train for some steps, each after a change; return what a proof has found."""
    observer = Observer(Marks(), errors.append)
    watched = proof.Proof(every, observer, f"proof/{next(trainings)}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.ones(4, 8) * (rank + 1)
    for step in range(steps):
        change(step, model)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()
    found = watched.list_findings(dist.get_rank(), ended=False)
    return {"findings": [asdict(each) for each in found if each.code != proof.COMPARED]}


def facts(findings: list[dict[str, Any]]) -> list[list[Any]]:
    """Return severity, code and place of stored findings."""
    return [[finding[name] for name in ("severity", "code", "place")] for finding in findings]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


errors: list[Exception] = []
trainings = itertools.count()


def run_rank(folder: Path) -> int:
    """Play all jobs, one after the other, and store what each found in this rank."""
    rank = int(os.environ["DDPBENCH_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)

    proof.FREE_SECONDS = 60.0

    def leave_alone(step: int, model: nn.Module) -> None: ...

    results = dict[str, dict[str, Any]]()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    mesh = DeviceMesh.from_group(alone, "cpu", mesh_dim_names=("dp_shard",))
    results["apart"] = train(rank, 4, leave_alone, 2, fully_shard(make_model(), mesh=mesh))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}

    def flip_bias(step: int, model: nn.Module) -> None:
        if (rank, step) == (1, 2):
            model.get_parameter("1.bias").to_local().detach().view(torch.int32)[3] ^= 1 << 20

    results["tensor parallel"] = train(
        0, 4, flip_bias, 2, parallelize_module(make_model(), mesh, plan)
    )
    keys: list[int] = []

    def count_keys(step: int, model: nn.Module) -> None:
        dist.barrier()
        keys.append(distributed_c10d._get_default_store().num_keys())
        dist.barrier()

    train(rank, 6, count_keys, 1, make_model())
    results["stored"] = {"keys": keys}
    other = nn.Sequential(nn.Linear(8, 8 - rank))
    proof.FREE_SECONDS = 0.1
    results["uncommon"] = train(0, 4, leave_alone, 2, other)
    # From here on there are no collective calls: rank 1 takes fewer steps.
    dist.barrier()

    def wait_briefly(step: int, model: nn.Module) -> None:
        proof.FREE_SECONDS = 60.0 if step < 3 else 0.1  # rank 1 takes step 2, and is late perhaps

    results["uneven"] = train(0, 7 - 4 * rank, wait_briefly, 2, make_model())
    results["errors"] = {"errors": [repr(error) for error in errors]}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
    return 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found in all jobs."""
    folder = tmp_path_factory.mktemp("proof")
    done = run_command([*warm_python(), __file__, str(folder)], folder)
    assert done.returncode == 0, done.stderr
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["errors"]["errors"] for one in results] == [[], []]
    return results


def test_the_store_does_not_grow_with_the_comparisons(results: list[dict[str, Any]]) -> None:
    """The keys of one comparison are left in it, however many there were."""
    for one in results:
        first, *later = one["stored"]["keys"]
        assert set(later) == {first + 3}


def test_a_mesh_of_some_ranks_is_proved_in_those_ranks(
    frozen: Frozen, results: list[dict[str, Any]]
) -> None:
    """Each rank trains a model of its own on a mesh of its own: no rank waits for the other, and
    there is no alarm."""
    for one in results:
        frozen.facts(facts(one["apart"]["findings"]))


def test_a_bias_that_tensor_parallelism_leaves_whole_is_proved(
    frozen: Frozen, results: list[dict[str, Any]]
) -> None:
    """A bit of it that flips in rank 1 is an error with the coordinate of a rank."""
    (finding,) = results[0]["tensor parallel"]["findings"]
    frozen.facts(facts([finding]))
    assert "tp=1" in finding["sentence"]


def test_an_uneven_number_of_steps_ends_the_comparison_and_not_the_job(
    frozen: Frozen, results: list[dict[str, Any]]
) -> None:
    """A rank that waits alone gives up after the deadline, and warns."""
    (finding,) = results[0]["uneven"]["findings"]
    frozen.facts(facts([finding]))
    assert "step 3" in finding["sentence"]


def test_a_model_of_one_rank_alone_is_not_compared(
    frozen: Frozen, results: list[dict[str, Any]]
) -> None:
    """Models that differ in their shapes are a warning; no rank waits long for another."""
    (finding,) = results[0]["uncommon"]["findings"]
    frozen.facts([finding["severity"], finding["code"]])


if __name__ == "__main__":
    sys.exit(starters.run_forked(lambda: run_rank(Path(sys.argv[1])), 2, ("torch.distributed",)))
