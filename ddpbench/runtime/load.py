"""Load of this process and its GPU; reading takes less than 1 ms and imports no torch.

A meter can be read in any thread, but only by one thread at a time.
"""

from __future__ import annotations

import sys
import time

import psutil

from ddpbench.records.load import Load
from ddpbench.runtime import gpu_facts
from ddpbench.runtime.cpu import or_none


class LoadMeter:
    """A meter that starts when created; each `read()` returns the load since the last one."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._nvml: dict[str, gpu_facts.Nvml | None] = {}  # by UUID
        self._clocks = time.perf_counter(), time.process_time()

    def read(self) -> Load:
        """Return the load of this process since the last reading, or since the start."""
        before, self._clocks = self._clocks, (time.perf_counter(), time.process_time())
        cores = (self._clocks[1] - before[1]) / (self._clocks[0] - before[0])
        memory_nbytes = int(self._process.memory_info().rss)
        # Without torch no GPU is in use.
        gpu = or_none(gpu_facts.most_used) if "torch" in sys.modules else None
        if gpu is None:
            return Load(cores, cores, memory_nbytes)
        uuid, gpu_nbytes = gpu
        if uuid not in self._nvml:
            self._nvml[uuid] = gpu_facts.open_nvml(uuid)
        nvml = self._nvml[uuid]
        share = None if nvml is None else nvml.busy_share()
        return Load(cores, cores, memory_nbytes, share, gpu_nbytes)
