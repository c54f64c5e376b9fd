"""What rank 0 remembers of a watched job: bounded, however long it runs and on however many ranks.

Each rank is compared step by step with the other ranks. Their median is the base: what all ranks
do, and what slows all of them down, cancels out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.records.load import Load
from ddpbench.records.watched import MOST_VALUES, WatchedBalance, WatchedPause
from ddpbench.watch.judging import samples
from ddpbench.watch.judging.pauses import PauseHistory
from ddpbench.watch.judging.samples import Samples
from ddpbench.watch.window import BLOCKED, COLUMNS, RANKS, WARM_UP, JoinedCall, Link, Window

Floats = npt.NDArray[np.float64]
FloatsOrLess = npt.NDArray[np.floating[Any]]

TRACKED = 64  # ranks whose steps are kept
RECENT = 12  # rounds whose facts are kept
SILENT = 24  # rounds without a report of a rank: of hosts, some report in fewer
KINDS = 128  # of calls that are told apart
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
# The samples of a tracked rank: its row, and how much larger than the base each of its values, and
# its own time in all phases, is.
RANK = np.dtype([("row", "f4", (COLUMNS,)), ("excess", "f4", (COLUMNS,)), ("own", "f4")])
# What is read once a round, and when: of a load the wall time in seconds, of a value the step.
LOAD = np.dtype([("when", "f8"), ("read", "f8", (len(fields(Load)),))])
VALUE = np.dtype([("when", "f8"), ("read", "f8", (1,))])


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

    @property
    def last_ranks(self) -> list[int]:
        """The rank that came last to each call."""
        return [call.last_rank for call in self.newest]

    @property
    def wires(self) -> list[float]:
        """The seconds of the transfers that are known."""
        return [call.wire_ns * 1e-9 for call in self.newest if call.wire_ns >= 0]


class History:
    """The rounds of a job, summarized as they come."""

    def __init__(self) -> None:
        self.job = samples.empty(JOB)
        self.ranks: dict[int, Samples] = {}
        self.hosts: Mapping[str, Sequence[int]] = {}
        self._heard: dict[int, int] = {}  # rank → the latest round with its steps, if there are any
        self.steps = 0  # that all ranks reported, without the warm-up
        self.last_step = -1
        self.spreads: deque[float] = deque(maxlen=RECENT)  # of ranks' own time, if many
        self.facts: deque[Mapping[int, Mapping[str, float]]] = deque(maxlen=RECENT)
        self.host_facts: deque[Mapping[str, Mapping[str, float]]] = deque(maxlen=RECENT)
        self.rounds = 0
        self.loads = samples.empty(LOAD)
        self.values: dict[str, Samples] = {}  # by name
        self.calls: dict[tuple[str, str, int], Calls] = {}
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

    def find_missing(self, world_size: int) -> list[int]:
        """Return the ranks without a report that can be compared, in any recent round."""
        since = self.rounds - SILENT
        return [rank for rank in range(world_size) if self._heard.get(rank, -SILENT) < since]

    def find_ranks(self, fact: str) -> list[int]:
        """Return the tracked ranks of which some recent round has this fact, and not as 0."""
        return sorted({rank for ranks in self.facts for rank in ranks if ranks[rank].get(fact)})

    def add(self, round_: Window, calls: Sequence[JoinedCall] = ()) -> None:
        """Add the window of all ranks, every few seconds, and the calls that are new in it."""
        self._add_hosts(round_.hosts)
        self._hear(round_)
        skipped = max(self.last_step, WARM_UP - 1) + 1 - round_.first_step
        new = len(round_.least_blocked) - max(skipped, 0)
        if new > 0 and round_.rows:
            self._add_steps(round_, new)
        self._add_links(round_)
        self._add_calls(calls)
        kept = {rank: round_.facts[rank] for rank in self.ranks if rank in round_.facts}
        self.facts.append(kept)
        self.host_facts.append(round_.host_facts)
        self._add_readings(round_)
        self.long_steps.add(round_.long_steps)
        self.lines = round_.lines or self.lines
        self.rounds += 1

    def _add_hosts(self, hosts: Mapping[str, Sequence[int]]) -> None:
        """Keep hosts that did not report this time, unless others now have their ranks."""
        if silent := self.hosts.keys() - hosts.keys():
            reported = {rank for ranks in hosts.values() for rank in ranks}
            kept = {h: self.hosts[h] for h in silent if reported.isdisjoint(self.hosts[h])}
            hosts = dict(sorted((kept | dict(hosts)).items(), key=lambda host: min(host[1])))
        self.hosts = hosts

    def _hear(self, round_: Window) -> None:
        """Note whose steps this round has; in a job without steps, who has reported."""
        if round_.rows and not len(self.job):
            self._heard.clear()
        if round_.rows or not len(self.job):
            everyone = [rank for ranks in round_.hosts.values() for rank in ranks]
            known = round_.rows if round_.rows and _knows_all(round_) else everyone
            self._heard |= dict.fromkeys(known, self.rounds)

    def _add_steps(self, round_: Window, new: int) -> None:
        known = np.array(sorted(round_.rows))
        rows = np.stack([round_.rows[rank][-new:] for rank in known]).astype(np.float32)
        medians = np.stack([median[-new:] for median in round_.medians.values()])
        number = np.arange(len(round_.least_blocked))[-new:] + round_.first_step
        complete = _knows_all(round_)  # then ranks are compared with ranks
        everyone = rows if complete else medians
        self.job.add(number, _summarize_steps(round_, known, rows, everyone))
        excess = _with_own(rows)
        if not complete:
            levels = np.median(own_seconds(medians), axis=1)
            most = max(len(round_.hosts[host]) for host in round_.medians)
            self.spreads.append(find_spread(levels) * max(1.0, most**0.5 / 1.2533))
        excess -= _median_of_others(excess) if complete else _other_hosts(round_, known, new)
        for i in _most_late(excess[:, :, -1]):
            kept = np.empty(new, RANK)
            kept["row"], kept["excess"], kept["own"] = rows[i], excess[i, :, :-1], excess[i, :, -1]
            self.ranks.setdefault(int(known[i]), samples.empty(RANK)).add(number, kept)
        self._forget_ranks()
        self.steps += new
        self.last_step = int(number[-1])

    def _add_readings(self, round_: Window) -> None:
        number = np.array([self.rounds])
        if round_.load is not None:
            load = round_.ended_ns * 1e-9, astuple(round_.load)
            self.loads.add(number, np.array([load], LOAD))
        for name, step_and_value in round_.values.items():
            if name in self.values or len(self.values) <= MOST_VALUES:
                kept = self.values.setdefault(name, samples.empty(VALUE))
                kept.add(number, np.array([step_and_value], VALUE))

    def _forget_ranks(self) -> None:
        while len(self.ranks) > 2 * TRACKED:
            del self.ranks[min(self.ranks, key=lambda rank: self.ranks[rank].number[-1])]

    def _add_links(self, round_: Window) -> None:
        self.links = {pair: link.scale(FADE) for pair, link in self.links.items()}
        for link in round_.links:
            pair = link.host, link.peer
            if pair in self.links or len(self.links) < LINKS:
                known = self.links.get(pair)
                self.links[pair] = link.add(known) if known is not None else link
        if self._ended_ns:
            passed = max(0, round_.ended_ns - self._ended_ns) * 1e-9
            self.link_seconds = self.link_seconds * FADE + passed
        self._ended_ns = round_.ended_ns

    def _add_calls(self, calls: Sequence[JoinedCall]) -> None:
        self.call_steps += len({call.step for call in calls if call.step >= 0})
        for call in calls:
            key = call.group, call.operation, call.nbytes
            if key in self.calls or len(self.calls) < KINDS:
                self.calls.setdefault(key, Calls()).add(call)


def _knows_all(round_: Window) -> bool:
    sizes = [len(round_.hosts[host]) for host in round_.medians]
    return max(sizes) <= RANKS and sum(sizes) <= TRACKED


def own_seconds(rows: FloatsOrLess) -> FloatsOrLess:
    """Return a rank's own time in steps: all but what it was blocked. rows: [..., COLUMNS]."""
    return np.asarray(rows[..., :BLOCKED].sum(axis=-1))


def find_spread(own: FloatsOrLess) -> float:
    """Return the standard deviation of ranks' own time, as the faster half shows it.

    own: of each rank, or host, the median over steps. 0 if too few show it.
    """
    if len(own) < 8:
        return 0.0
    low, middle = np.percentile(own, [10, 40])
    return float(middle - low) / 1.028


def who_most_often(ranks: Sequence[int] | Floats) -> tuple[int, float]:
    """Return the rank that is listed most often, and its share. At least one is listed."""
    (rank, count), *_ = Counter(np.asarray(ranks, np.int64).tolist()).most_common(1)
    return rank, count / len(ranks)


def _with_own(rows: FloatsOrLess) -> npt.NDArray[np.float32]:
    own = own_seconds(rows)[..., None]
    return np.concatenate([rows, own], axis=-1, dtype=np.float32)


def _median_of_others(rows: FloatsOrLess) -> FloatsOrLess:
    """Return, for each rank, the median of all others. rows: [ranks, steps, columns].

    Each rank's level over these steps is compared apart: else one straggler would make the median
    of three the larger of the other two, whatever the noise.
    """
    if len(rows) == 1:
        return np.asarray(rows)
    levels = np.median(rows, axis=1, keepdims=True)
    return _leave_one_out(rows - levels) + _leave_one_out(levels)


def _leave_one_out(rows: FloatsOrLess) -> FloatsOrLess:
    """Return the medians over the first axis without each of its entries; at least two."""
    count = len(rows)
    order = np.sort(rows, axis=0)
    place = np.argsort(np.argsort(rows, axis=0), axis=0)

    def other(i: int) -> FloatsOrLess:
        """The i-th smallest of the others."""
        return np.asarray(np.where(place <= i, order[i + 1], order[i]))

    return np.asarray((other((count - 2) // 2) + other((count - 1) // 2)) / 2)


def _other_hosts(round_: Window, known: npt.NDArray[np.int64], new: int) -> FloatsOrLess:
    """Return the median over hosts of their medians; of two hosts, for each rank the other one's.

    [ranks or 1, new steps, columns], the last one of own time. A host alone is its own base.
    """
    medians = _with_own(np.stack([median[-new:] for median in round_.medians.values()]))
    if len(medians) != 2:
        return np.asarray(np.median(medians, axis=0, keepdims=True))
    first, _ = round_.medians
    return np.asarray(medians[np.isin(known, round_.hosts[first]).astype(int)])


def _most_late(excess: FloatsOrLess) -> Sequence[int]:
    """Return the indices of the ranks to track. excess: of own time, [ranks, steps]."""
    return [int(i) for i in np.argsort(-excess.mean(axis=1))[:TRACKED]]


def _summarize_steps(
    round_: Window, known: npt.NDArray[np.int64], rows: FloatsOrLess, everyone: FloatsOrLess
) -> npt.NDArray[np.void]:
    """Return the job's samples of these steps: JOB[steps].

    rows: of the known ranks; everyone: the same, or hosts' medians where not all ranks are known.
    """
    new = rows.shape[1]
    job, slowest = np.empty(new, JOB), rows.argmax(axis=0)
    job["seconds"] = np.median(everyone.sum(axis=-1, dtype=np.float64), axis=0)
    later = np.cumsum(job["seconds"][::-1])[::-1] - job["seconds"]
    job["ended_ns"] = round_.ended_ns - later * 1e9
    job["median"] = np.median(everyone, axis=0)
    job["exposed"] = round_.least_blocked[-new:]
    job["slowest"] = np.take_along_axis(rows, slowest[None], axis=0)[0]
    job["fastest"] = np.minimum(rows.min(axis=0), everyone.min(axis=0))
    job["slowest_rank"] = known[slowest]
    return job
