"""Faults of a DDP step whose model is divided over a mesh: fully_shard, HSDP, tensor parallel.

Each function changes one rank's replica, which has a `mesh`, or the ranks that belong to the chosen
one. The first sentence of each docstring is the fault's help text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpbench.catalog.parallel import REPLICATE, TENSOR
from ddpbench.catalog.step_faults import Settings, find_first, flip, read_local


def _needs(way: str, dimension: str, why: str) -> Callable[[Any], str | None]:
    """Return a check that the replica's mesh has a dimension of two ranks or more."""

    def require(replica: Any) -> str | None:
        mesh = getattr(replica, "mesh", None)
        names = mesh.mesh_dim_names if mesh else ()
        if mesh and dimension in names and mesh.size(names.index(dimension)) > 1:
            return None
        return f"{why}: use --parallel {way} with two ranks or more along {dimension}"

    return require


require_replicas = _needs("hsdp", REPLICATE, "this fault needs shards that several ranks hold")
require_tensor_parallel = _needs(
    "tp", TENSOR, "this fault needs parameters that tensor parallelism leaves whole"
)


def _line(replica: Any, rank: int, dimension: str) -> tuple[Any, bool]:
    """Return the group of this rank along a dimension, and whether a global rank is in it."""
    import torch.distributed as dist

    group = replica.mesh.get_group(dimension)
    return group, rank % dist.get_world_size() in dist.get_process_group_ranks(group)


def _coordinate(replica: Any, rank: int, dimension: str) -> int:
    import torch.distributed as dist

    mesh = replica.mesh
    place = (mesh.mesh == rank % dist.get_world_size()).nonzero()[0]
    return int(place[mesh.mesh_dim_names.index(dimension)])


# --- an HSDP replica initialised with another seed ------------------------------------------------


def other_seed(replica: Any, settings: Settings) -> None:
    """Initialise one HSDP replica with another seed, in all ranks of that replica."""
    import torch

    if replica.steps != settings["step"]:
        return
    rank = int(settings["rank"])
    own = replica.mesh.get_local_rank(REPLICATE)
    if own != _coordinate(replica, rank, REPLICATE):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(settings["seed"]))
        for parameter in replica.module.parameters():
            if parameter.dim() > 1:  # the others begin as constants
                local = read_local(parameter.data)
                local.copy_(torch.randn(local.shape) * local.std().item())


# --- a missed gradient synchronisation in one replicate group -------------------------------------


def missed_sync(replica: Any, settings: Settings) -> None:
    """Skip the all_reduce of gradients in one step, in all ranks that hold the same shard."""
    import torch.distributed as dist

    group, is_chosen = _line(replica, int(settings["rank"]), REPLICATE)
    if replica.steps != settings["step"] or not is_chosen:
        return
    all_reduce, skips = dist.all_reduce, [True]

    def skip(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if skips and kwargs.get("group") is group:
            return None
        return all_reduce(tensor, *args, **kwargs)

    def restore(*_: Any) -> None:
        hook.remove()
        skips.clear()  # something else may have wrapped `skip` by now
        if dist.all_reduce is skip:
            dist.all_reduce = all_reduce

    dist.all_reduce = skip
    hook = replica.optimizer.register_step_pre_hook(restore)


# --- a tensor-parallel parameter updated on one rank only -----------------------------------------


def one_rank_update(replica: Any, settings: Settings) -> None:
    """Update a parameter that tensor parallelism leaves whole in one rank only."""


def skip_update(replica: Any, settings: Settings) -> None:
    """Undo the update of that parameter, in the other ranks that share the layer."""
    _, is_chosen = _line(replica, int(settings["rank"]), TENSOR)
    if replica.steps != settings["step"] or not is_chosen:
        return
    local = read_local(_find_whole(replica).data)
    before = local.clone()

    def undo(*_: Any) -> None:
        hook.remove()
        local.copy_(before)

    hook = replica.optimizer.register_step_post_hook(undo)


def require_whole(replica: Any) -> str | None:
    """Return why there is no parameter that tensor parallelism leaves whole; None if there is."""
    objection = require_tensor_parallel(replica)
    if objection is None and _find_whole(replica) is None:
        return "this fault needs a parameter that tensor parallelism leaves whole: there is none"
    return objection


def _find_whole(replica: Any) -> Any:
    return next((one for one in replica.module.parameters() if not _is_divided(one, TENSOR)), None)


def _is_divided(parameter: Any, dimension: str) -> bool:
    mesh = getattr(parameter, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names
    return dimension in names and not parameter.placements[names.index(dimension)].is_replicate()


# --- a flipped bit in one shard -------------------------------------------------------------------


def flipped_shard(replica: Any, settings: Settings) -> None:
    """Flip one bit of one shard that another HSDP replica holds, too."""
    flat = find_first(replica).view(-1)
    flip(flat, flat.numel() // 2, settings["bit"])
