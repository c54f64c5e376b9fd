"""Rates in bytes per second, always derived from a summarised time, and their limits."""

from __future__ import annotations

from ddpbench.records.schema import Result


def algbw(nbytes: int, seconds: float) -> float:
    """Return S / t of nccl-tests: bytes of the total buffer per second."""
    return nbytes / seconds


def busbw(nbytes: int, seconds: float, bus_factor: float) -> float:
    """Return algbw × factor: the rate of the busiest link under the best known algorithm.

    It is 0 for one rank, by definition of the factors of the reducing operations.
    """
    return algbw(nbytes, seconds) * bus_factor


def impossible(result: Result, seconds: float) -> bool:
    """Whether an operation ended before its least bytes could have moved (a hard limit)."""
    hard = result.hard_limit
    return hard is not None and seconds < result.least_nbytes / hard.bytes_per_second


def fraction(result: Result, seconds: float) -> float | None:
    """Return busbw over the calibrated rate; it may exceed 1 if the network itself reduces."""
    if result.limit is None or result.case.world_size < 2 or not result.case.nbytes:
        return None
    rate = busbw(result.case.nbytes, seconds, result.bus_factor)
    return rate / result.limit.bytes_per_second
