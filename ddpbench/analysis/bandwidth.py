"""Rates in bytes per second, always derived from a summarised time."""

from __future__ import annotations


def algbw(nbytes: int, seconds: float) -> float:
    """Return S / t of nccl-tests: bytes of the total buffer per second."""
    return nbytes / seconds


def busbw(nbytes: int, seconds: float, bus_factor: float) -> float:
    """Return algbw × factor: the rate of the busiest link under the best known algorithm.

    It is 0 for one rank, by definition of the factors of the reducing operations.
    """
    return algbw(nbytes, seconds) * bus_factor
