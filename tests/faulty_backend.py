"""A gloo backend with the fault that FAULT names: `--import faulty_backend --backend faulty`.

element:RANK:NBYTES  one element of rank RANK's result is wrong when it has NBYTES
drop:RANK            a sum that leaves out rank RANK
stale                the previous result of the same size
oom:RANK:NBYTES      rank RANK (-1: each) has no memory to join, when its result has NBYTES
early                the call returns without any communication
hang:RANK            rank RANK never joins (it sleeps), from its 20th all_reduce on
raise:RANK           rank RANK raises instead of joining, from its 20th all_reduce on
"""

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

KIND, *ARGUMENTS = os.environ.get("FAULT", "none").split(":")
NUMBERS = [int(argument) for argument in ARGUMENTS]


class FinishedWork(dist.Work):  # type: ignore[misc]
    """Work that has already ended."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True


class FaultyGroup(dist.ProcessGroup):
    """gloo with one fault in all_reduce."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.own_rank, self.calls = rank, 0
        self.previous: dict[int, torch.Tensor] = {}

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that torch shows."""
        return "faulty"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce, with the planted fault."""
        self.calls += 1
        (tensor,) = tensors
        if KIND == "oom" and NUMBERS in ([self.own_rank, tensor.nbytes], [-1, tensor.nbytes]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if KIND == "early":
            return FinishedWork()
        if KIND in ("hang", "raise") and self.own_rank == NUMBERS[0] and self.calls >= 20:
            if KIND == "raise":
                raise RuntimeError("planted error")
            time.sleep(600)
        if KIND == "drop" and self.own_rank == NUMBERS[0]:
            tensor.zero_()
        self.gloo.allreduce([tensor], opts).wait()
        if KIND == "element" and [self.own_rank, tensor.nbytes] == NUMBERS:
            tensor[tensor.numel() // 2] += 1
        if KIND == "stale":
            result = tensor.clone()
            tensor.copy_(self.previous.get(tensor.nbytes, result))
            self.previous[tensor.nbytes] = result
        return FinishedWork()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Pass the call on to gloo."""
        self.gloo.broadcast(tensors, opts).wait()
        return FinishedWork()

    def barrier(self, opts: Any = None) -> dist.Work:
        """Pass the call on to gloo."""
        self.gloo.barrier(opts or dist.BarrierOptions()).wait()
        return FinishedWork()


dist.Backend.register_backend("faulty", FaultyGroup, devices=["cpu"])
