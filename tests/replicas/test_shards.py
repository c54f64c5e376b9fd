"""Edge cases of replicas on meshes, played by 4 real ranks and one outside the meshes.

A rank runs this very file: `python test_shards.py FOLDER RANK SIZE`. Whole trainings are in
test_mesh_scenarios.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import mesh_training
import pytest
import torch
import torch.distributed as dist
from frozen import Frozen
from mesh_training import facts_of, local, report_as_json
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from warm_python import warm_python

import ddpbench
from ddpbench.replicas.state import WAITING

pytestmark = pytest.mark.thorough

SIZE = 5  # the last rank is in no mesh: each call is made in 4 of 5 ranks
Play = Callable[[DeviceMesh], Any]
verify = ddpbench.verify_replicas


def module_of(*tensors: torch.Tensor) -> nn.Module:
    """A module with these parameters, called p0, p1, …"""
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_parameter(f"p{number}", nn.Parameter(tensor))
    return module


def on_mesh(mesh: DeviceMesh, placements: Any, *shape: int) -> Any:
    """A tensor whose elements count from 0, distributed without communication."""
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


# --- what travels


def traffic(mesh: DeviceMesh) -> Any:
    """One call along each dimension of the mesh, of a size that the model does not change."""
    seen = []
    for layers in (1, 60):
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        for parameter in net.parameters():
            nn.init.ones_(parameter)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters())
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
            assert verify(net, optimizer, gradients=True).ok
        seen.append([call.args[0].nbytes for call in spy.call_args_list])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2
    assert max(seen[0]) < 1000


# --- what is equal


def part_of_a_mesh(mesh: DeviceMesh) -> Any:
    """The user names the ranks: a dimension of the mesh, or a group."""
    module = module_of(on_mesh(mesh, [Replicate(), Shard(0)], 4, 2))
    local(module.p0)[0] += mesh.get_local_rank("a")
    assert verify(module).failed
    report = verify(module, None, mesh["b"])
    assert report.nothing_to_compare
    assert len(report.ranks) == 2
    report = verify(module, None, mesh["a"])
    assert report.differences[0].sides == tuple((rank,) for rank in report.ranks)
    assert verify(module, None, mesh["a"].get_group()).differences == report.differences


def empty_shards(mesh: DeviceMesh) -> Any:
    """A tensor of one row leaves nothing for the second shard."""
    net = nn.Linear(3, 1)
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    fully_shard(net, mesh=mesh)
    assert local(net.weight).numel() == (3 if mesh.get_local_rank("b") == 0 else 0)
    assert verify(net).ok
    if dist.get_rank() == 2:
        local(net.weight)[0, 2] = 5
    report = verify(net)
    (difference,) = report.differences
    assert difference.sides == ((0,), (2,))
    assert difference.details[0].index == (0, 2)
    return report


def gathered_copies(mesh: DeviceMesh) -> Any:
    """After a forward without resharding, shards are compared, not the gathered copies."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = verify(net, optimizer)
    net(torch.ones(1, 4))
    assert not hasattr(net[0].weight, "device_mesh")
    report = verify(net, optimizer)
    assert report.ok, str(report)
    assert (report.compared, report.nbytes) == (before.compared, before.nbytes)
    net(torch.ones(1, 4)).sum().backward()
    return report


def unsynchronised_gradients(mesh: DeviceMesh) -> Any:
    """Gradients that fully_shard still keeps are neither compared nor missed; later they are."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    rank = float(dist.get_rank())
    net.set_requires_gradient_sync(False)  # type: ignore[operator]
    net(torch.full((1, 4), rank)).sum().backward()
    report = verify(net, optimizer, gradients=True)
    assert not report.failed, str(report)
    reasons = {(each.kind, each.reason) for each in report.not_compared}
    assert reasons == {("gradient", WAITING)}
    net.set_requires_gradient_sync(True)  # type: ignore[operator]
    net(torch.full((1, 4), rank)).sum().backward()
    report = verify(net, optimizer, gradients=True)
    assert report.ok, str(report)
    assert report.compared["gradient"] == 2


# --- what is not


def nan_in_a_shard(mesh: DeviceMesh) -> Any:
    """An element that one rank alone holds must be finite, too."""
    net = nn.Linear(4, 8)
    fully_shard(net, mesh=DeviceMesh("cpu", torch.arange(4)))
    verifier = ddpbench.Verifier(net)
    assert verifier.check(1).nothing_to_compare
    summary = verifier.summary()
    if dist.get_rank() == 2:
        local(net.weight)[1, 1] = float("nan")
    report = verify(net)
    assert report.failed
    (found,) = report.nonfinite
    assert (found.counts, found.shard) == (((2, 1),), "shard 3 of 4")
    return {**report_as_json(report), "summary": summary}


def other_placements(mesh: DeviceMesh) -> Any:
    """A rank that shards what others replicate is a difference of structure, and nothing hangs."""
    other = dist.get_rank() == 3
    placements = [Replicate(), Replicate() if other else Shard(0)]
    report = verify(module_of(on_mesh(mesh, placements, 4), on_mesh(mesh, [Replicate()] * 2, 2)))
    (mismatch,) = report.mismatches
    assert mismatch.forms[0] == "float32 (4,) cpu Replicate() on a=2, Shard(dim=0) on b=2"
    assert mismatch.minority == (3,)
    assert report.compared["parameter"] == 1
    return report


PLAYS: dict[str, Play] = {
    play.__name__: play
    for play in (
        traffic, part_of_a_mesh, empty_shards, gathered_copies,
        unsynchronised_gradients, nan_in_a_shard, other_placements,
    )
}  # fmt: skip


def list_plays(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    """Return all plays; the last rank takes part in making meshes alone."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
    return {name: partial(play, mesh) for name, play in PLAYS.items() if rank < 4}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank of the meshes."""
    folder = tmp_path_factory.mktemp("shards")
    return mesh_training.run_ranks([*warm_python(), __file__], SIZE, folder)[:4]


@pytest.mark.parametrize("name", PLAYS)
def test_replicas_on_meshes(outcomes: list[dict[str, Any]], name: str, frozen: Frozen) -> None:
    """Each play's facts hold in each rank, and all ranks have the same report."""
    if report := mesh_training.agree(outcomes, name):
        frozen.facts([report["step"], report["equal_until"], *facts_of(report)])
        text = "\n".join([report["text"], report.get("summary", "")])
        frozen.text(re.sub(r"\d+ values", "N values", text))  # torch decides how many options


if __name__ == "__main__":
    mesh_training.play_in_rank(list_plays)
