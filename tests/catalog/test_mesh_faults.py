"""Faults of models divided over a mesh: planted in real ranks, they change what they say, there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import run_command
from frozen import Frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from warm_python import warm_python

from ddpbench.catalog import faults
from ddpbench.catalog.step_faults import read_local
from ddpbench.launch import forks

RANKS = 4


def make_replica(way: str) -> Any:
    """Return a replica of four ranks, as the commands make it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh: DeviceMesh
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(model, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return SimpleNamespace(module=model, mesh=mesh, optimizer=optimizer, steps=0)


def train(way: str, fault: str, steps: int = 3) -> list[dict[str, list[float]]]:
    """Train with a fault; return what this rank holds of each parameter after each step."""
    replica, planted = make_replica(way), faults.parse(fault)
    rank, held = dist.get_rank(), []
    assert planted.objection(replica, RANKS) is None
    batch = torch.ones(2, 8) * (1 if way == "tp" else rank + 1)
    for _ in range(steps):
        replica.steps += 1
        planted.act(replica, rank, RANKS, before=True)
        replica.module(batch).square().mean().backward()
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        planted.act(replica, rank, RANKS, before=False)
        parameters = replica.module.named_parameters()
        held.append({name: read_local(p.data).flatten().tolist() for name, p in parameters})
    return held


JOBS = {
    "other-seed": ("hsdp", "other-seed:rank=3"),
    "missed-sync": ("hsdp", "missed-sync:rank=3,step=2"),
    "one-rank-update": ("tp", "one-rank-update:rank=2,step=2"),
    "flipped-shard": ("hsdp", "flipped-shard:rank=3,step=2"),
}


def run_rank(folder: Path) -> int:
    """Train all jobs, one after the other, and store what this rank held."""
    rank = int(os.environ["DDPBENCH_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    all_reduce = dist.all_reduce
    results: dict[str, Any] = {name: train(*job) for name, job in JOBS.items()}
    results["restored"] = dist.all_reduce is all_reduce
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
    return 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks held in all jobs."""
    if torch.__version__ < "2.9":
        pytest.skip("gloo of this torch cannot average, which HSDP needs")
    folder = tmp_path_factory.mktemp("faults")
    done = run_command([*warm_python(), __file__, str(folder)], folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def compare(results: list[dict[str, Any]], job: str, one: int, other: int) -> list[list[str]]:
    """Return the names of the parameters of which two ranks hold different parts, step by step."""
    pairs = zip(results[one][job], results[other][job], strict=True)
    return [[name for name in a if a[name] != b[name]] for a, b in pairs]


@pytest.mark.thorough
def test_one_replica_is_initialised_with_another_seed(
    results: list[dict[str, Any]], frozen: Frozen
) -> None:
    """Both shards of all weights, in the replica of the chosen rank, differ from the first step."""
    frozen.facts([compare(results, "other-seed", shard, 2 + shard) for shard in (0, 1)])


@pytest.mark.thorough
def test_one_group_misses_a_synchronisation(results: list[dict[str, Any]], frozen: Frozen) -> None:
    """The two ranks that hold the chosen rank's shard differ from that step on, in all parameters;
    those of the other shard stay equal; later steps call the real all_reduce again."""
    frozen.facts([compare(results, "missed-sync", shard, 2 + shard) for shard in (0, 1)])
    assert all(one["restored"] for one in results)


@pytest.mark.thorough
def test_one_rank_alone_updates_what_tensor_parallelism_leaves_whole(
    results: list[dict[str, Any]], frozen: Frozen
) -> None:
    """The bias of the layer that is divided by rows differs in the chosen rank, and nowhere else;
    the other ranks have missed one update of it."""
    differs = {other: compare(results, "one-rank-update", 2, other) for other in (0, 1, 3)}
    whole = {rank: ["1.bias" in names for names in steps] for rank, steps in differs.items()}
    frozen.facts(whole)
    steps = [one["1.bias"] for one in results[0]["one-rank-update"]]
    assert steps[0] == steps[1] != steps[2]


@pytest.mark.thorough
def test_one_bit_of_one_shard_flips(results: list[dict[str, Any]], frozen: Frozen) -> None:
    """One element of the first shard of the chosen rank differs after the step."""
    frozen.facts([compare(results, "flipped-shard", shard, 2 + shard)[:2] for shard in (0, 1)])
    one, other = (results[rank]["flipped-shard"][1]["0.weight"] for rank in (1, 3))
    assert sum(a != b for a, b in zip(one, other, strict=True)) == 1
    assert compare(results, "flipped-shard", 0, 2) == [[]] * 3


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("missed-sync", None),
        ("flipped-shard", ("dp_shard",)),
        ("other-seed", ("dp_shard", "tp")),
        ("one-rank-update", ("dp_replicate", "dp_shard")),
    ],
    ids=["no mesh", "shards", "fsdp+tp", "hsdp"],
)
def test_a_fault_that_the_mesh_has_no_place_for_is_refused(
    name: str, mesh: tuple[str, ...] | None, frozen: Frozen
) -> None:
    """One sentence says what to use."""
    found = mesh and SimpleNamespace(mesh_dim_names=mesh, size=lambda dimension: 2)
    objection = faults.parse(name).objection(SimpleNamespace(mesh=found), 4)
    assert objection is not None
    frozen.text(objection)


@pytest.mark.parametrize("name", ["bypass", "no-sync", "slow-link"])
@pytest.mark.parametrize("parallel", ["fsdp", "tp"])
def test_a_fault_of_ddp_is_refused_on_a_mesh(name: str, parallel: str) -> None:
    """There is no DDP that a forward could bypass, and no no_sync."""
    replica = SimpleNamespace(case=SimpleNamespace(parallel=parallel))
    assert "use --parallel ddp" in (faults.parse(name).objection(replica, 4) or "")


if __name__ == "__main__":
    sys.exit(forks.run(lambda: run_rank(Path(sys.argv[1])), RANKS, ("torch.distributed",)))
