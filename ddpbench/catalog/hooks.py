"""How DDP can reduce its gradients: one entry of HOOKS adds one, for `--comm-hook`.

Importing this module imports no torch. What is lossy changes what a model learns, not only how long
a step takes. On which backend a hook works is found out by trying: measure/hook_probe.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    HookFunction = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class Hook:
    """A reduction of gradient buckets.

    make   group → (state, function), as DistributedDataParallel.register_comm_hook takes them, new
           for each replica: a state may remember gradients; None: DDP's built-in reduction
    """

    name: str
    help: str
    make: Callable[[dist.ProcessGroup], tuple[object, HookFunction]] | None


def _fp16(group: dist.ProcessGroup) -> tuple[object, HookFunction]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return group, default_hooks.fp16_compress_hook


def _bf16(group: dist.ProcessGroup) -> tuple[object, HookFunction]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return group, default_hooks.bf16_compress_hook


def _powersgd(group: dist.ProcessGroup) -> tuple[object, HookFunction]:
    """PowerSGD of rank 1 from the third step on.

    A matrix of n × m travels as n + m numbers, vectors as they are. A step applies only the rank-1
    part of what has gathered; the rest is kept in this rank and added to the next gradient. Torch's
    default, plain all_reduce for 1000 steps, would measure plain all_reduce; less than 2 torch
    refuses, as DDP rebuilds its buckets after the first step.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


HOOKS: dict[str, Hook] = {
    entry.name: entry
    for entry in (
        Hook("none", "DDP's own all_reduce of every bucket, exact", None),
        Hook(
            "fp16",
            "cast to float16 on the way: half the bytes; 11 bits remain, a gradient above 65504 "
            "becomes inf, one below 6e-8 becomes 0",
            _fp16,
        ),
        Hook(
            "bf16",
            "cast to bfloat16 on the way: half the bytes; 8 bits remain, over float32's range; "
            "torch takes it only where it was built with CUDA and NCCL, or XPU",
            _bf16,
        ),
        Hook(
            "powersgd",
            "PowerSGD of rank 1 from the third step on: n + m numbers for a matrix of n × m; all "
            "but its rank-1 part is lost to the step, and added to the next one's",
            _powersgd,
        ),
    )
}


# DDP reads a hook's annotations and does not understand them as text, as they are in this module.
def noop(state, bucket):  # type: ignore[no-untyped-def]
    """A hook that communicates nothing: a completed future of the bucket's own buffer.

    state: anything. Each rank keeps its own gradients, so replicas drift apart.
    """
    import torch

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
