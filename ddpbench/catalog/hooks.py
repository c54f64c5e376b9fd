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
    share  of a bucket's bytes that it sends in one call; None: in several calls
    """

    name: str
    help: str
    make: Callable[[dist.ProcessGroup], tuple[object, HookFunction]] | None
    fails: Mapping[str, str] = field(default_factory=dict)
    share: float | None = 1.0


def _default(name: str, group: dist.ProcessGroup) -> tuple[object, HookFunction]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return group, getattr(default_hooks, name)


def _powersgd(rank: int, group: dist.ProcessGroup) -> tuple[object, HookFunction]:
    """Return PowerSGD of this rank, which compresses after two steps.

    For each unit of the rank, a matrix of n × m is sent as n + m numbers, a vector uncompressed. A
    step applies only the low-rank part of the gradient; each process keeps the rest and adds it to
    its next gradient. Torch's default is a plain all_reduce for the first 1000 steps, and ddpbench
    would measure only that. Torch refuses less than 2 because DDP rebuilds its buckets after the
    first step.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    options: dict[str, Any] = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
    return powerSGD_hook.PowerSGDState(group, **options), powerSGD_hook.powerSGD_hook


# It waits inside a callback. gloo has two threads, and processes calls from several buckets in a
# different order on each rank. mpi and nccl run it.
POWERSGD_FAILS = {"gloo": "hangs or aborts when two buckets are in flight"}
HOOKS: dict[str, Hook] = {
    entry.name: entry
    for entry in (
        Hook("none", "DDP's own all_reduce of each bucket, exact", None),
        Hook(
            "fp16",
            "send float16, half the bytes: 11 significant bits, inf above 65504, 0 below 6e-8",
            partial(_default, "fp16_compress_hook"),
            share=0.5,
        ),
        Hook(
            "bf16",
            "send bfloat16, half the bytes: 8 significant bits, float32's range; needs torch with "
            "CUDA and NCCL, or with XPU",
            partial(_default, "bf16_compress_hook"),
            share=0.5,
        ),
        Hook(
            "powersgd",
            "PowerSGD of rank 1, after two exact steps: send n + m numbers for a matrix of n × m, "
            "and add the rest of the gradient to the next step",
            partial(_powersgd, 1),
            POWERSGD_FAILS,
            share=None,
        ),
        Hook(
            "powersgd4",
            "PowerSGD of rank 4",
            partial(_powersgd, 4),
            POWERSGD_FAILS,
            share=None,
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
