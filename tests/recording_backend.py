"""A gloo backend that records the devices named in its barriers: "nccl-recording".

Its name begins with that of NCCL, which it replaces without a GPU.
"""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

NAME = "nccl-recording"


class RecordingGroup(dist.ProcessGroup):
    """gloo that keeps the `device_ids` of each barrier."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.named: list[list[int]] = []

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that torch shows."""
        return NAME

    def _get_backend(self, device: Any) -> Any:
        """Return what torch asks whether a group that is bound to a device connects at once."""
        return SimpleNamespace(supports_splitting=False)

    def barrier(self, opts: Any = None) -> Any:
        """Record the devices, and pass the call on to gloo."""
        self.named.append(list(opts.device_ids))
        return self.gloo.barrier(dist.BarrierOptions())


dist.Backend.register_backend(NAME, RecordingGroup, devices=["cpu", "cuda"])
