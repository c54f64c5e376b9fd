"""One case over runs: how much its runs scatter, and between which of them its level changed.

A run is one point: the median of its launches, in log. Launches of one run share its hour, so their
intervals do not show the scatter between runs.
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
from ddpbench.verdicts.matching import AnyCase, Outcome, SideCase

Floats = npt.NDArray[np.float64]

FEWEST = 6  # runs that a search for change points needs
SHORTEST = 2  # runs of one level: one run alone may be luck
FALSE_SHARE = 0.05  # of series without any change may show one, at most
LONE = 4.0  # noise widths between a lone run and both its neighbours
LEAST_NOISE = 1e-6  # in log: no clock resolves a millionth of what it measures


@dataclass(frozen=True)
class Point:
    """One run's figures of the case."""

    run: Run  # with the launches of the case's backend only
    medians: tuple[float, ...]  # seconds, one per launch; empty if they must not be used
    seconds: float | None  # their median
    interval: Interval | None  # over six or more launches; within a single one
    fault: str | None  # why there are no figures
    busy: bool  # other processes used the cores
    lone: bool = False  # off from both neighbours, so no change point
    changed: tuple[Difference, ...] = ()  # in the environment since the previous point


@dataclass(frozen=True)
class Change:
    """A change of level at index `at` of the series' points."""

    at: int
    before_seconds: float
    after_seconds: float
    noise_widths: float
    differences: tuple[Difference, ...]  # between the environments of the runs beside it

    @property
    def log_ratio(self) -> float:
        """How much longer it takes since, in log."""
        return math.log(self.after_seconds / self.before_seconds)


@dataclass(frozen=True)
class Series:
    """One case in all runs that have it, oldest first."""

    case: AnyCase
    points: tuple[Point, ...]
    noise: float | None  # between runs of one level, in log; None: too few runs
    changes: tuple[Change, ...]
    unsought: str | None  # why there was no search for change points


def find_series(runs: Iterable[Run], wanted: Callable[[AnyCase], bool]) -> list[Series]:
    """Return a series for each wanted case, in the order in which the cases appear."""
    points: dict[AnyCase, list[Point]] = {}
    for run in sorted(runs, key=lambda run: (run.started, run.id)):
        for case, found in matching.find_cases(matching.Source(run.id, (run,)), wanted).items():
            if found.tried:
                points.setdefault(case, []).append(_point(run, found))
    return [_series(case, _with_changes(each)) for case, each in points.items()]


def _point(run: Run, found: SideCase) -> Point:
    outcomes = [o for o in run.outcomes if o.case == found.case and o.summary is not None]
    side = found.side
    interval = side.interval if side else None
    if side and len(side.times) == 1:
        interval = _within(outcomes[0])
    launches = tuple(launch for launch in run.launches if launch.backend == found.case.backend)
    return Point(
        run=replace(run, launches=launches),
        medians=side.times if side else (),
        seconds=side.seconds if side else None,
        interval=interval,
        fault=found.fault,
        busy=any((outcome.others_share or 0) > BUSY_SHARE for outcome in outcomes),
    )


def _within(outcome: Outcome) -> Interval | None:
    """Return the interval within one launch."""
    if outcome.summary is None:
        return None
    if isinstance(outcome, StepResult):
        return outcome.summary.step.interval
    return outcome.summary.interval


def _with_changes(points: list[Point]) -> list[Point]:
    """Add to each point what changed in the environment since the previous one."""
    since = [differences([old.run], [new.run]) for old, new in pairwise(points)]
    return [replace(p, changed=c) for p, c in zip(points, [(), *since], strict=True)]


def _series(case: AnyCase, points: list[Point]) -> Series:
    """Build a series; points without figures are shown but not used for noise or changes."""
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
        environments = differences([points[used[at - 1]].run], [points[used[at]].run])
        widths = abs(after - before) / noise
        yield Change(used[at], math.exp(before), math.exp(after), widths, environments)


def launch_noise(medians: Sequence[Sequence[float]]) -> float:
    """Return the noise of a run's median, in log, from the scatter of its launches alone.

    Returns 0 if each run has one launch. Runs differ by no less, though a few may by chance.
    """
    spreads = [np.var(np.log(each), ddof=1) / len(each) for each in medians if len(each) > 1]
    return math.sqrt(float(np.mean(spreads))) if spreads else 0.0


def noise_of(logs: Floats, breaks: Sequence[int], floor: float) -> float:
    """Return the standard deviation of runs about their level, from neighbours within one level.

    logs: float64[run]. Only neighbours count, so an undetected change adds one difference only.
    """
    steps = np.concatenate([np.abs(np.diff(part)) for part in np.split(logs, breaks)])
    return max(float(steps.mean()) * math.sqrt(math.pi) / 2, floor, LEAST_NOISE)


def lone_points(logs: Floats) -> list[int]:
    """Return the indices of runs that are off from both neighbours: a busy hour, no new level.

    logs: float64[run], at least three. A run at an end is compared with the nearest two.
    """
    off = np.abs([each - np.median(_around(logs, i)) for i, each in enumerate(logs)])
    noise = float(np.median(np.abs(np.diff(logs)))) / 0.954  # of differences, which are √2 wider
    return [int(i) for i in np.flatnonzero(off > LONE * max(noise, LEAST_NOISE))]


def steadied(logs: Floats, lone: Sequence[int]) -> Floats:
    """Replace each lone run by the median of it and its neighbours."""
    level: Floats = logs.copy()
    for i in lone:
        level[i] = np.median(_around(logs, i))
    return level


def _around(logs: Floats, i: int) -> Floats:
    """Return a run and its neighbours: three runs, also at the ends."""
    first = max(0, min(i - 1, len(logs) - 3))
    return logs[first : first + 3]


def change_points(logs: Floats, floor: float = 0.0) -> list[int]:
    """Return the indices at which a new level begins. Raises ImportError without ruptures.

    The search minimizes least squares with a penalty for each change (PELT). It estimates the noise
    again within the levels that it found, until it finds no more.
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
    """Return by how much a change must reduce the sum of squares.

    Noise alone does so in at most FALSE_SHARE of the series, at any index where a level may begin
    (Bonferroni). The quantile is Student's t, because the noise is itself an estimate: a mean of
    successive differences has 0.62 degrees of freedom for each of them.
    """
    from scipy.stats import t

    places = len(logs) - 2 * SHORTEST + 1
    freedom = 0.62 * (len(logs) - 1 - len(breaks))
    quantile = float(t.ppf(1 - FALSE_SHARE / 2 / places, freedom))
    return (noise_of(logs, breaks, floor) * quantile) ** 2
