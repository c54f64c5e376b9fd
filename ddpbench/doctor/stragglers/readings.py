"""What a rank shows of its speed: the loads, and a rank's readings of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# When a rank is measured: while the other ranks of its machine rest, or with all ranks.
ALONE, TOGETHER = "alone", "together"


@dataclass(frozen=True)
class Load:
    """Work that a rank repeats."""

    name: str
    amount: float  # of one repetition, in FLOP or bytes
    unit: str  # of the rate, in 10⁹ a second: "GFLOP/s", "GB/s"
    memory: str = "host"  # of its device: whose memory that uses

    def rate(self, seconds: float) -> float:
        """Return the rate, in the unit of the load, of a repetition that takes so many seconds."""
        return self.amount / seconds / 1e9


@dataclass(frozen=True)
class Shown:
    """What one rank showed in one pass. `when` is ALONE or, unless it would mean nothing, TOGETHER.

    kept: share of the time in which the rank did not run, by reason: "throttled", "stolen" or
    "queued"; None is unknown.
    """

    seconds: dict[str, dict[str, list[float]]]  # when → load → of a repetition, a value a round
    kept: dict[str, dict[str, float | None]]  # when → reason → share
    waited_ns: list[int] = field(default_factory=list)  # in each all_reduce after equal work
    hertz: float | None = None  # of its cores
    thermal: int | None = None  # how often heat slowed its cores down
    gpu: dict[str, object] | None = None  # state of its GPU at work
    neighbours: list[str] = field(default_factory=list)  # processes on its cores, busiest first


Pass = Sequence[Shown]  # one a rank
