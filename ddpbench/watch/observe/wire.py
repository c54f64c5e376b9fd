"""The ends of DDP's reductions, with `wire=True`.

gloo reports to nobody when a call ends. A communication hook stamps it, on every DDP module on
gloo without a hook of the user's. It reduces as DDP does without one: it multiplies the bucket by
1/n and adds it up.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

KEPT = 2000  # stamps


class Reduction(NamedTuple):
    """When a hook called all_reduce, when that returned and when it ended, by the system clock."""

    called_ns: int
    returned_ns: int
    ended_ns: int


class Reducers:
    """Stamps the reductions of DDP over gloo. find_roots: returns the root modules of the job."""

    def __init__(self, find_roots: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._find_roots = find_roots
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stamps: deque[Reduction] = deque(maxlen=KEPT)

    def after_step(self, _number: int) -> None:
        """Look for new modules; for the training thread between steps.

        A hook cannot be set in a backward, nor before the user's own, which comes before training.
        """
        from torch.nn.parallel import DistributedDataParallel

        for root in self._find_roots():
            for module in root.modules():
                if isinstance(module, DistributedDataParallel) and module not in self._modules:
                    self._modules.add(module)
                    _stamp_reductions(module, self._stamps)

    def take(self) -> list[Reduction]:
        """Return the reductions that have ended since the last time."""
        return [self._stamps.popleft() for _ in range(len(self._stamps))]


def _stamp_reductions(ddp: Any, stamps: deque[Reduction]) -> None:
    """Set the hook, unless there is one or it would not reduce alike."""
    import torch.distributed as dist

    from ddpbench.runtime import devices

    group, device = ddp.process_group, next(ddp.parameters()).device
    size = group.size()
    # DDP divides gradients that lie in the bucket already. For powers of two that is the product.
    is_equal = not ddp.gradient_as_bucket_view or size & (size - 1) == 0
    if ddp._comm_hooks or not is_equal or devices.of(device).clock == "device":
        return
    # A hook in C++ makes torch refuse a second one.
    with contextlib.suppress(RuntimeError, AttributeError):
        if group._get_backend(device).name() == "gloo":
            dist._register_comm_hook(ddp.reducer, stamps, partial(_reduce, group, 1 / size))


def _reduce(
    group: dist.ProcessGroup, factor: float, stamps: deque[Reduction], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    import torch.distributed as dist

    buffer = bucket.buffer().mul_(factor)
    called_ns = time.time_ns()
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    returned_ns = time.time_ns()

    def end(future: Any) -> Any:
        stamps.append(Reduction(called_ns, returned_ns, time.time_ns()))
        return future.value()[0]

    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
    return reduced
