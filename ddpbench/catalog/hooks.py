"""DDP's communication hooks for `--comm-hook`. To add one, add an entry to HOOKS.

Importing this module does not import torch. A lossy hook changes what a model learns, not only how
long a step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    HookFunction = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class Hook:
    """A way to reduce gradient buckets.

    make   group → (state, function) for DistributedDataParallel.register_comm_hook, called once per
           replica because a state may hold gradients; None: DDP's built-in reduction
    fails  backend → why the hook aborts or hangs there
    """

    name: str
    help: str
    make: Callable[[dist.ProcessGroup], tuple[object, HookFunction]] | None
    fails: Mapping[str, str] = field(default_factory=dict)


def _default(name: str, group: dist.ProcessGroup) -> tuple[object, HookFunction]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return group, getattr(default_hooks, name)


def _powersgd(group: dist.ProcessGroup) -> tuple[object, HookFunction]:
    """Return PowerSGD of rank 1, which compresses after two steps.

    A matrix of n × m is sent as n + m numbers, a vector uncompressed. A step applies only the
    rank-1 part of the gradient; each rank keeps the rest and adds it to its next gradient. Torch's
    default is a plain all_reduce for the first 1000 steps, and ddpbench would measure only that.
    Torch refuses less than 2 because DDP rebuilds its buckets after the first step.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


HOOKS: dict[str, Hook] = {
    entry.name: entry
    for entry in (
        Hook("none", "DDP's own all_reduce of each bucket, exact", None),
        Hook(
            "fp16",
            "send float16, half the bytes: 11 significant bits, inf above 65504, 0 below 6e-8",
            partial(_default, "fp16_compress_hook"),
        ),
        Hook(
            "bf16",
            "send bfloat16, half the bytes: 8 significant bits, float32's range; needs torch with "
            "CUDA and NCCL, or with XPU",
            partial(_default, "bf16_compress_hook"),
        ),
        Hook(
            "powersgd",
            "PowerSGD of rank 1, after two exact steps: send n + m numbers for a matrix of n × m, "
            "and add the rest of the gradient to the next step",
            _powersgd,
            # It waits inside a callback. gloo has two threads, and processes calls from several
            # buckets in a different order on each rank. mpi and nccl run it.
            {"gloo": "hangs or aborts when two buckets are in flight"},
        ),
    )
}


# No annotations: DDP reads those of a hook, and here they would be strings, which it rejects.
def noop(state, bucket):  # type: ignore[no-untyped-def]
    """Communicate nothing: return a completed future of the bucket's own buffer.

    `state` is ignored. Each rank keeps its own gradients, so the replicas diverge.
    """
    import torch

    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
