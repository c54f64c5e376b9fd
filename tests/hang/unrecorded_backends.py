"""A backend of which torch has no record, as it has none of nccl's before its ranks are connected.

late: gloo in Python, connected by the first call, which is counted before.
"""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist


class LateGroup(dist.ProcessGroup):
    """The first call waits until all ranks have made it."""

    def __init__(self, *given: Any) -> None:
        _, rank, size, _ = self.given = given
        super().__init__(rank, size)
        self.calls = 0

    @cached_property
    def gloo(self) -> Any:
        """Connect the ranks."""
        return dist.ProcessGroupGloo(*self.given)

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that torch shows."""
        return "late"

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Pass the call on to gloo."""
        self.calls += 1
        work: dist.Work = self.gloo.allreduce(tensors, opts)
        return work

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Pass the call on to gloo."""
        self.calls += 1
        work: dist.Work = self.gloo.allgather(outputs, inputs, opts)
        return work


dist.Backend.register_backend("late", LateGroup, devices=["cpu"])
