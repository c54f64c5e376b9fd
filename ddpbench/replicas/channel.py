"""The ranks that are compared, and the exchange between them: sums through torch.distributed.

Every call here is made by all ranks of the group in the same order, because what is called next
depends only on facts that all of them share. Each wait is bounded by the group's own timeout; a
rank that does not come makes the group raise its own error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from ddpbench.replicas.scopes import LINE, PRIME, Base, Grid

Array = npt.NDArray[Any]
Target = dist.ProcessGroup | DeviceMesh | None  # the ranks to compare; None: the default


@lru_cache(maxsize=64)
def read_grid(mesh: DeviceMesh) -> Grid:
    """Return the ranks of a mesh; dimensions without a name are called "dim 0", "dim 1", …"""
    shape = tuple(mesh.mesh.shape)
    names = mesh.mesh_dim_names or tuple(f"dim {number}" for number in range(len(shape)))
    return Grid(shape, tuple(names), tuple(mesh.mesh.flatten().tolist()))


def choose_target(
    target: Target, ddp: Any, meshes: Iterable[DeviceMesh]
) -> tuple[Target, DeviceMesh | None]:
    """Return the ranks to compare, and the mesh that names them, if there is one.

    The user's group or mesh comes first, then the largest mesh of the DTensors if it contains DDP's
    ranks, then DDP's group. Of meshes of the same size, the one with the most dimensions describes
    scopes best: the root of a mesh may be the flat mesh of all ranks.
    """
    known = list({id(mesh): mesh for mesh in meshes}.values())
    if isinstance(target, DeviceMesh):
        known.append(target)
    known += map(_find_root, tuple(known))
    grids = [read_grid(mesh) for mesh in known]  # kept: torch calculates `mesh.mesh` anew each time
    sizes = [(len(grid.ranks), len(grid.shape)) for grid in grids]
    root = known[sizes.index(max(sizes))] if known else None
    if target is not None:
        return target, root
    if ddp is None:
        return root, root
    ranks = dist.get_process_group_ranks(ddp.process_group)
    covered = root is not None and {*ranks} <= {*read_grid(root).ranks}
    return root if covered else ddp.process_group, root


def _find_root(mesh: DeviceMesh) -> DeviceMesh:
    find = getattr(mesh, "_get_root_mesh", None)  # torch 2.7 has it elsewhere
    root: DeviceMesh = find() if find else device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


def choose_device(kinds: Sequence[str], tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of a group's messages: the CPU if the group takes its tensors.

    Otherwise the first device of these kinds that holds one of the tensors. The current device may
    be another rank's, because a script that passes devices around need not set it.
    """
    if "cpu" in kinds:
        return torch.device("cpu")
    own = (tensor.device for tensor in tensors if tensor.device.type in kinds)
    return next(own, torch.device(kinds[0]))  # without a number: the current one


class Channel:
    """The ranks of a group or a mesh, and the device of their messages.

    Without a process group, this process alone.
    """

    def __init__(self, target: Target, module: torch.nn.Module) -> None:
        self.ranks, self.rank = [0], 0  # global ranks, in the group's order; this one's place
        self.device = torch.device("cpu")
        # A mesh that no group covers has one group per dimension: sums go along one after another.
        self._groups: list[dist.ProcessGroup | None] = []
        if not (dist.is_available() and dist.is_initialized()):
            return
        self._groups = _list_groups(target)
        self.ranks = dist.get_process_group_ranks(self._groups[0] or dist.group.WORLD)
        if isinstance(target, DeviceMesh) and len(self._groups) > 1:
            self.ranks = list(read_grid(target).ranks)
        self.rank = self.ranks.index(dist.get_rank())
        config = dist.get_backend_config(self._groups[0])
        kinds = [part.split(":")[0] for part in config.split(",")]
        self.device = choose_device(kinds, chain(module.parameters(), module.buffers()))

    def make_base(self, *meshes: Target) -> Base:
        """Return the base of these ranks, on the first mesh that covers them all."""
        grids = [read_grid(mesh) for mesh in meshes if isinstance(mesh, DeviceMesh)]
        line = Grid((len(self.ranks),), LINE, tuple(self.ranks))
        grid = next((grid for grid in grids if {*self.ranks} <= {*grid.ranks}), line)
        return Base(tuple(self.ranks), grid, self.ranks[self.rank])

    def _gather_sum(self, vector: Array) -> Array:
        if not (self._groups and vector.size):
            return vector
        tensor = torch.from_numpy(vector).to(self.device)
        for group in self._groups:
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
        return tensor.cpu().numpy()

    def gather_sums(
        self, terms: Sequence[int], counts: Sequence[int] = ()
    ) -> tuple[list[bool], list[int]]:
        """Return whether each term adds up to 0 modulo PRIME over the ranks, and sums of counts.

        One all_reduce. All ranks pass the same number of terms and of counts.
        """
        # Terms travel as halves of 32 bits: sums over 2^31 ranks do not overflow.
        halves = [half for term in terms for half in divmod(term % PRIME, 1 << 32)]
        sums = self._gather_sum(np.array([*halves, *counts], np.int64)).tolist()
        pairs = zip(sums[: len(halves) : 2], sums[1 : len(halves) : 2], strict=True)
        return [((high << 32) + low) % PRIME == 0 for high, low in pairs], sums[len(halves) :]

    def gather_rows(self, vector: Array) -> Array:
        """Return every rank's uint8[n] or int64[n] as [ranks, n]; n is the same in all ranks."""
        rows = np.zeros((len(self.ranks), len(vector)), vector.dtype)
        rows[self.rank] = vector
        return self._gather_sum(rows)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value, converted through JSON, in the group's order."""
        content = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self.gather_rows(np.array([content.size], np.int64))[:, 0]
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: content.size] = content
        rows = self.gather_rows(padded)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def broadcast_bytes(self, content: npt.NDArray[np.uint8], source: int) -> Array:
        """Return the bytes uint8[n] of the rank at this place of the group; n the same in all."""
        # The caller's memory may be the replica's own: it is copied, never written to.
        return self._gather_sum(content.copy() if self.rank == source else np.zeros_like(content))


def _list_groups(target: Target) -> list[dist.ProcessGroup | None]:
    """Return the group of all ranks of a target, else one group per dimension of the mesh."""
    if not isinstance(target, DeviceMesh):
        if dist.get_rank(target) < 0:
            raise ValueError("this rank is not in the group: call it in the ranks of the group")
        return [target]
    grid = read_grid(target)
    if sorted(grid.ranks) == sorted(dist.get_process_group_ranks(dist.group.WORLD)):
        return [None]
    if dist.get_rank() not in grid.coordinates:
        raise ValueError("this rank is not in the mesh: call it in the ranks of the mesh")
    sized = [d for d, size in enumerate(grid.shape) if size > 1] or [0]
    return [target.get_group(d) for d in sized]
