"""How busy the ranks were over a span of time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """CPU, memory and GPU use of the ranks' own processes over a span. None: not known."""

    cpu_cores: float  # CPU seconds per second of one rank, median over ranks; 1.0: one core
    most_cpu_cores: float  # of the rank that used most
    memory_nbytes: int  # resident, of the rank that has most
    gpu_share: float | None = None  # of the time a rank's GPU was busy, median over ranks
    gpu_memory_nbytes: int | None = None  # held by torch on its GPU, of the rank that has most
