"""The message of a watch: what one rank, or all ranks, learned. No torch.

A window covers the latest steps and collective calls, up to a fixed number of each: a message does
not grow with the steps of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.ma  # np.median imports it when first called, which would be in a watched step
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


def _unpack(_kind: object, data: bytes) -> Rows:
    return np.frombuffer(data, np.float32).reshape(-1, COLUMNS)


# A window as a message, and back; without one, decode raises msgspec.MsgspecError.
encode = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes).encode
decode = msgspec.msgpack.Decoder(Window, dec_hook=_unpack).decode


def shift(window: Window, ahead_ns: int) -> Window:
    """Return a window whose times are by rank 0's clock, which is so far ahead of this one."""
    calls = [
        structs.replace(call, first_ns=call.first_ns + ahead_ns, last_ns=call.last_ns + ahead_ns)
        for call in window.calls
    ]
    return structs.replace(window, calls=calls, ended_ns=window.ended_ns + ahead_ns)


def join(windows: Sequence[Window]) -> Window:
    """Join the windows of ranks, at least one, over the steps that they have in common."""
    windows = sorted(windows, key=lambda window: window.ranks)
    members, first, end = _find_common(windows)
    hosts: dict[str, list[int]] = {}
    owners: dict[str, set[str]] = {}
    for window in windows:
        for host, ranks in window.hosts.items():
            hosts.setdefault(host, []).extend(ranks)
            for address in window.addresses:
                owners.setdefault(address, set()).add(host)
    # A link's peer is a host by name if exactly one host has its address.
    names = {address: min(hosts) for address, hosts in owners.items() if len(hosts) == 1}
    links = chain(*(window.links for window in windows))
    return Window(
        number=windows[0].number,
        hosts=hosts,
        ended_ns=int(np.median([window.ended_ns for window in members or windows])),
        first_step=first,
        rows={
            rank: rows[first - window.first_step : end - window.first_step]
            for window in members
            for rank, rows in window.rows.items()
        },
        calls=_join_calls(chain(*(window.calls for window in windows))),
        facts={rank: facts for window in windows for rank, facts in window.facts.items()},
        links=add_links(structs.replace(k, peer=names.get(k.peer, k.peer)) for k in links),
        findings={rank: own for window in windows for rank, own in window.findings.items()},
        long_steps=join_long_steps(chain(*(window.long_steps for window in windows))),
        lines={rank: lines for window in windows for rank, lines in window.lines.items()},
        last=all(window.last for window in windows),
    )


def _find_common(windows: Sequence[Window]) -> tuple[list[Window], int, int]:
    """Return the windows with common steps, the first of these, and the one behind the last.

    Windows that have few of the usual steps are left out: a rank that is stopped sends no new
    steps, and must not hide those of the others.
    """
    windows = [window for window in windows if window.steps]
    if not windows:
        return [], 0, 0
    first = np.array([window.first_step for window in windows])
    end = first + [window.steps for window in windows]
    usual_first, usual_end = np.median(first), np.median(end)
    shared = np.minimum(end, usual_end) - np.maximum(first, usual_first)
    is_member = 2 * shared >= usual_end - usual_first
    members = [window for window, chosen in zip(windows, is_member, strict=True) if chosen]
    if not members or first[is_member].max() >= end[is_member].min():
        return [], 0, 0
    return members, int(first[is_member].max()), int(end[is_member].min())


def _join_calls(calls: Iterable[JoinedCall]) -> list[JoinedCall]:
    """Join what ranks report of the same calls: those of a group with the same number.

    Returns the newest call last.
    """
    reports: dict[tuple[str, int], list[JoinedCall]] = {}
    for call in sorted(calls, key=attrgetter("last_ns")):
        reports.setdefault((call.group, call.number), []).append(call)
    joined = [
        structs.replace(
            same[-1],
            step=max(call.step for call in same),
            first_ns=same[0].first_ns,
            second_ns=same[-2].last_ns if len(same) > 1 else 0,
            ranks=len(same),
        )
        for same in reports.values()
    ]
    return sorted(joined, key=attrgetter("last_ns"))
