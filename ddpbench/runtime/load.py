"""How busy this process and its GPU are; reading takes less than 1 ms and imports no torch.

A meter can be read in any thread, but by one at a time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from ddpbench.records.load import Load
from ddpbench.runtime import gpu_facts
from ddpbench.runtime.cpu import or_none


@dataclass(frozen=True)
class RankLoad:
    """The load of one process since the last reading. None: no GPU is in use, or not known."""

    cpu_cores: float  # CPU seconds of all its threads per second; 1.0: one core
    memory_nbytes: int  # resident now
    gpu_share: float | None = None  # of the time the GPU in use was busy, for any process
    gpu_memory_nbytes: int | None = None  # that torch holds on that GPU, its cache included


class LoadMeter:
    """A meter that starts when constructed; each `read()` returns the load since the last one."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._nvml: dict[str, gpu_facts.Nvml | None] = {}  # by UUID
        self._clocks = time.perf_counter(), time.process_time()

    def read(self) -> RankLoad:
        """Return the load since the last reading, or since the start."""
        before, self._clocks = self._clocks, (time.perf_counter(), time.process_time())
        seconds, cpu_seconds = self._clocks[0] - before[0], self._clocks[1] - before[1]
        memory_nbytes = int(self._process.memory_info().rss)
        # Without torch no GPU is in use.
        gpu = or_none(gpu_facts.most_used) if "torch" in sys.modules else None
        share = None if gpu is None else self._gpu_share(gpu[0], time.time() - seconds)
        return RankLoad(
            cpu_seconds / seconds, memory_nbytes, share, None if gpu is None else gpu[1]
        )

    def _gpu_share(self, uuid: str, since: float) -> float | None:
        if uuid not in self._nvml:
            self._nvml[uuid] = gpu_facts.open_nvml(uuid)
        nvml = self._nvml[uuid]
        return None if nvml is None else nvml.busy_share(since)


def over_ranks(loads: Sequence[RankLoad]) -> Load:
    """Return the load of all ranks; at least one."""
    cores = [load.cpu_cores for load in loads]
    shares = [load.gpu_share for load in loads if load.gpu_share is not None]
    return Load(
        cpu_cores=statistics.median(cores),
        most_cpu_cores=max(cores),
        memory_nbytes=max(load.memory_nbytes for load in loads),
        gpu_share=statistics.median(shares) if shares else None,
        gpu_memory_nbytes=max(
            (load.gpu_memory_nbytes for load in loads if load.gpu_memory_nbytes is not None),
            default=None,
        ),
    )
