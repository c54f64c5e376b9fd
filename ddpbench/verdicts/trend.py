"""One case over runs: how far its runs scatter, and between which of them its level changed.

A run is one point, the median of its launches, in log: launches of one run have its hour in common,
and what scatters from run to run is in none of their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ddpbench.analysis.flags import BUSY_SHARE
from ddpbench.records.schema import Interval, Run, StepResult
from ddpbench.verdicts import matching
from ddpbench.verdicts.differences import Difference, differences
from ddpbench.verdicts.matching import AnyCase, Found, Outcome

Floats = npt.NDArray[np.float64]

FEWEST = 6  # runs from which change points are looked for
SHORTEST = 2  # runs of one level: one run alone may be luck
FALSE_SHARE = 0.05  # of series without any change, at most so many may show one
LONE = 4.0  # noise widths by which a run is off from both its neighbours
LEAST_NOISE = 1e-6  # in log: no clock tells a millionth of what it measures


@dataclass(frozen=True)
class Point:
    """One run's figures of the case."""

    run: Run  # with the launches of the case's backend only
    medians: tuple[float, ...]  # seconds, one a launch; none where they are not to be used
    seconds: float | None  # their median
    interval: Interval | None  # over launches from 6 on; of one launch, within it
    fault: str | None  # why there are no figures
    busy: bool  # other processes used the cores meanwhile
    lone: bool = False  # off from both neighbours: no change point is made of it
    changed: tuple[Difference, ...] = ()  # in the environment since the point before


@dataclass(frozen=True)
class Change:
    """The level before `at`, an index of the series' points, and from it on."""

    at: int
    before_seconds: float
    after_seconds: float
    noise_widths: float
    differences: tuple[Difference, ...]  # of the environments of the two runs at its sides

    @property
    def log_ratio(self) -> float:
        """By how much longer it takes since, in log."""
        return math.log(self.after_seconds / self.before_seconds)


@dataclass(frozen=True)
class Series:
    """One identity in all runs that have it, oldest first."""

    case: AnyCase
    points: tuple[Point, ...]
    noise: float | None  # between runs of one level, in log; None: too few runs
    changes: tuple[Change, ...]
    unsought: str | None  # why change points were not looked for


def trends(runs: Iterable[Run], wanted: Callable[[AnyCase], bool]) -> list[Series]:
    """The wanted cases over runs: a series for each identity, in the order in which they appear."""
    points: dict[AnyCase, list[Point]] = {}
    for run in sorted(runs, key=lambda run: (run.started, run.id)):
        for case, found in matching.found(matching.Source(run.id, (run,)), wanted).items():
            if found.tried:
                points.setdefault(case, []).append(_point(run, found))
    return [_series(case, _told_apart(each)) for case, each in points.items()]


def _point(run: Run, found: Found) -> Point:
    outcomes = [o for o in run.outcomes if o.case == found.case and o.summary is not None]
    side = found.side
    interval = side.interval if side else None
    if side and len(side.times) == 1:
        interval = _within(outcomes[0])
    return Point(
        run=replace(run, launches=tuple(
            launch for launch in run.launches if launch.backend == found.case.backend)),
        medians=side.times if side else (),
        seconds=side.seconds if side else None,
        interval=interval,
        fault=found.fault,
        busy=any((outcome.others_share or 0) > BUSY_SHARE for outcome in outcomes),
    )  # fmt: skip


def _within(outcome: Outcome) -> Interval | None:
    """The interval that one launch has of its own median."""
    if outcome.summary is None:
        return None
    if isinstance(outcome, StepResult):
        return outcome.summary.step.interval
    return outcome.summary.interval


def _told_apart(points: list[Point]) -> list[Point]:
    """The points with what changed in the environment from each to the next."""
    since = [differences([old.run], [new.run]) for old, new in pairwise(points)]
    return [replace(p, changed=c) for p, c in zip(points, [(), *since], strict=True)]


def _series(case: AnyCase, points: list[Point]) -> Series:
    """Points without figures are in the series, and in nothing that is computed of it."""
    used = [(i, point.seconds) for i, point in enumerate(points) if point.seconds is not None]
    if len(used) < FEWEST:
        return Series(case, tuple(points), None, (), f"that needs {FEWEST} runs, not {len(used)}")
    logs = np.log([seconds for _, seconds in used])
    lone = lone_points(logs)
    level, floor = steadied(logs, lone), launch_noise([points[i].medians for i, _ in used])
    try:
        breaks, unsought = change_points(level, floor), None
    except ImportError:
        breaks, unsought = [], "that needs ruptures: pip install ruptures"
    noise = noise_of(level, breaks, floor)
    places = [i for i, _ in used]
    changes = tuple(_changes(points, places, level, breaks, noise))
    for i in lone:
        points[places[i]] = replace(points[places[i]], lone=True)
    return Series(case, tuple(points), noise, changes, unsought)


def _changes(
    points: Sequence[Point], used: Sequence[int], logs: Floats, breaks: Sequence[int], noise: float
) -> Iterator[Change]:
    levels = [float(np.median(part)) for part in np.split(logs, breaks)]
    for k, at in enumerate(breaks):
        before, after = levels[k], levels[k + 1]
        yield Change(
            used[at], math.exp(before), math.exp(after), abs(after - before) / noise,
            differences([points[used[at - 1]].run], [points[used[at]].run]),
        )  # fmt: skip


def launch_noise(medians: Sequence[Sequence[float]]) -> float:
    """What the scatter of launches alone makes of a run's median, in log; 0 where each run has one
    launch. Runs differ by no less, though a few may by chance."""
    spreads = [np.var(np.log(each), ddof=1) / len(each) for each in medians if len(each) > 1]
    return math.sqrt(float(np.mean(spreads))) if spreads else 0.0


def noise_of(logs: Floats, breaks: Sequence[int], floor: float) -> float:
    """The standard deviation of runs about their level, from neighbours within one level.

    logs: float64[run]. Neighbours, so that an unseen change widens it by one difference only.
    """
    steps = np.concatenate([np.abs(np.diff(part)) for part in np.split(logs, breaks)])
    return max(float(steps.mean()) * math.sqrt(math.pi) / 2, floor, LEAST_NOISE)


def lone_points(logs: Floats) -> list[int]:
    """The runs that are off from both neighbours, at the ends from the two: a busy hour, no level.

    logs: float64[run], at least three.
    """
    off = np.abs([each - np.median(_around(logs, i)) for i, each in enumerate(logs)])
    noise = float(np.median(np.abs(np.diff(logs)))) / 0.954  # of differences, which are √2 wider
    return [int(i) for i in np.flatnonzero(off > LONE * max(noise, LEAST_NOISE))]


def steadied(logs: Floats, lone: Sequence[int]) -> Floats:
    """The runs with each lone one put to the median of it and its neighbours."""
    level: Floats = logs.copy()
    for i in lone:
        level[i] = np.median(_around(logs, i))
    return level


def _around(logs: Floats, i: int) -> Floats:
    """A run and its neighbours: three, at the ends too."""
    first = max(0, min(i - 1, len(logs) - 3))
    return logs[first : first + 3]


def change_points(logs: Floats, floor: float = 0.0) -> list[int]:
    """The indices at which a new level begins; ImportError where ruptures is not installed.

    Least squares with a penalty for each change (PELT). The noise is estimated again within the
    levels that were found, as long as more are.
    """
    import ruptures

    search = ruptures.Pelt(model="l2", min_size=SHORTEST, jump=1).fit(logs)
    found: list[int] = []
    while True:
        *more, _ = search.predict(pen=penalty(logs, found, floor))
        if len(more) <= len(found):
            return found
        found = more


def penalty(logs: Floats, breaks: Sequence[int], floor: float) -> float:
    """By how much a change must lessen the sum of squares: what noise does in FALSE_SHARE of the
    series at the most, at any of the places where a level may begin (Bonferroni).

    Student's t, as the noise is itself an estimate: a mean of successive differences knows 0.62
    degrees of freedom for each of them.
    """
    from scipy.stats import t

    places = len(logs) - 2 * SHORTEST + 1
    freedom = 0.62 * (len(logs) - 1 - len(breaks))
    quantile = float(t.ppf(1 - FALSE_SHARE / 2 / places, freedom))
    return (noise_of(logs, breaks, floor) * quantile) ** 2
