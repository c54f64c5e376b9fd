"""The record of a watched job. Its size is bounded for any length of job and number of ranks.

Seconds are of one step. A rank's own time is divided into phases; `blocked` is the time that it was
blocked in collectives: waiting for other ranks, and for the transfer itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpbench.records.wording import counted

PHASES = ("input", "forward", "backward", "optimizer", "other")
COLUMNS = (*PHASES, "blocked")  # of every `seconds` below; they add up to the step
MOST_RANKS, MOST_COLLECTIVES, MOST_MOMENTS, MOST_LINKS = 32, 32, 200, 64
MOST_PAUSES = 12


@dataclass(frozen=True)
class Moment:
    """The median step of a part of the run: a point of the timeline."""

    ended: float  # of its last step, in seconds since 1970 by rank 0's clock
    step: int  # the last one
    step_seconds: float
    seconds: tuple[float, ...]  # of the median rank, by COLUMNS
    exposed_seconds: float  # the least that any rank was blocked


@dataclass(frozen=True)
class WatchedRank:
    """The median step of one rank. The straggler has the most own time and is blocked least."""

    rank: int
    host: str
    seconds: tuple[float, ...]  # by COLUMNS
    steps: int  # number of steps in this median
    mean_seconds: tuple[float, ...] = ()  # by COLUMNS; means over all steps


@dataclass(frozen=True)
class WatchedCollective:
    """All calls of one operation and size on one group."""

    group: str
    ranks: int  # of the group
    operation: str
    nbytes: int  # of one call
    calls: float  # in one step; without steps, in the whole job
    wait_seconds: float  # how long the earliest rank waited for the latest, median over calls
    last_rank: int | None  # the rank that came last most often; None: none exceeds the noise
    last_share: float  # share of the calls in which it did


@dataclass(frozen=True)
class WatchedLink:
    """The traffic of the job's connections from one host to another."""

    host: str
    peer: str
    interface: str
    nbytes: int  # acknowledged by the peer
    bytes_per_second: float | None  # while data was in flight; None: too little data
    rtt_seconds: float | None
    retransmitted: int  # segments


@dataclass(frozen=True)
class WatchedPause:
    """Steps that took much longer than usual, all for the same reason."""

    rank: int | None  # the rank that causes it; None: all ranks take longer
    phase: str  # of COLUMNS, in which it takes longer
    line: str  # of the program: "train.py:31 torch.save"; "": unknown
    count: int
    every: int  # steps from one to the next; 0: it varies
    first_step: int
    seconds: float  # longer than a usual step, median
    longest_seconds: float
    mean_seconds: float  # per step, over all steps of the job


@dataclass(frozen=True)
class WatchedBalance:
    """The wall time of rank 0 while it was watched, divided into parts that add up to it.

    A long step takes at least 1.5 times as long as usual; its extra time is a part of its own.
    """

    before_seconds: float  # until the first step ends
    steps: int  # after it
    usual_seconds: float  # of all steps, counting each long one as a usual one
    long_steps: int
    longer_seconds: float  # extra time of the long steps, beyond a usual step
    after_seconds: float  # since the last step

    def parts(self) -> dict[str, float]:
        """Return the parts by name, in seconds."""
        return {
            "until the first step ended": self.before_seconds,
            f"{counted(self.steps, 'step')} of usual length": self.usual_seconds,
            f"extra time of {counted(self.long_steps, 'long step')}": self.longer_seconds,
            "after the last step": self.after_seconds,
        }

    @property
    def stepping_seconds(self) -> float:
        """Return the time from the end of the first step to the end of the last."""
        return self.usual_seconds + self.longer_seconds

    @property
    def mean_seconds(self) -> float:
        """The mean of all steps."""
        return self.stepping_seconds / self.steps

    @property
    def wall_seconds(self) -> float:
        """The sum of all parts."""
        return self.before_seconds + self.stepping_seconds + self.after_seconds


@dataclass(frozen=True)
class Watched:
    """The stored record of a watched job. Without steps, only hosts, collectives and links."""

    hosts: dict[str, int]  # host → its ranks
    steps: int = 0  # that all ranks reported
    last_step: int = -1  # its number, counted from the start of the job
    step_seconds: float = 0.0  # median over steps
    median_seconds: tuple[float, ...] = ()  # of the median rank, by COLUMNS; median over steps
    exposed_seconds: float = 0.0  # the least that any rank was blocked, median
    moments: tuple[Moment, ...] = ()  # the timeline, at most MOST_MOMENTS, oldest first
    ranks: tuple[WatchedRank, ...] = ()  # those that look slowest, at most MOST_RANKS
    collectives: tuple[WatchedCollective, ...] = ()  # the longest waits, at most MOST_COLLECTIVES
    links: tuple[WatchedLink, ...] = ()  # at most MOST_LINKS
    balance: WatchedBalance | None = None
    pauses: tuple[WatchedPause, ...] = ()  # the most costly first, at most MOST_PAUSES
