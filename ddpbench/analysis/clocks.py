"""How far clocks of different hosts are apart, and when their stamps may be compared all the same.

Cristian's method (1989): rank 0 stamps, asks, and stamps the answer; the other clock's stamp was
made in between, so what that clock is ahead is known to within the round trip, whatever the way
there and the way back took. The shortest round trip tells most, and its bound is a hard one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.stats import Stamps

SHARE = 0.05  # of a repetition's time: what stamps of different clocks may be off by at most


@dataclass(frozen=True)
class Ahead:
    """What a clock is ahead of rank 0's, in ns: at least, and at most."""

    least_ns: int
    most_ns: int

    @property
    def middle_ns(self) -> int:
        """What stamps of it are corrected by."""
        return (self.least_ns + self.most_ns) // 2

    def off_ns(self, correction_ns: int) -> int:
        """What a stamp of it, so corrected, may be off by."""
        return max(self.most_ns - correction_ns, correction_ns - self.least_ns)

    def joined(self, other: Ahead) -> Ahead:
        """All that either admits: where the clock was between two times, if it drifts steadily."""
        return Ahead(min(self.least_ns, other.least_ns), max(self.most_ns, other.most_ns))


def ahead(exchanges: Stamps) -> Ahead:
    """What the exchange with the shortest round trip says of a clock.

    exchanges: int64[exchange, 3] of ns: rank 0's stamp when it asked, the other clock's stamp, rank
    0's stamp when it had the answer. At least one.
    """
    best = (exchanges[:, 2] - exchanges[:, 0]).argmin()
    asked, stamp, answered = (int(each) for each in exchanges[best])
    return Ahead(stamp - answered, stamp - asked)


def off_ns(clocks: Sequence[Ahead], corrections_ns: Sequence[int]) -> int:
    """What two corrected stamps of these clocks may be off by against each other, at most."""
    if len(clocks) == 1:
        return 0
    return sum(sorted(map(Ahead.off_ns, clocks, corrections_ns))[-2:])


def comparable(off_seconds: float | None, seconds: float) -> bool:
    """Whether stamps of different ranks may be compared within a repetition of so many seconds.

    off_seconds: what they may be off by; None: not known.
    """
    return off_seconds is not None and off_seconds <= SHARE * seconds


def clocks(facts: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The ranks that read the same clock, by clock: rank 0's, then in order of their first ranks.

    facts: of each rank; a clock is that of a boot and a time namespace. Where the boot is not
    known, the host's name stands for it.
    """
    by_clock: dict[object, list[int]] = {}
    for rank, its in enumerate(facts):
        key = its.get("boot_id") or its.get("hostname"), its.get("time_namespace")
        by_clock.setdefault(key, []).append(rank)
    return list(by_clock.values())
