"""Meshes and shards of a module: the part of torch that scopes.py needs as plain numbers.

DTensors are recognised by their attributes, because torch.distributed.tensor is slow to import and
a module without DTensors does not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from ddpbench.replicas.report import NOT_REDUCED
from ddpbench.replicas.scopes import Base, Grid, Layout, make_line

Target = dist.ProcessGroup | DeviceMesh | None  # the ranks to compare; None: the default
# fully_shard keeps these gradients unsharded, or not yet reduced over all replicas.
WAITING = "not synchronised yet: fully_shard reduces it after the last micro-batch"


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    kind = type(tensor)
    return kind is not Tensor and hasattr(kind, "device_mesh") and hasattr(kind, "placements")


def read_local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, without autograd."""
    local: Tensor = tensor._local_tensor  # to_local() wraps it anew in each call
    wait = getattr(local, "wait", None)  # a collective may still run
    return local if wait is None else cast(Tensor, wait())


def read_layout(tensor: Any) -> Layout:
    """Return the placements of a DTensor; the same object for the same mesh and placements."""
    return _layout(tensor.device_mesh, tensor.placements)


@lru_cache(maxsize=256)
def _layout(mesh: DeviceMesh, placements: tuple[Any, ...]) -> Layout:
    grid = read_grid(mesh)
    named = list(zip(grid.names, grid.shape, placements, strict=True))
    splits = []
    for placement in placements:
        factor = getattr(placement, "split_factor", 0)  # before is_shard: it differs by version
        sharded = placement.is_shard() or bool(factor)
        splits.append((placement.dim, factor) if sharded else None)
    return Layout(
        grid,
        tuple(splits),
        tuple(name for name, _, placement in named if placement.is_partial()),
        ", ".join(f"{placement!r} on {name}={size}" for name, size, placement in named),
    )


def describe_partial(layout: Layout) -> str:
    """Return why a tensor with a Partial placement cannot be compared; "" if it has none."""
    along = " and ".join(layout.partial)
    return f"{NOT_REDUCED}: its placement is Partial along {along}" if along else ""


@lru_cache(maxsize=64)
def read_grid(mesh: DeviceMesh) -> Grid:
    """Return the ranks of a mesh; dimensions without a name are called "dim 0", "dim 1", …"""
    shape = tuple(mesh.mesh.shape)
    names = mesh.mesh_dim_names or tuple(f"dim {number}" for number in range(len(shape)))
    return Grid(shape, tuple(names), tuple(mesh.mesh.flatten().tolist()))


def find_root(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh is a part of; else the mesh itself."""
    find = getattr(mesh, "_get_root_mesh", None)  # torch 2.7 has it elsewhere
    root: DeviceMesh = find() if find else device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


def choose_target(
    target: Target, ddp: Any, meshes: Iterable[DeviceMesh]
) -> tuple[Target, DeviceMesh | None]:
    """Return the ranks to compare, and the mesh that names them, if there is one.

    The user's group or mesh comes first, then the largest mesh of the DTensors if it contains DDP's
    ranks, then DDP's group. Of meshes of the same size, the one with the most dimensions tells most
    about scopes: the root of a mesh may be the flat mesh of all ranks.
    """
    known = list({id(mesh): mesh for mesh in meshes}.values())
    if isinstance(target, DeviceMesh):
        known.append(target)
    known += map(find_root, tuple(known))
    root = max(known, key=_measure, default=None)
    if target is not None:
        return target, root
    if ddp is None:
        return root, root
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if root is None or not {*ranks} <= {*read_grid(root).ranks}:
        return ddp.process_group, root
    return root, root


def _measure(mesh: DeviceMesh) -> tuple[int, int]:
    grid = read_grid(mesh)  # kept: torch calculates `mesh.mesh` anew in each call
    return len(grid.ranks), len(grid.shape)


def make_base(ranks: Sequence[int], place: int, target: Target, root: DeviceMesh | None) -> Base:
    """Return the base of these ranks, on a mesh that covers them all."""
    meshes = [mesh for mesh in (root, target) if isinstance(mesh, DeviceMesh)]
    grids = [read_grid(mesh) for mesh in meshes]
    grid = next((grid for grid in grids if {*ranks} <= {*grid.ranks}), make_line(ranks))
    return Base(tuple(ranks), grid, ranks[place])


class Held(NamedTuple):
    """A parameter of a module as the optimizer knows it."""

    name: str
    parameter: torch.nn.Parameter
    waiting: bool  # its gradient is not synchronised yet


def list_parameters(module: torch.nn.Module) -> Iterator[Held]:
    """Yield the parameters of an unwrapped module.

    After a forward without resharding, fully_shard leaves gathered copies in the module. The
    shards, which the optimizer updates, are yielded in their place.
    """
    shards = _find_shards(module)
    for name, parameter in module.named_parameters():
        shard, waiting = shards.get(id(parameter), (parameter, False))
        yield Held(name, shard, waiting)


def _find_shards(module: torch.nn.Module) -> dict[int, tuple[torch.nn.Parameter, bool]]:
    """Return fully_shard's shards, and whether a gradient waits, by id of shard and copy."""
    shards: dict[int, tuple[torch.nn.Parameter, bool]] = {}
    if "torch.distributed.fsdp" not in sys.modules:
        return shards
    for part in module.modules():
        get_state: Any = getattr(part, "_get_fsdp_state", None)
        if get_state is None:
            continue
        state = get_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.7 has one
        for group in [state._fsdp_param_group] if groups is None else groups:
            unreduced = getattr(group, "_partial_reduce_output", None) is not None
            for each in getattr(group, "fsdp_params", ()):
                copy: Any = getattr(each, "_unsharded_param", each.sharded_param)
                summed = getattr(each, "unsharded_accumulated_grad", None)
                if copy is not each.sharded_param:
                    summed = copy.grad if summed is None else summed
                held = each.sharded_param, unreduced or summed is not None
                shards[id(each.sharded_param)] = shards[id(copy)] = held
    return shards
