"""A gloo backend with the fault that FAULT names: `--import faulty_backend --backend faulty`.

element:RANK:NBYTES  one element of rank RANK's result is wrong when it has NBYTES
drop:RANK            a sum that leaves out rank RANK
stale                the previous result of the same size again
early                no communication at all
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


class Done(dist.Work):  # type: ignore[misc]
    """A finished work."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Nothing to wait for."""
        return True


class Faulty(dist.ProcessGroup):
    """gloo, with one fault in all_reduce."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.mine, self.calls = rank, 0
        self.before: dict[int, torch.Tensor] = {}

    def getBackendName(self) -> str:  # noqa: N802
        """What torch asks for."""
        return "faulty"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """The reduction, spoilt."""
        self.calls += 1
        (tensor,) = tensors
        if KIND == "early":
            return Done()
        if KIND in ("hang", "raise") and self.mine == NUMBERS[0] and self.calls >= 20:
            if KIND == "raise":
                raise RuntimeError("planted error")
            time.sleep(600)
        if KIND == "drop" and self.mine == NUMBERS[0]:
            tensor.zero_()
        self.gloo.allreduce([tensor], opts).wait()
        if KIND == "element" and [self.mine, tensor.nbytes] == NUMBERS:
            tensor[tensor.numel() // 2] += 1
        if KIND == "stale":
            fresh = tensor.clone()
            tensor.copy_(self.before.get(tensor.nbytes, fresh))
            self.before[tensor.nbytes] = fresh
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """gloo's."""
        self.gloo.broadcast(tensors, opts).wait()
        return Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        """gloo's."""
        self.gloo.barrier(opts or dist.BarrierOptions()).wait()
        return Done()


dist.Backend.register_backend("faulty", Faulty, devices=["cpu"])
