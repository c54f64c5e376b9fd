"""Which ranks are late, in which phase, how much, in which steps and since when. No torch.

A rank is late if its own time is larger than the other ranks' and it is blocked less than they are:
they wait for it. A rank that only waits has more blocked time, and no more time of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import stats
from ddpbench.records.schema import Interval
from ddpbench.records.watched import PHASES
from ddpbench.watch.judging.history import Floats, History, find_spread
from ddpbench.watch.judging.series import SHORTEST, Period, find_parts, find_period, standard_error
from ddpbench.watch.window import BLOCKED, COLUMNS

LEAST_SHARE = 0.03  # of a step, from which a rank is a straggler
FEWEST = 16  # steps that a verdict needs
RECENT = 512  # steps in which a rank that is late in some of them is sought
CLEAR = 5.0  # standard errors of a median
CLEAR_OF_PART = 7.0  # because there are many parts to choose from
ALSO = 0.25  # of the largest phase: a phase that is named beside it
WAITED_FOR = 0.4  # of its lateness, that a late rank is blocked less
TRACKED_SHARE = 0.8  # of the latest steps
PERIODIC_COST = 0.008  # of a step, the average over all steps
GROWTH = 1.5  # times as late, or as little, as at first
ALLOWED = 0.75 * PERIODIC_COST  # with noise
# Of a tracked rank's samples, as RANK but with more digits for sums.
EXACT = np.dtype([("row", "f8", (COLUMNS,)), ("excess", "f8", (COLUMNS,)), ("own", "f8")])


@dataclass(frozen=True)
class Part:
    """Steps of one rank. number: int64[steps]; values: its samples, EXACT[steps]."""

    rank: int
    number: npt.NDArray[np.int64]
    values: npt.NDArray[np.void]
    step_seconds: float  # of the job
    apart: float  # by how much ranks differ that are not late

    def __getitem__(self, chosen: slice | npt.NDArray[np.bool_]) -> Part:
        return replace(self, number=self.number[chosen], values=self.values[chosen])

    def __len__(self) -> int:
        return len(self.number)

    @property
    def own(self) -> Floats:
        """How much more own time than the other ranks it has."""
        return np.asarray(self.values["own"])

    @property
    def excess(self) -> Floats:
        """How much longer than in the other ranks each phase is: [steps, phase]."""
        return np.asarray(self.values["excess"][:, :BLOCKED])

    @property
    def blocked(self) -> float:
        """How much longer than the other ranks it is blocked, median."""
        return float(np.median(self.values["excess"][:, BLOCKED]))

    @property
    def least(self) -> float:
        """Seconds from which a difference counts."""
        return max(LEAST_SHARE * self.step_seconds, self.apart)

    def in_phases(self, names: Iterable[str]) -> Floats:
        """How much longer than in the other ranks these phases together are."""
        chosen = [PHASES.index(name) for name in names]
        return np.asarray(self.excess[:, chosen].sum(axis=1))


@dataclass(frozen=True)
class Late:
    """A rank that is late.

    phases: name → how much longer a late step takes in it, the largest first; seconds: their sum;
    since, until: numbers of its first late step, None from the start, and of its last one, None if
    it is still late; every: a step in so many is late; first: number of a late step; step_seconds:
    of the job; grew_from: seconds at first, if the lateness has only grown, or only shrunk, since.
    """

    rank: int
    phases: dict[str, float]
    seconds: float
    interval: Interval | None
    since: int | None = None
    until: int | None = None
    every: int = 1
    first: int = 0
    step_seconds: float = 0.0
    grew_from: float | None = None

    @property
    def cost(self) -> float:
        """Seconds of an average step."""
        return self.seconds / self.every


def find_late(history: History, step_seconds: float) -> list[Late]:
    """Return the ranks that are late now, or were, the worst first."""
    apart = _usual_largest(history)
    late: list[Late] = []
    for rank, kept in history.ranks.items():
        part = Part(rank, kept.number, kept.values.astype(EXACT), step_seconds, apart)
        if _is_tracked(history, part) and _may_be_late(part):
            late.extend(_judge_rank(part))
    late = [replace(one, step_seconds=step_seconds) for one in late]
    return sorted(late, key=lambda one: -one.cost)


def _usual_largest(history: History) -> float:
    """Return by how much the slowest of so many ranks is usually slower than the median one."""
    if history.spreads:
        spread = float(np.median(history.spreads))
    else:
        own = [kept.values["own"][-RECENT:] for kept in history.ranks.values()]
        spread = find_spread(np.array([np.median(series) for series in own]))
    return spread * (1 + math.sqrt(2 * math.log(max(1, history.world_size))))


def _is_tracked(history: History, part: Part) -> bool:
    """Whether a rank was among the slowest nearly all the time lately."""
    return bool(np.isin(history.job.number[-512:], part.number).mean() > TRACKED_SHARE)


def _may_be_late(part: Part) -> bool:
    """Whether the averages allow for a verdict: the cheap question."""
    chunks = np.array_split(part.own, max(1, len(part) // 64))
    if max(float(chunk.mean()) for chunk in chunks) > part.least / 2:
        return True
    return bool((part[-RECENT:].excess.mean(axis=0) > ALLOWED * part.step_seconds).any())


def _judge_rank(rank: Part) -> Iterator[Late]:
    """Yield what holds now; if the rank is not late now, the longest time in which it was."""
    parts = _divide(rank)
    found = [_judge_part(part, CLEAR if len(parts) == 1 else CLEAR_OF_PART) for part in parts]
    ended = [(len(parts[i]), i, late) for i, late in enumerate(found) if late]
    if (now := found[-1]) is not None:
        start = next(i for i in range(len(found)) if None not in found[i:])
        since = int(parts[start].number[0]) if start else None
        yield replace(now, since=since, grew_from=_find_growth(found[start:]))
    elif ended:
        _, i, longest = max(ended, key=lambda one: one[0])
        since = int(parts[i].number[0]) if i else None
        yield replace(longest, since=since, until=int(parts[i].number[-1]))


def _find_growth(levels: Sequence[Late | None]) -> float | None:
    """Return the first of these levels, if they lead to the last one in steps of one direction."""
    seconds = [late.seconds for late in levels if late and late.every == 1]
    steps = np.diff(seconds)
    if len(steps) < 2 or not (np.all(steps > 0) or np.all(steps < 0)):
        return None
    ratio = seconds[-1] / seconds[0]
    return seconds[0] if max(ratio, 1 / ratio) >= GROWTH else None


def _divide(rank: Part) -> list[Part]:
    """Divide the steps of a rank where its level changes, by the phase that shows it best."""
    best, slices = 0.0, [slice(0, len(rank))]
    for series in (*rank.excess.T, rank.own):
        if not _varies(series, rank.least):
            continue
        parts = find_parts(series, rank.least)
        levels = [float(np.median(series[part])) for part in parts]
        rest = series - np.repeat(levels, [part.stop - part.start for part in parts])
        clear = max(np.abs(np.diff(levels)), default=0.0) / (standard_error(rest) or 1e-9)
        if clear > best:
            best, slices = clear, parts
    return [rank[part] for part in slices]


def _varies(series: Floats, least: float) -> bool:
    """Whether short parts of a series differ by so much: the cheap question."""
    whole = series[: len(series) // SHORTEST * SHORTEST]
    levels = np.median(whole.reshape(-1, SHORTEST), axis=1)
    return bool(len(levels) > 1 and np.ptp(levels) >= least)


def _judge_part(part: Part, clear: float) -> Late | None:
    """Judge steps of one level. clear: standard errors from which a difference is one."""
    if len(part) < FEWEST:
        return None
    gaps = np.flatnonzero(np.diff(part.number) != 1)
    newest = part[int(gaps[-1]) + 1 if len(gaps) else 0 :][-RECENT:]
    return _periodically(newest) or _always(part, clear)


def _always(part: Part, clear: float) -> Late | None:
    """Judge a rank that is late in all steps: in single phases, or in all of them together."""
    level = sum(_clear_level(series, part.least, clear) for series in part.excess.T)
    level = level or _clear_level(part.own, 1.5 * part.least, clear)
    late_seconds = min(float(np.median(part.own)), -part.blocked)
    if not level or late_seconds < WAITED_FOR * level:
        return None
    phases = _name_phases(part.excess)
    series = part.in_phases(phases)
    return Late(part.rank, phases, float(np.median(series)), stats.median_interval(series))


def _clear_level(series: Floats, least: float, clear: float) -> float:
    """Return the median of a series if it is at least this and more than noise, else 0."""
    level, error = float(np.median(series)), standard_error(series)
    return level if level >= max(least + 2 * error, clear * error) else 0.0


def _periodically(part: Part) -> Late | None:
    """Judge a rank that is late in every so many steps. part: steps that follow one another."""
    best = Period(0, 0, 0.0)
    for series in part.excess.T:
        if series.mean() > ALLOWED * part.step_seconds:
            best = max(best, find_period(series), key=lambda period: period.clear)
    if not best.every:
        return None
    is_late = np.arange(len(part)) % best.every == best.first
    late, usual = part[is_late], part[~is_late]
    if np.median(usual.own) >= part.least:  # it is always late, and in some steps more so
        return None
    phases = _name_phases(late.excess - np.median(usual.excess, axis=0))
    seconds = sum(phases.values())
    if seconds < max(part.least, PERIODIC_COST * part.step_seconds * best.every):
        return None
    if _less_blocked(part, is_late) < WAITED_FOR * seconds:
        return None
    series = late.in_phases(phases) - np.median(usual.in_phases(phases))
    return Late(
        *(part.rank, phases, float(np.median(series)), stats.median_interval(series)),
        every=best.every,
        first=int(late.number[0]),
    )


def _less_blocked(part: Part, is_late: npt.NDArray[np.bool_]) -> float:
    """Return how much less a rank is blocked in late steps, or else in the steps after them.

    The other ranks wait for a late optimizer in the backward of the next step.
    """
    after = np.roll(is_late, 1)
    after[0] = False
    return max(part[~where].blocked - part[where].blocked for where in (is_late, after))


def _name_phases(excess: Floats) -> dict[str, float]:
    """Return the phases to name, the one that is longer by most first. excess: [steps, phase]."""
    longer = np.median(excess, axis=0)
    most = int(longer.argmax())
    clear = [CLEAR * standard_error(series) for series in excess.T]
    named = [i for i in np.argsort(-longer) if longer[i] >= max(ALSO * longer[most], clear[i])]
    return {PHASES[i]: float(longer[i]) for i in named or [most]}
