"""Rates, always derived from a summarised time; decimal, bytes a second."""

from __future__ import annotations


def algbw(nbytes: int, seconds: float) -> float:
    """S / t of nccl-tests: bytes of the total buffer a second."""
    return nbytes / seconds


def busbw(nbytes: int, seconds: float, bus_factor: float) -> float:
    """algbw × factor: what the busiest link carries under the best algorithm known.

    0 in a world of one rank, by definition of the factors of the reducing operations.
    """
    return algbw(nbytes, seconds) * bus_factor
