"""The messages of a watch: from a rank to its host's leader, from there to rank 0. No torch.

A window covers the latest steps and collective calls, up to a fixed number of each. So a message
does not grow with the steps of a job, and a host's message does not grow with its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from ddpbench.records.load import Load
from ddpbench.records.schema import Finding
from ddpbench.records.watched import PHASES

# The columns of a row, in seconds: PHASES, where a rank's own time went in one step, and in the
# last column how long it was blocked in collectives. Their sum is the step.
BLOCKED = len(PHASES)
COLUMNS = BLOCKED + 1
WARM_UP = 5  # first steps of a job, which compile and allocate: not judged
STEPS = 64  # of a window
CALLS = 512
LONG_STEPS = 64
LINES = 8  # of the program
RANKS = 8  # whose rows a host passes on: those that look slowest
HOST_CALLS = 256  # that a host passes on
LINKS = 16
ROUND_RANKS = 256  # whose rows are in a round: again those that look slowest

Rows = npt.NDArray[np.float32]  # [steps, COLUMNS]
Values = dict[str, tuple[int, float]]  # what a script computes: name → step, value


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A rank's arrival at a collective.

    group: name and members of the group, equal in all its ranks; number: of the call in its group;
    entered_ns: by the system clock of the rank's host; step: in which it was called, -1 unknown;
    wire_ns: this rank's time in the call with its wait for the others, -1 unknown: the least over
    the ranks is the transfer.
    """

    group: str
    number: int
    operation: str
    nbytes: int
    entered_ns: int
    step: int = -1
    wire_ns: int = -1


class Link(msgspec.Struct, frozen=True, array_like=True):
    """Connections of one host to another, since the last window.

    nbytes: acknowledged by the peer; busy_seconds: while data was on its way; transfer_seconds: the
    same without the time by which acknowledgements were delayed, as far as the kernel knows.
    """

    host: str
    peer: str
    interface: str
    nbytes: int
    busy_seconds: float
    rtt_seconds: float
    retransmitted: int
    transfer_seconds: float = 0.0


class LongStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that took much longer than usual, in one rank or as several ranks report it.

    rank: the one with the most additional time of its own; extra: seconds by COLUMNS that it took
    longer than usual; lines: seconds of these by line of the program; ranks: how many report it;
    shared: seconds of additional time of its own that each of them has; waited, waits_at: the
    longest additional wait of a rank, and its line; weight: how many long steps it stands for.
    """

    number: int
    ended_ns: int
    rank: int
    extra: tuple[float, ...]
    lines: dict[str, float]
    shared: float
    waited: float
    waits_at: str = ""
    ranks: int = 1
    weight: float = 1.0

    @property
    def own(self) -> float:
        """Additional time of its rank's own, in seconds."""
        return sum(self.extra[:BLOCKED])


class RankWindow(msgspec.Struct, frozen=True):
    """What a rank learned since its last window.

    rows: float32 [steps, COLUMNS], the steps from first_step on; ended_ns: end of the last step, by
    the system clock; facts: name → value, such as "gc_seconds"; values: the newest of each name;
    long_steps: the longest, at most LONG_STEPS; lines: seconds of a usual step by line of the
    program, the LINES with the most; last: the rank's script has ended.
    """

    rank: int
    first_step: int
    rows: bytes
    ended_ns: int
    calls: list[Call] = []
    facts: dict[str, float] = {}
    links: list[Link] = []
    load: Load | None = None
    values: Values = {}
    findings: list[Finding] = []
    long_steps: list[LongStep] = []
    lines: dict[str, float] = {}
    last: bool = False


class JoinedCall(msgspec.Struct, frozen=True, array_like=True):
    """A collective as the ranks of one host, or all ranks, arrived at it, by rank 0's clock.

    second_ns: the last arrival but one; last_rank: who came last; ranks: how many are known.
    """

    group: str
    number: int
    operation: str
    nbytes: int
    step: int
    first_ns: int
    second_ns: int
    last_ns: int
    last_rank: int
    ranks: int
    wire_ns: int = -1


class HostWindow(msgspec.Struct, frozen=True):
    """The windows of one host's ranks, joined over the steps that all of them have.

    ranks: those that have these steps or have ended, as runs of numbers, each its first and last;
    median: float32 [steps, COLUMNS], over those with steps; least_blocked: float32 [steps]; rows:
    of at most RANKS ranks; calls: a table of `matching.CALL` by rank 0's clock, in which groups and
    operations are positions in the two lists; facts: of these ranks and, under -1, the median over
    all ranks of the host; values: medians over its ranks.
    """

    host: str
    ranks: list[tuple[int, int]]
    first_step: int
    median: bytes
    least_blocked: bytes
    rows: dict[int, bytes]
    ended_ns: int
    calls: bytes = b""
    groups: list[str] = []
    operations: list[str] = []
    facts: dict[int, dict[str, float]] = {}
    links: list[Link] = []
    addresses: list[str] = []  # of the host, to name the peers of other hosts' links
    ahead_ns: int = 0  # the host's clock against rank 0's; its times are corrected by it
    bound_ns: int = 0  # how far they may still be off
    load: Load | None = None
    values: Values = {}
    findings: dict[int, list[Finding]] = {}  # by rank
    long_steps: list[LongStep] = []
    lines: dict[int, dict[str, float]] = {}  # by rank; under -1 the means over all ranks
    last: bool = False


@dataclass(frozen=True)
class Round:
    """What all hosts reported at one time, over the steps that all of them have.

    rows: of at most ROUND_RANKS ranks, those that look slowest; hosts: host → its ranks; medians:
    host → [steps, COLUMNS]; least_blocked: [steps], over all ranks; ended_ns: end of the last step,
    by rank 0's clock. There may be no steps but calls: a job without an optimizer.
    """

    first_step: int
    ended_ns: int
    rows: Mapping[int, Rows]
    hosts: Mapping[str, Sequence[int]]
    medians: Mapping[str, Rows]
    least_blocked: npt.NDArray[np.float32]
    calls: Sequence[JoinedCall] = ()
    facts: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    host_facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    links: Sequence[Link] = ()  # their peers are hosts by name where known
    load: Load | None = None  # its medians are over hosts, of the medians over their ranks
    values: Values = field(default_factory=dict)
    long_steps: Sequence[LongStep] = ()
    lines: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # as of a host


def join_long_steps(steps: Iterable[LongStep]) -> list[LongStep]:
    """Join the reports of each step, of one rank or of several."""
    reports: dict[int, list[LongStep]] = {}
    for step in steps:
        reports.setdefault(step.number, []).append(step)
    return [_join(same) for _, same in sorted(reports.items())]


def _join(same: Sequence[LongStep]) -> LongStep:
    waits = max(same, key=lambda step: step.waited)
    return structs.replace(
        max(same, key=lambda step: step.own),
        shared=min(step.shared for step in same),
        waited=waits.waited,
        waits_at=waits.waits_at,
        ranks=sum(step.ranks for step in same),
        weight=max(step.weight for step in same),
    )


def pack_rows(rows: npt.NDArray[np.float32]) -> bytes:
    """Return an array as bytes."""
    return np.ascontiguousarray(rows, dtype=np.float32).tobytes()


def unpack_rows(data: bytes) -> Rows:
    """Return the rows in a message: [steps, COLUMNS]."""
    return np.frombuffer(data, dtype=np.float32).reshape(-1, COLUMNS)
