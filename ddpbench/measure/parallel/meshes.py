"""The meshes of a launch: one of groups on the measured backend, one of control groups."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddpbench.catalog.parallel import REPLICATE, SHARD, Way, format_mesh
from ddpbench.measure.parallel.communication import GATHERS, SCATTERS
from ddpbench.runtime import control
from ddpbench.runtime.world import World


@dataclass(frozen=True)
class Meshes:
    """All ranks in the shape of a way's mesh.

    tested   trains: its groups are on the measured backend
    control  the same ranks over gloo, so that the proof of replicas is independent of the backend
    """

    way: Way
    shape: tuple[int, ...]
    tested: DeviceMesh
    control: DeviceMesh

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks that share a batch: neighbours, because tp is the last dimension."""
        return self.shape[-1] if self.way.splits else 1


def agree_meshes(
    world: World,
    way: Way,
    shape: tuple[int, ...],
    *,
    torch_name: str,
    whole: dist.ProcessGroup,
    device: torch.device,
    closing: ExitStack,
) -> Meshes:
    """Make both meshes; all ranks together.

    torch_name: of the measured backend. whole: its group of all ranks. closing: ends the groups.
    """
    meshes = []
    grid = torch.arange(world.world_size).view(shape)
    for name, group, where in (
        (torch_name, whole, device),
        ("gloo", dist.group.WORLD, torch.device("cpu")),
    ):
        assert group is not None
        groups = [group]
        if len(shape) > 1:
            groups = []
            for dimension, size in enumerate(shape):
                lines = grid.movedim(dimension, -1).reshape(-1, size)
                for line in lines.tolist():  # all of a dimension; this rank is in one of them
                    made = closing.enter_context(world.agree_group(name, line, where))
                    if world.rank in line:
                        groups.append(made)
        meshes.append(
            DeviceMesh.from_group(groups, where.type, grid, mesh_dim_names=way.dimensions)
        )
    return Meshes(way, shape, *meshes)


def find_refusal(world: World, meshes: Meshes, backend: str) -> str | None:
    """Return one sentence, in all ranks, if the backend cannot average as fully_shard does.

    It tries one small collective of each kind along the dimensions of data parallelism, and checks
    the result: gloo of torch 2.7 always sums in reduce_scatter.
    """
    objection = None
    device = torch.device(meshes.tested.device_type)
    calls = {SHARD: ("reduce_scatter", _scatter), REPLICATE: ("all_reduce", _reduce)}
    for dimension in meshes.way.dimensions:
        if dimension not in calls or objection is not None:
            continue
        operation, call = calls[dimension]
        group = meshes.tested.get_group(dimension)
        expected = (group.size() + 1) / 2
        try:
            got = call(group, torch.tensor([group.rank() + 1.0], device=device))
            right = math.isclose(got, expected, rel_tol=1e-3)  # 1 / size is rounded
            failure = None if right else f"returns {got:g} instead of {expected:g}"
        except (RuntimeError, NotImplementedError) as error:
            failure = f"fails: {control.first_line(error, 200)}"
        if failure is not None:
            objection = (
                f"--parallel {meshes.way.name} on mesh {format_mesh(meshes.shape)} averages "
                f"gradients with {operation}, and {backend} of torch {torch.__version__} "
                f"{failure}; choose --parallel ddp or tp, or another --backend"
            )
    return control.agree_objection(world, objection)


def _scatter(group: dist.ProcessGroup, own: torch.Tensor) -> float:
    """Gather and scatter as fully_shard does, by the names that this torch prefers.

    Each rank contributes its own number to all; return their average.
    """
    whole = own.new_empty(group.size())
    gather, scatter = (
        next(getattr(dist, name) for name in names if hasattr(dist, name))
        for names in (GATHERS, SCATTERS)
    )
    gather(whole, own, group=group)
    average = torch.empty_like(own)
    scatter(average, own.repeat(group.size()), op=dist.ReduceOp.AVG, group=group)
    return average.item()


def _reduce(group: dist.ProcessGroup, own: torch.Tensor) -> float:
    dist.all_reduce(own, op=dist.ReduceOp.AVG, group=group)
    return own.item()
