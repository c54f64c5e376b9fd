"""Rank 0's memory of a watched job: bounded for any length of job and number of ranks.

Each rank is compared step by step with the other ranks. Their median is the base: what all ranks
do, and what slows all of them down, cancels out.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.records.watched import WatchedBalance, WatchedPause
from ddpbench.watch.judging.pauses import PauseHistory
from ddpbench.watch.window import (
    ALL,
    BLOCKED,
    COLUMNS,
    WARM_UP,
    JoinedCall,
    Link,
    Window,
    add_links,
)

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


class History:
    """The rounds of a job, summarized as they come."""

    def __init__(self) -> None:
        self.job = Samples(JOB)
        self.ranks: dict[int, Samples] = {}  # of RANK
        self.host_of: dict[int, str] = {}  # by rank, even if it did not report lately
        self._reported: dict[int, int] = {}  # rank → the latest round with its steps, if any
        self.steps = 0  # that all ranks reported, without the warm-up
        self.last_step = -1
        self.spreads: deque[float] = deque(maxlen=RECENT)  # of ranks' own time
        self.facts: deque[Mapping[int, Mapping[str, float]]] = deque(maxlen=RECENT)  # by rank
        self.rounds = 0
        # By group, operation and bytes: the newest calls, and how many there were.
        self.calls: dict[tuple[str, str, int], deque[JoinedCall]] = {}
        self.call_counts = Counter[tuple[str, str, int]]()
        self._group_sizes = Counter[str]()
        self.call_steps = 0  # in which any of these calls was made
        self._links: deque[Sequence[Link]] = deque(maxlen=RECENT)
        self._ended_ns: deque[int] = deque(maxlen=RECENT + 1)  # the end of each round
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
    def world_size(self) -> int:
        """The number of ranks that report."""
        return len(self.host_of)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        hosts: dict[str, list[int]] = {}
        for rank, host in sorted(self.host_of.items()):
            hosts.setdefault(host, []).append(rank)
        return hosts

    @property
    def links(self) -> list[Link]:
        """What each link carried in the latest rounds."""
        return add_links(chain(*self._links))

    @property
    def link_seconds(self) -> float:
        """The time in which the links carried this."""
        return (self._ended_ns[-1] - self._ended_ns[0]) * 1e-9 if self._ended_ns else 0.0

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

    def add(self, window: Window) -> None:
        """Add the window of all ranks, every few seconds."""
        self.host_of |= {rank: host for host, ranks in window.hosts.items() for rank in ranks}
        if window.rows and not self.job:
            self._reported.clear()
        if window.rows or not self.job:  # in a job without steps, all that report count
            self._reported |= dict.fromkeys(window.rows or window.ranks, self.rounds)
        new = window.first_step + window.steps - max(self.last_step + 1, WARM_UP, window.first_step)
        if new > 0:
            self._add_steps(window, new)
        self._links.append(window.links)
        self._ended_ns.append(window.ended_ns)
        self._add_calls(window.calls)
        self.facts.append(window.facts)
        self.long_steps.add(window.long_steps)
        if window.lines:
            self.lines = {**window.lines, ALL: _average_lines([*window.lines.values()])}
        self.rounds += 1

    def _add_steps(self, window: Window, new: int) -> None:
        ranks = sorted(window.rows)
        rows = np.stack([window.rows[rank][-new:] for rank in ranks])
        number = np.arange(window.first_step, window.first_step + window.steps)[-new:]
        self.job.add(number, _summarize_steps(rows, ranks, window.ended_ns))
        self.spreads.append(_find_spread(rows))
        with_own = np.concatenate([rows, rows[..., :BLOCKED].sum(axis=-1, keepdims=True)], axis=-1)
        excess = with_own - _find_median_of_others(with_own)
        most_late = np.argsort(-excess[:, :, OWN].mean(axis=1))[:TRACKED]
        for i in most_late.tolist():
            kept = np.empty(new, RANK)
            kept["row"], kept["excess"] = rows[i], excess[i]
            self.ranks.setdefault(ranks[i], Samples(RANK)).add(number, kept)
        while len(self.ranks) > 2 * TRACKED:
            del self.ranks[min(self.ranks, key=lambda rank: self.ranks[rank].number[-1])]
        self.steps += new
        self.last_step = int(number[-1])

    def _add_calls(self, calls: Sequence[JoinedCall]) -> None:
        """Add the calls that all ranks of their group report."""
        sizes = self._group_sizes
        for call in calls:
            sizes[call.group] = max(sizes[call.group], call.ranks)
        calls = [call for call in calls if call.ranks == sizes[call.group]]
        self.call_steps += len({call.step for call in calls if call.step >= 0})
        for call in calls:
            key = call.group, call.operation, call.nbytes
            if key in self.calls or len(self.calls) < KINDS:
                self.calls.setdefault(key, deque(maxlen=CALLS)).append(call)
                self.call_counts[key] += 1


def _average_lines(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    mean: dict[str, float] = {}
    for own in lines:
        for line, seconds in own.items():
            mean[line] = mean.get(line, 0.0) + seconds / len(lines)
    return mean


def format_time(seconds: float) -> str:
    """Return a time since 1970 in UTC as in the table's timeline: "14:32:10 UTC"."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))


def find_most_frequent(ranks: Sequence[int] | Floats) -> tuple[int, float]:
    """Return the rank that is listed most often, and its share. At least one is listed."""
    (rank, count), *_ = Counter(np.asarray(ranks, np.int64).tolist()).most_common(1)
    return rank, count / len(ranks)


def _find_spread(rows: Floats) -> float:
    """Return the standard deviation of own time over ranks, as the faster half shows it.

    rows: [ranks, steps, COLUMNS]. The result is in seconds; 0 if too few ranks show it.
    """
    if len(rows) < 8:
        return 0.0
    low, middle = np.percentile(np.median(rows[..., :BLOCKED].sum(axis=-1), axis=1), [10, 40])
    return float(middle - low) / 1.028


def _find_median_of_others(rows: Floats) -> Floats:
    """Return, for each rank, the median of all others. rows: [ranks, steps, columns].

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


def _summarize_steps(rows: Floats, ranks: Sequence[int], ended_ns: int) -> npt.NDArray[np.void]:
    """Return the job's samples of the latest steps: JOB[steps]. ended_ns: the end of the last."""
    job, slowest = np.empty(rows.shape[1], JOB), rows.argmax(axis=0)
    job["seconds"] = np.median(rows.sum(axis=-1, dtype=np.float64), axis=0)
    later = np.cumsum(job["seconds"][::-1])[::-1] - job["seconds"]
    job["ended_ns"] = ended_ns - later * 1e9
    job["median"] = np.median(rows, axis=0)
    job["exposed"] = rows[:, :, BLOCKED].min(axis=0)
    job["slowest"] = rows.max(axis=0)
    job["fastest"] = rows.min(axis=0)
    job["slowest_rank"] = np.array(ranks)[slowest]
    return job
