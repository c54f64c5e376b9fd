"""Offsets between the clocks of hosts, and whether their stamps are comparable.

Cristian's method (1989): rank 0 takes a stamp, asks, and takes a stamp of the answer. The other
clock's stamp is in between, so the round trip bounds its offset, even if the directions differ.
The shortest round trip gives the tightest bound. The bound is a hard one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.stats import Stamps

SHARE = 0.05  # of a repetition's time: largest error of stamps of different clocks


@dataclass(frozen=True)
class Ahead:
    """Bounds of how far a clock is ahead of rank 0's, in ns."""

    least_ns: int
    most_ns: int

    @property
    def middle_ns(self) -> int:
        """The correction of stamps of this clock."""
        return (self.least_ns + self.most_ns) // 2

    def off_ns(self, correction_ns: int) -> int:
        """Return the largest error of a stamp after this correction."""
        return max(self.most_ns - correction_ns, correction_ns - self.least_ns)

    def joined(self, other: Ahead) -> Ahead:
        """Return bounds that cover both: of a clock between two times, if it drifts steadily."""
        return Ahead(min(self.least_ns, other.least_ns), max(self.most_ns, other.most_ns))


def ahead(exchanges: Stamps) -> Ahead:
    """Bound the offset of a clock by the exchange with the shortest round trip.

    exchanges: int64[exchange, 3] of ns, at least one: rank 0's stamp of its question, the other
    clock's stamp, and rank 0's stamp of the answer.
    """
    best = (exchanges[:, 2] - exchanges[:, 0]).argmin()
    question, stamp, answer = map(int, exchanges[best])
    return Ahead(stamp - answer, stamp - question)


def off_ns(clocks: Sequence[Ahead], corrections_ns: Sequence[int]) -> int:
    """Return the largest error of the difference of two corrected stamps of these clocks."""
    if len(clocks) == 1:
        return 0
    return sum(sorted(map(Ahead.off_ns, clocks, corrections_ns))[-2:])


def comparable(off_seconds: float | None, seconds: float) -> bool:
    """Whether stamps of different ranks are comparable within a repetition of this length.

    off_seconds: their largest error; None if unknown.
    """
    return off_seconds is not None and off_seconds <= SHARE * seconds


def clocks(facts: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Group the ranks by the clock that they read, in order of the first rank of each group.

    facts: of each rank. A clock belongs to a boot and a time namespace. If the boot is unknown, the
    host's name replaces it.
    """
    by_clock: dict[object, list[int]] = {}
    for rank, fact in enumerate(facts):
        key = fact.get("boot_id") or fact.get("hostname"), fact.get("time_namespace")
        by_clock.setdefault(key, []).append(rank)
    return list(by_clock.values())
