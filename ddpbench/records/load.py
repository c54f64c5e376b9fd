"""Use of CPU, memory and GPUs by the ranks over a span of time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """CPU, memory and GPU use of one rank, or of several, over a span. None: unknown."""

    cpu_cores: float  # CPU seconds of all threads per second, median over ranks; 1.0: one core
    most_cpu_cores: float  # of the rank that used most
    memory_nbytes: int  # resident, of the rank that uses most
    # Of the time a rank's GPU was busy, for any process; median over ranks.
    gpu_share: float | None = None
    # Allocated by torch on its GPU, including its cache; of the rank that uses most.
    gpu_memory_nbytes: int | None = None


def join_loads(loads: Sequence[Load]) -> Load | None:
    """Return the load of all ranks: medians, and the most of any; None of no loads.

    loads: of ranks, or of hosts. A rank without a GPU does not count as an idle one.
    """
    if not loads:
        return None
    shares = [load.gpu_share for load in loads if load.gpu_share is not None]
    sizes = [load.gpu_memory_nbytes for load in loads if load.gpu_memory_nbytes is not None]
    return Load(
        cpu_cores=statistics.median(load.cpu_cores for load in loads),
        most_cpu_cores=max(load.most_cpu_cores for load in loads),
        memory_nbytes=max(load.memory_nbytes for load in loads),
        gpu_share=statistics.median(shares) if shares else None,
        gpu_memory_nbytes=max(sizes, default=None),
    )
