"""How faults are made in a DDP step: each is done to a measure.step.Replica, in its rank."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil

ELEMENTS = 1024  # of the metric that a user's step sums over the ranks
Settings = Mapping[str, float]


def _first(replica: Any) -> Any:
    return next(iter(replica.module.parameters())).data


def _flip(flat: Any, index: int, bit: float) -> None:
    """One bit of an element of a flat tensor of floating-point numbers."""
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat.view(bits[flat.element_size()])[index] ^= 1 << int(bit)


# --- the replica is changed -----------------------------------------------------------------------


def bit_flip(replica: Any, settings: Settings) -> None:
    """In the middle of the first parameter."""
    flat = _first(replica).view(-1)
    _flip(flat, flat.numel() // 2, settings["bit"])


def corrupted_result(replica: Any, settings: Settings) -> None:
    """In the largest element of the first gradient, once it is reduced and before the optimizer
    takes it: as a bad link, adapter or GPU would deliver it."""
    if replica.steps != settings["step"]:
        return

    def spoil(*_: Any) -> None:
        hook.remove()
        flat = next(iter(replica.module.parameters())).grad.view(-1)
        _flip(flat, int(flat.abs().argmax()), settings["bit"])

    hook = replica.optimizer.register_step_pre_hook(spoil)


def bypass(replica: Any, settings: Settings) -> None:
    """The forward no longer goes through DDP."""
    replica.through = replica.module


def unsynced(replica: Any, settings: Settings) -> None:
    """No backward reduces any more."""
    replica.sync_last = False


def learning_rate(replica: Any, settings: Settings) -> None:
    """That of the setting `lr`."""
    for group in replica.optimizer.param_groups:
        group["lr"] = settings["lr"]


def permute(replica: Any, settings: Settings) -> None:
    """The first parameter backwards."""
    tensor = _first(replica)
    tensor.copy_(tensor.flatten().flip(0).view_as(tensor))


def nan(replica: Any, settings: Settings) -> None:
    """The first element of the first parameter."""
    _first(replica).view(-1)[0] = float("nan")


def optimizer_state(replica: Any, settings: Settings) -> None:
    """One element of the first tensor of it."""
    import torch

    for state in replica.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.view(-1)[0] += 1
                return


def stateless(replica: Any) -> str | None:
    """Why there is no state to change."""
    if replica.case.optimizer != "sgd":
        return None
    return "optimizer-state needs an optimizer that keeps some: say --optimizer adam"


def buffer(replica: Any, settings: Settings) -> None:
    """The first element of the first buffer of floating-point numbers."""
    import torch

    for each in replica.module.buffers():
        if torch.is_floating_point(each):
            each.view(-1)[0] += 1
            return


def no_buffers(replica: Any) -> str | None:
    """Why there is no buffer to change."""
    if any(True for _ in replica.module.buffers()):
        return None
    return "the fault buffer needs a workload that has buffers: say --workload convnet"


# --- the rank is slow, or goes no further ---------------------------------------------------------


def slow_rank(replica: Any, settings: Settings) -> None:
    """Each forward sleeps first."""
    replica.delay_seconds = settings["ms"] / 1e3


def slow_link(replica: Any, settings: Settings) -> None:
    """The last bucket is not reduced before this time."""
    replica.link_seconds = settings["ms"] / 1e3


def error(replica: Any, settings: Settings) -> None:
    """As a user's code would raise it."""
    raise RuntimeError("planted error")


def hang(replica: Any, settings: Settings) -> None:
    """In user code, where others wait in a collective."""
    time.sleep(settings["seconds"])


def stop(replica: Any, settings: Settings) -> None:
    """As a debugger or a batch system does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(replica: Any, settings: Settings) -> None:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory(replica: Any, settings: Settings) -> None:
    """A real allocation that fails: on the CPU because this process may have only half as much more
    address space, on a GPU because it is beyond all of its memory."""
    import torch

    nbytes = int(settings["mb"] * 2**20)
    if replica.device.type == "cuda":
        nbytes += torch.cuda.get_device_properties(replica.device).total_memory
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + nbytes // 2
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=replica.device)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# --- a user's own collective, beside DDP's, that one rank calls otherwise -------------------------


def summed(replica: Any, settings: Settings) -> None:
    """What all ranks should call: a metric's all_reduce."""
    _sum(replica, ELEMENTS, "float32")


def wrong_shape(replica: Any, settings: Settings) -> None:
    """Twice as long: gloo then ends a neighbour, and not the rank that is to blame."""
    _sum(replica, 2 * ELEMENTS, "float32")


def wrong_dtype(replica: Any, settings: Settings) -> None:
    """As a Python float becomes."""
    _sum(replica, ELEMENTS, "float64")


def _sum(replica: Any, elements: int, dtype: str) -> None:
    import torch
    import torch.distributed as dist

    metric = torch.zeros(elements, dtype=getattr(torch, dtype), device=replica.device)
    dist.all_reduce(metric, group=replica.ddp.process_group)


def gathered(replica: Any, settings: Settings) -> None:
    """What all ranks should call: a metric's all_gather."""
    import torch
    import torch.distributed as dist

    group = replica.ddp.process_group
    metric = torch.zeros(ELEMENTS, device=replica.device)
    dist.all_gather([metric.clone() for _ in range(group.size())], metric, group=group)


def skipped(replica: Any, settings: Settings) -> None:
    """As `if rank == 0` around it does."""


def in_order(replica: Any, settings: Settings) -> None:
    """What all ranks should call."""
    summed(replica, settings)
    gathered(replica, settings)


def wrong_order(replica: Any, settings: Settings) -> None:
    """The same two, the other way round."""
    gathered(replica, settings)
    summed(replica, settings)
