"""Limits of speed, as pure functions: times below them are impossible."""

from __future__ import annotations

from ddpbench.analysis import bandwidth
from ddpbench.records.schema import Result


def impossible(result: Result, seconds: float) -> bool:
    """Whether an operation ended before its least bytes could have moved (a hard limit)."""
    hard = result.hard_limit
    return hard is not None and seconds < result.least_nbytes / hard.bytes_per_second


def fraction(result: Result, seconds: float) -> float | None:
    """Return busbw over the calibrated rate; it may exceed 1 if the network itself reduces."""
    if result.limit is None or result.case.world_size < 2 or not result.case.nbytes:
        return None
    rate = bandwidth.busbw(result.case.nbytes, seconds, result.bus_factor)
    return rate / result.limit.bytes_per_second
