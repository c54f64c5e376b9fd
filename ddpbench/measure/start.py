"""How the ranks start a repetition together: one entry of STARTS adds one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ddpbench.runtime.subgroups import Subgroup


def barrier(group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """The backend's own barrier."""
    import torch.distributed as dist

    return partial(dist.barrier, group=group)


def p2p_barrier(group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Dissemination over send and recv: in round k rank r signals r + 2^k and hears r - 2^k.

    The same messages on every backend, for comparing backends whose own barriers differ
    (Hensgen, Finkel, Manber 1988).
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if dist.get_backend(group) == "gloo":
        device = torch.device("cpu")  # gloo sends no CUDA tensors
    out, into = torch.zeros(1, device=device), torch.zeros(1, device=device)
    distances = [1 << k for k in range((size - 1).bit_length())]

    def meet() -> None:
        for distance in distances:
            ops = [
                dist.P2POp(dist.isend, out, group=group, group_peer=(rank + distance) % size),
                dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - distance) % size),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        if device.type == "cuda":  # there, a wait only orders the stream
            torch.cuda.current_stream(device).synchronize()

    return meet


def none(group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """No common start, but that of a burst: the operations themselves keep the ranks together."""
    return lambda: None


def of_team(name: str, subgroup: Subgroup, device: torch.device) -> Callable[[], object]:
    """The start of STARTS by this name: of all ranks, so that all teams work at once.

    A team inside a host then starts once more on its own, so that its ranks enter as close as they
    would alone. Not one between hosts: its messages would wait behind the data of the teams that
    have begun, and the last would have the link to itself.
    """
    together = STARTS[name](subgroup.world_group, device)
    inside = len(subgroup.partition.ranks_per_host) == 1
    if subgroup.group is None or subgroup.group is subgroup.world_group or not inside:
        return together
    alone = STARTS[name](subgroup.group, device)

    def meet() -> None:
        together()
        alone()

    return meet


STARTS = {"barrier": barrier, "p2p_barrier": p2p_barrier, "none": none}
