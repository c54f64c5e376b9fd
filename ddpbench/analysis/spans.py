"""One collective of a training step, as one rank timed it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One collective of a step. Times are ns since the step began in this rank.

    exposed_ns is how long the compute waited for the collective: in the call, and in its wait.
    """

    operation: str  # "all_gather", "reduce_scatter", "all_reduce"
    layers: str  # the group of layers: "blocks.3", or "root" for what no other group has
    phase: str  # "forward" or "backward"
    nbytes: int  # of the total buffer: all slots of an all_gather, all slices of a reduce_scatter
    begin_ns: int
    exposed_ns: int
    end_ns: int
    ranks: tuple[int, ...] = ()  # of the process group, by their numbers in the default group
