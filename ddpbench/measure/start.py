"""Ways to start a repetition on all ranks together. To add one, add an entry to STARTS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ddpbench.launch.placement import Refused
from ddpbench.runtime import control, devices
from ddpbench.runtime.world import describe_failed_connection

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ddpbench.catalog.backends import Backend
    from ddpbench.runtime.subgroups import Subgroup
    from ddpbench.runtime.world import World


def barrier(group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Return the backend's own barrier, which blocks the host on every kind of device.

    Since torch 2.15, nccl's barrier returns once it is enqueued.
    """
    import torch.distributed as dist

    kind = devices.of(device)
    options = kind.barrier_options(device, group)

    def meet() -> None:
        dist.barrier(group=group, **options)
        kind.synchronize_stream(device)

    return meet


def barrier_to_connect(
    world: World, backend: Backend, tested: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Call one barrier, so that the first case does not include the time to connect.

    All ranks call it. `tested` is None in a rank that is not in the group.
    """
    with control.agree_refusal(world):
        try:
            if tested is not None:
                barrier(tested, device)()
        except RuntimeError as error:
            raise Refused(describe_failed_connection(backend.name, error)) from None


def p2p_barrier(group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Return a dissemination barrier over send and recv (Hensgen, Finkel, Manber 1988).

    In round k, rank r sends to r + 2^k and receives from r - 2^k. The messages are the same on
    every backend, so that backends with different barriers can be compared.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if dist.get_backend(group) == "gloo":
        device = torch.device("cpu")  # gloo sends no CUDA tensors
    out, into = torch.zeros(1, device=device), torch.zeros(1, device=device)
    kind = devices.of(device)
    distances = [1 << k for k in range((size - 1).bit_length())]

    def meet() -> None:
        for distance in distances:
            ops = [
                dist.P2POp(dist.isend, out, group=group, group_peer=(rank + distance) % size),
                dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - distance) % size),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        kind.synchronize_stream(device)  # on a GPU, a wait only orders the stream

    return meet


def bind_start(name: str, subgroup: Subgroup, device: torch.device) -> Callable[[], object]:
    """Return this start of STARTS for all ranks, so that all subgroups work at the same time.

    A subgroup inside a host then also starts on its own, so that its ranks enter as close together
    as they would alone. A subgroup across hosts does not: its messages would queue behind the data
    of subgroups that have already begun, and the last subgroup would not share the link.
    """
    together = STARTS[name](subgroup.world_group, device)
    across = len(subgroup.partition.ranks_per_host) > 1
    if across or subgroup.group in (None, subgroup.world_group):
        return together
    alone = STARTS[name](subgroup.group, device)

    def meet() -> None:
        together()
        alone()

    return meet


def bind_device_start(subgroup: Subgroup, device: torch.device) -> Callable[[], object]:
    """Return a start of this subgroup in the order of the device's work; it does not block hosts.

    It reduces one element: no rank gets the sum before the last rank's device reaches it.
    """
    import torch
    import torch.distributed as dist

    if subgroup.group is None:
        return lambda: None
    return partial(dist.all_reduce, torch.zeros(1, device=device), group=subgroup.group)


STARTS: dict[str, Callable[[dist.ProcessGroup, torch.device], Callable[[], object]]] = {
    "barrier": barrier,
    "p2p_barrier": p2p_barrier,
    # Only a burst starts together; then the operations keep step.
    "none": lambda group, device: lambda: None,
}
