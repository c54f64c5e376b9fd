"""Rank 0's memory of a watched job: bounded for any length of job and number of ranks.

Each rank is compared step by step with the other ranks. Their median is the base: what all ranks
do, and what slows all of them down, cancels out.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.records.watched import WatchedBalance, WatchedPause
from ddpbench.watch.judging.pauses import PauseHistory
from ddpbench.watch.window import BLOCKED, COLUMNS, RANKS, WARM_UP, JoinedCall, Link, Window

Floats = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.int64]

NEWEST = 1024  # steps that are all kept
OLDER = 1024  # steps kept of those before
GOLDEN = 0x9E3779B9  # 2**32 / the golden ratio: its multiples are evenly spread at any scale
TRACKED = 64  # ranks whose steps are kept
RECENT = 12  # rounds whose facts are kept
SILENT = 24  # rounds without a report of a rank: of hosts, some report in fewer
KINDS = 128  # of calls that are counted apart
CALLS = 256  # of one kind, the newest
LINKS = 16384
FADE = 0.95  # of what a link carried, from one of its rounds to the next

# The samples of the job. slowest, fastest: of the ranks, by COLUMNS, and who is slowest; exposed:
# the least that any rank was blocked.
JOB = np.dtype(
    [
        ("ended_ns", "f8"),
        ("seconds", "f8"),
        ("median", "f8", (COLUMNS,)),
        ("exposed", "f8"),
        ("slowest", "f8", (COLUMNS,)),
        ("fastest", "f8", (COLUMNS,)),
        ("slowest_rank", "f8", (COLUMNS,)),
    ]
)
# The samples of a tracked rank: its row, and how much larger than the base each of its values is;
# the last value is its own time in all phases.
RANK = np.dtype([("row", "f4", (COLUMNS,)), ("excess", "f4", (COLUMNS + 1,))])
OWN = COLUMNS


class Samples:
    """Values of steps, oldest first: the newest all, older ones ever more thinly.

    Of older steps one in 2**n is kept, whatever period the job has. number: int64[kept], of the
    step; values: [kept], of the given dtype; steps: how many were added.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.number: Integers = np.empty(0, np.int64)
        self.values: npt.NDArray[Any] = np.empty(0, dtype)
        self.steps = self._thinned = 0

    def __len__(self) -> int:
        return len(self.number)

    def add(self, number: Integers, values: npt.NDArray[Any]) -> None:
        """Add steps that are newer than all before."""
        self.steps += len(number)
        self.number = np.concatenate([self.number, number])
        self.values = np.concatenate([self.values, values.astype(self.values.dtype)])
        if len(self) > NEWEST:
            while len(older := self._thin(self.number[:-NEWEST])) > OLDER:
                self._thinned += 1
            kept = np.concatenate([older, np.arange(len(self) - NEWEST, len(self))])
            self.number, self.values = self.number[kept], self.values[kept]

    def _thin(self, number: Integers) -> Integers:
        """Return the indices of those that stay among older steps."""
        return np.flatnonzero(number * GOLDEN % 2**32 < 2**32 >> self._thinned)

    def evenly(self) -> Integers:
        """Return the indices of kept steps that are spread evenly over all steps."""
        return self._thin(self.number)


@dataclass
class Calls:
    """The newest calls of one operation and size on one group. count: of all calls seen."""

    ranks: int = 0
    count: int = 0
    newest: deque[JoinedCall] = field(default_factory=lambda: deque(maxlen=CALLS))

    def add(self, call: JoinedCall) -> None:
        """Add a call that is newer than all before."""
        self.ranks = max(self.ranks, call.ranks)
        self.count += 1
        self.newest.append(call)

    def find_last(self) -> tuple[int, float]:
        """Return the rank that comes last most often, and in which share of the calls."""
        return find_most_frequent([call.last_rank for call in self.newest])


class History:
    """The rounds of a job, summarized as they come."""

    def __init__(self) -> None:
        self.job = Samples(JOB)
        self.ranks: dict[int, Samples] = {}  # of RANK
        self.hosts: Mapping[str, Sequence[int]] = {}
        self._reported: dict[int, int] = {}  # rank → the latest round with its steps, if any
        self.steps = 0  # that all ranks reported, without the warm-up
        self.last_step = -1
        self.spreads: deque[float] = deque(maxlen=RECENT)  # of ranks' own time
        self.facts: deque[Mapping[int, Mapping[str, float]]] = deque(maxlen=RECENT)
        self.host_facts: deque[Mapping[str, Mapping[str, float]]] = deque(maxlen=RECENT)
        self.rounds = 0
        self.calls: dict[tuple[str, str, int], Calls] = {}  # by group, operation and bytes
        self.call_steps = 0  # in which any of these calls was made
        self.links: dict[tuple[str, str], Link] = {}  # what they carried; older rounds fade
        self.link_seconds = 0.0  # in which they did, fading alike
        self._ended_ns = 0
        self.long_steps = PauseHistory()
        self.lines: Mapping[int, Mapping[str, float]] = {}  # as in a Window, the newest
        self.balance: WatchedBalance | None = None  # of rank 0

    @property
    def pauses(self) -> tuple[WatchedPause, ...]:
        """The kinds of pauses, those that cost most first."""
        steps = self.balance.steps if self.balance is not None else self.last_step + 1
        return self.long_steps.summarize(max(1, steps))

    @property
    def mean_seconds(self) -> float:
        """The mean time of a step; there is at least one."""
        if self.balance is not None:
            return self.balance.mean_seconds
        return float(self.job.values["seconds"][self.job.evenly()].mean())

    @property
    def host_of(self) -> dict[int, str]:
        """The host of each rank."""
        return {rank: host for host, ranks in self.hosts.items() for rank in ranks}

    @property
    def world_size(self) -> int:
        """The number of ranks that report."""
        return sum(map(len, self.hosts.values()))

    def find_end(self, step: int) -> float:
        """Return when a step ended, in seconds since 1970; between kept steps interpolated."""
        return float(np.interp(step, self.job.number, self.job.values["ended_ns"])) * 1e-9

    def describe_cost(self, seconds: float) -> str:
        """Return what a delay of so many seconds per step costs."""
        share = seconds / self.mean_seconds
        return f"{seconds * 1e3:.3g} ms per step on average, {share:.1%} of the job's time"

    def find_missing(self, world_size: int) -> list[int]:
        """Return the ranks without a report that can be compared, in any recent round."""
        since = self.rounds - SILENT
        return [rank for rank in range(world_size) if self._reported.get(rank, -SILENT) < since]

    def add(self, window: Window, calls: Sequence[JoinedCall] = ()) -> None:
        """Add the window of all ranks, every few seconds, and the calls that are new in it."""
        self._add_hosts(window.hosts)
        self._note_reports(window)
        skipped = max(self.last_step, WARM_UP - 1) + 1 - window.first_step
        new = len(window.least_blocked) - max(skipped, 0)
        if new > 0 and window.rows:
            self._add_steps(window, new)
        self._add_links(window)
        self._add_calls(calls)
        self.facts.append({rank: window.facts[rank] for rank in self.ranks if rank in window.facts})
        self.host_facts.append(window.host_facts)
        self.long_steps.add(window.long_steps)
        self.lines = window.lines or self.lines
        self.rounds += 1

    def _add_hosts(self, hosts: Mapping[str, Sequence[int]]) -> None:
        """Keep hosts that did not report this time, unless others now have their ranks."""
        reported = {rank for ranks in hosts.values() for rank in ranks}
        silent = {h: r for h, r in self.hosts.items() if h not in hosts and not reported & {*r}}
        if silent:
            hosts = dict(sorted({**silent, **hosts}.items(), key=lambda host: min(host[1])))
        self.hosts = hosts

    def _note_reports(self, window: Window) -> None:
        """Note whose steps this round has; in a job without steps, who has reported."""
        if window.rows and not self.job:
            self._reported.clear()
        if window.rows or not self.job:
            known = window.rows if window.rows and _has_all_rows(window) else window.ranks
            self._reported |= dict.fromkeys(known, self.rounds)

    def _add_steps(self, window: Window, new: int) -> None:
        known = sorted(window.rows)
        rows = np.stack([window.rows[rank][-new:] for rank in known])
        medians = np.stack([median[-new:] for median in window.medians.values()])
        number = np.arange(len(window.least_blocked))[-new:] + window.first_step
        if _has_all_rows(window):  # then ranks are compared with ranks, else with other hosts
            peers, place, averaged = rows, np.arange(len(known)), 1.0
        else:
            peers, place = medians, _find_places(window, known)
            averaged = max(len(window.hosts[host]) for host in window.medians) ** 0.5 / 1.2533
        self.job.add(number, _summarize_steps(window, known, rows, peers))
        self.spreads.append(_find_spread(peers) * max(1.0, averaged))
        excess = _add_own(rows) - _find_median_of_others(_add_own(peers))[place]
        most_late = np.argsort(-excess[:, :, OWN].mean(axis=1))[:TRACKED]
        for i in most_late.tolist():
            kept = np.empty(new, RANK)
            kept["row"], kept["excess"] = rows[i], excess[i]
            self.ranks.setdefault(known[i], Samples(RANK)).add(number, kept)
        while len(self.ranks) > 2 * TRACKED:
            del self.ranks[min(self.ranks, key=lambda rank: self.ranks[rank].number[-1])]
        self.steps += new
        self.last_step = int(number[-1])

    def _add_links(self, window: Window) -> None:
        self.links = {pair: link.scale(FADE) for pair, link in self.links.items()}
        for link in window.links:
            pair = link.host, link.peer
            if pair in self.links:
                self.links[pair] = link.add(self.links[pair])
            elif len(self.links) < LINKS:
                self.links[pair] = link
        if self._ended_ns:
            passed = max(0, window.ended_ns - self._ended_ns) * 1e-9
            self.link_seconds = self.link_seconds * FADE + passed
        self._ended_ns = window.ended_ns

    def _add_calls(self, calls: Sequence[JoinedCall]) -> None:
        self.call_steps += len({call.step for call in calls if call.step >= 0})
        for call in calls:
            key = call.group, call.operation, call.nbytes
            if key in self.calls or len(self.calls) < KINDS:
                self.calls.setdefault(key, Calls()).add(call)


def format_time(seconds: float) -> str:
    """Return a time since 1970 in UTC as in the table's timeline: "14:32:10 UTC"."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))


def _has_all_rows(window: Window) -> bool:
    """Return whether a window has the rows of all ranks, not only of those that look slowest."""
    sizes = [len(window.hosts[host]) for host in window.medians]
    return max(sizes) <= RANKS and sum(sizes) <= TRACKED


def _find_places(window: Window, known: Sequence[int]) -> Integers:
    """Return the position of each known rank's host in the window's medians."""
    hosts = {rank: i for i, host in enumerate(window.medians) for rank in window.hosts[host]}
    return np.array([hosts[rank] for rank in known])


def find_most_frequent(ranks: Sequence[int] | Floats) -> tuple[int, float]:
    """Return the rank that is listed most often, and its share. At least one is listed."""
    (rank, count), *_ = Counter(np.asarray(ranks, np.int64).tolist()).most_common(1)
    return rank, count / len(ranks)


def _find_spread(rows: Floats) -> float:
    """Return the standard deviation of own time over ranks or hosts, as the faster half shows it.

    rows: [ranks or hosts, steps, COLUMNS]. The result is in seconds; 0 if too few show it.
    """
    if len(rows) < 8:
        return 0.0
    low, middle = np.percentile(np.median(rows[..., :BLOCKED].sum(axis=-1), axis=1), [10, 40])
    return float(middle - low) / 1.028


def _add_own(rows: Floats) -> Floats:
    """Append own time, which is all but blocked time, as a last column."""
    own = rows[..., :BLOCKED].sum(axis=-1, keepdims=True)
    return np.concatenate([rows, own], axis=-1)


def _find_median_of_others(rows: Floats) -> Floats:
    """Return, for each rank or host, the median of all others. rows: [ranks, steps, columns].

    Each rank's level over these steps is compared apart: else one straggler would make the median
    of three the larger of the other two, whatever the noise. One alone is its own base.
    """
    if len(rows) == 1:
        return rows
    levels = np.median(rows, axis=1, keepdims=True)
    return _leave_one_out(rows - levels) + _leave_one_out(levels)


def _leave_one_out(rows: Floats) -> Floats:
    """Return the medians over the first axis without each of its entries; at least two."""
    count = len(rows)
    order = np.sort(rows, axis=0)
    place = np.argsort(np.argsort(rows, axis=0), axis=0)
    low, high = (count - 2) // 2, (count - 1) // 2  # the middle of the others
    lower = np.where(place <= low, order[low + 1], order[low])
    upper = np.where(place <= high, order[high + 1], order[high])
    return np.asarray((lower + upper) / 2)


def _summarize_steps(
    window: Window, known: Sequence[int], rows: Floats, peers: Floats
) -> npt.NDArray[np.void]:
    """Return the job's samples of these steps: JOB[steps].

    rows: of the known ranks; peers: the same, or hosts' medians where not all ranks are known.
    """
    new = rows.shape[1]
    job, slowest = np.empty(new, JOB), rows.argmax(axis=0)
    job["seconds"] = np.median(peers.sum(axis=-1, dtype=np.float64), axis=0)
    later = np.cumsum(job["seconds"][::-1])[::-1] - job["seconds"]
    job["ended_ns"] = window.ended_ns - later * 1e9
    job["median"] = np.median(peers, axis=0)
    job["exposed"] = window.least_blocked[-new:]
    job["slowest"] = np.take_along_axis(rows, slowest[None], axis=0)[0]
    job["fastest"] = np.minimum(rows.min(axis=0), peers.min(axis=0))
    job["slowest_rank"] = np.array(known)[slowest]
    return job
