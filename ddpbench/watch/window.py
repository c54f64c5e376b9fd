"""The message of a watch: what one rank, or all ranks, learned. No torch.

A window covers the latest steps and collective calls, up to a fixed number of each: a message does
not grow with the steps of a job.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from ddpbench.records.schema import Finding
from ddpbench.records.watched import PHASES

# The columns of a row, in seconds: PHASES, where a rank's own time went in one step, and in the
# last column how long it was blocked in collectives. Their sum is the step.
BLOCKED = len(PHASES)
COLUMNS = BLOCKED + 1
WARM_UP = 5  # first steps of a job, which compile and allocate: not judged
STEPS, ROWS = 64, 1 << 16  # of a window, at most: of one rank, and of all ranks together
CALLS, MOST_CALLS = 512, 1 << 18  # the same, of one read
LONG_STEPS = 64
LINES = 8  # of the program
LINKS = 16
ALL = -1  # in place of a rank: all of them

Rows = npt.NDArray[np.float32]  # [steps, COLUMNS]


class JoinedCall(msgspec.Struct, frozen=True, array_like=True):
    """A collective as one or several ranks arrived at it.

    group: name and members of the group, equal in all its ranks; number: of the call in its group;
    step: in which it was called, -1 unknown; first_ns, second_ns, last_ns: the first arrival, the
    last but one, 0 for a single rank, and the last, by the system clock; last_rank: who came last;
    ranks: how many are known.
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
    ranks: int = 1


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


def add_links(links: Iterable[Link]) -> list[Link]:
    """Return one link for several of a host with the same peer and interface.

    Those that carried most come first. Each has the RTT of the connection that was used most.
    """
    sums: dict[tuple[str, str, str], Link] = {}
    for link in sorted(links, key=attrgetter("nbytes"), reverse=True):
        key = link.host, link.peer, link.interface
        if (more := sums.get(key)) is not None:
            link = structs.replace(
                more,
                nbytes=more.nbytes + link.nbytes,
                busy_seconds=more.busy_seconds + link.busy_seconds,
                transfer_seconds=more.transfer_seconds + link.transfer_seconds,
                retransmitted=more.retransmitted + link.retransmitted,
            )
        sums[key] = link
    return sorted(sums.values(), key=attrgetter("nbytes"), reverse=True)


class LongStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that took much longer than usual, in one rank or as several ranks report it.

    rank: the one with the most additional time of its own; extra: seconds by COLUMNS that it took
    longer than usual; lines: seconds of these by line of the program; ranks: how many report it;
    shared: seconds of additional time of its own that each of them has; waited: the longest
    additional wait of a rank.
    """

    number: int
    ended_ns: int
    rank: int
    extra: tuple[float, ...]
    lines: dict[str, float]
    shared: float
    waited: float
    ranks: int = 1

    @property
    def own(self) -> float:
        """Additional time of its rank's own, in seconds."""
        return sum(self.extra[:BLOCKED])


class Round(NamedTuple):
    """A round of reports: its number, and its beginning by this host's system clock."""

    number: int
    began_ns: int


class Window(msgspec.Struct, frozen=True):
    """What some ranks learned since their last window, over the steps that all of them have.

    number: of the round; hosts: host → its ranks; ended_ns: the end of the last step; rows: by
    rank, without ranks that lack the others' steps; calls: the newest last; facts: by rank, name →
    value, such as "gc_seconds"; addresses: of a rank's host, to name the peers of other hosts'
    links; findings: by rank; lines: by rank, seconds of a usual step by line of the program; last:
    the ranks' script has ended. There may be no steps but calls: a job without an optimizer.
    """

    number: int
    hosts: dict[str, list[int]]
    ended_ns: int
    first_step: int = 0
    rows: dict[int, Rows] = {}
    calls: list[JoinedCall] = []
    facts: dict[int, dict[str, float]] = {}
    links: list[Link] = []
    addresses: list[str] = []
    findings: dict[int, list[Finding]] = {}
    long_steps: list[LongStep] = []
    lines: dict[int, dict[str, float]] = {}
    last: bool = False

    @property
    def ranks(self) -> list[int]:
        """The ranks of all hosts."""
        return [rank for ranks in self.hosts.values() for rank in ranks]

    @property
    def steps(self) -> int:
        """The number of steps that all ranks in `rows` have."""
        return len(next(iter(self.rows.values()), ()))


def join_long_steps(steps: Iterable[LongStep]) -> list[LongStep]:
    """Join the reports of each step, of one rank or of several."""
    reports: dict[int, list[LongStep]] = {}
    for step in steps:
        reports.setdefault(step.number, []).append(step)
    return [
        structs.replace(
            max(same, key=attrgetter("own")),
            shared=min(step.shared for step in same),
            waited=max(step.waited for step in same),
            ranks=sum(step.ranks for step in same),
        )
        for _, same in sorted(reports.items())
    ]


def encode(window: Window) -> bytes:
    """Return a window as a message."""
    return _ENCODER.encode(window)


def decode(message: bytes) -> Window:
    """Return the window in a message. Raises msgspec.MsgspecError if it has none."""
    return _DECODER.decode(message)


def _unpack(_kind: object, data: bytes) -> Rows:
    return np.frombuffer(data, np.float32).reshape(-1, COLUMNS)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes)
_DECODER = msgspec.msgpack.Decoder(Window, dec_hook=_unpack)
