"""One line per case of collectives, over all launches of a run: read by tables and comparisons.

Rates are in bytes per second, and always derived from a summarised time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ddpbench.analysis import stats
from ddpbench.analysis.flags import BUSY, STOPPED, AnyLine, Flag, group_by, note_fastest
from ddpbench.analysis.stats import Floats
from ddpbench.records.schema import Case, Plan, Result, Run

SKEW_SHARE = 0.10  # of the time, by which the ranks may enter apart
OVER_LAUNCHES = 0.10  # a row is imprecise above this half-width of an interval over launches
UNHIDDEN_SHARE = 0.05  # of the calls whose times may include their kernel launch
DISAGREEING = 1.5  # longest over shortest median of the launches

FEWEST = 100  # repetitions
LEAST_SHARE = 0.1  # of the repetitions in the smaller mode; fewer are a tail, which p99 shows
LEAST_RATIO = 1.25  # of the modes' times; the interval shows a smaller one
DEEPEST = 0.5  # the valley's density, at most, as a share of the lower peak's
BETWEEN = 8  # steps between neighbouring quantiles: without them a long tail has gaps
POINTS = 256  # at which the density is computed


@dataclass(frozen=True, kw_only=True)
class Line(AnyLine):
    """One case: times in seconds of one operation, rates in bytes per second."""

    case: Case
    results: tuple[Result, ...]
    percentiles: dict[str, float] = field(default_factory=dict)  # medians over launches
    skew: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    fraction: float | None = None  # of the limit

    @property
    def medians(self) -> list[float]:
        """Medians of the launches in seconds, sorted."""
        return sorted(r.summary.median_seconds for r in self.results if r.summary)

    @property
    def handoffs(self) -> list[float]:
        """Handoffs between the ranks' cores in seconds, one per launch, sorted."""
        return sorted(r.handoff_seconds for r in self.results if r.handoff_seconds)

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """The two modes of the repetitions of all launches; empty unless there are two."""
        known = [r.summary for r in self.results if r.summary and r.summary.quantiles_seconds]
        quantiles = np.array([summary.quantiles_seconds for summary in known])
        return modes(quantiles, sum(summary.repetitions for summary in known))


def lines(run: Run) -> list[Line]:
    """Return the cases of a run by operation, form, dtype, size, and backend in measured order."""
    by_case = group_by(run.results, lambda result: result.case)
    names = list(dict.fromkeys([*run.operations, *(r.case.operation for r in run.results)]))
    backends = [launch.backend for launch in run.launches]
    backends = list(dict.fromkeys([*backends, *(r.case.backend for r in run.results)]))

    def order(case: Case) -> tuple[object, ...]:
        return (
            names.index(case.operation),
            *(case.form, case.in_place, case.dtype, case.reduce_op or ""),
            *(len(case.ranks_per_host), case.world_size),  # inside a host first
            *(case.nbytes, backends.index(case.backend)),
        )

    known = [_line(case, by_case[case], run.plan) for case in sorted(by_case, key=order)]
    return note_fastest(known)


def impossible(result: Result) -> bool:
    """Whether an operation ended before its least bytes could have moved (a hard limit)."""
    hard, summary = result.hard_limit, result.summary
    if hard is None or summary is None:
        return False
    return summary.median_seconds < result.least_nbytes / hard.bytes_per_second


def _line(case: Case, results: list[Result], plan: Plan) -> Line:
    measured = [r for r in results if r.summary is not None]
    if not measured:
        return Line(case=case, results=(), reason=results[0].reason)
    summaries = [r.summary for r in measured if r.summary is not None]
    seconds, interval = summaries[0].median_seconds, summaries[0].interval
    if len(summaries) > 1:
        seconds, interval = stats.over_launches(np.array([s.median_seconds for s in summaries]))
    repetitions = sum(s.repetitions for s in summaries)
    common = set.intersection(*(set(s.percentiles_seconds) for s in summaries))
    common = {name for name in common if repetitions >= stats.PERCENTILES[name]}
    skews = [s.skew_seconds for s in summaries if s.skew_seconds is not None]
    # A device's clock may be too coarse for a single rank.
    algbw = case.nbytes / seconds if case.nbytes and seconds else None
    # The rate of the busiest link under the best known algorithm; 0 for one rank.
    rate = None if algbw is None else algbw * measured[0].bus_factor
    limits = [r.limit.bytes_per_second for r in measured if r.limit and case.world_size > 1]
    line = Line(
        case=case,
        results=tuple(measured),
        seconds=seconds,
        interval=interval,
        percentiles={
            name: float(np.median([s.percentiles_seconds[name] for s in summaries]))
            for name in sorted(common)
        },
        skew=float(np.median(skews)) if skews else None,
        algbw=algbw,
        busbw=rate,
        # It may exceed 1 if the network itself reduces.
        fraction=float(np.median([rate / limit for limit in limits])) if rate and limits else None,
    )
    raised = (name for name, flag in FLAGS.items() if flag.is_raised(line, plan))
    return replace(line, flags=tuple(raised))


def _is_imprecise(line: Line, plan: Plan) -> bool:
    widest = plan.precision if len(line.results) == 1 else OVER_LAUNCHES
    return line.half_width is None or line.half_width > widest


def _launches_differ(line: Line, plan: Plan) -> bool:
    """Whether launches differ by half or more, and by more than their own intervals allow."""
    summaries = [r.summary for r in line.results if r.summary]
    low = min(summaries, key=lambda s: s.median_seconds)
    high = max(summaries, key=lambda s: s.median_seconds)
    if low.interval is None or high.interval is None:
        return False
    apart = high.median_seconds > DISAGREEING * low.median_seconds
    return apart and high.interval.low > low.interval.high


def _is_skewed(line: Line, plan: Plan) -> bool:
    """Whether ranks entered apart; skew is per repetition, `seconds` per call."""
    calls = min(r.calls for r in line.results)
    return (line.skew or 0) > SKEW_SHARE * (line.seconds or 0) * calls


FLAGS: dict[str, Flag[Line]] = {  # in the order in which a row shows them
    "WRONG": Flag(
        "a result was wrong: do not use the row",
        lambda line, plan: any(r.wrong for r in line.results),
    ),
    "INVALID": Flag(
        "faster than the data can move: do not use the row",
        lambda line, plan: any(map(impossible, line.results)),
    ),
    ">limit": Flag(
        "busbw is above the limit: the data came from a cache, the network reduces, or NCCL's tree "
        "algorithm sends less between hosts than a ring",
        lambda line, plan: (line.fraction or 0) > 1,
        mark=">",
    ),
    "imprecise": Flag(
        f"the 95 % interval is missing or too wide: above ±{OVER_LAUNCHES * 100:g} % over several "
        "launches, above --precision within one launch",
        _is_imprecise,
        mark="~",
    ),
    "launches": Flag(
        "the medians of the launches differ by half or more (--columns medians): no single figure "
        "describes the case",
        _launches_differ,
        mark="L",
    ),
    "modes": Flag(
        "the times of the calls have two modes (--columns modes): the median is one of them, or "
        "between them",
        lambda line, plan: bool(line.modes),
        mark="M",
    ),
    "skew": Flag(
        f"the ranks entered at different times: the gap exceeds {SKEW_SHARE * 100:g} % of the time",
        _is_skewed,
        mark="S",
    ),
    "unhidden": Flag(
        f"more than {UNHIDDEN_SHARE * 100:g} % of the calls did not hide their kernel launch, so "
        "their time includes a part of it; keep other processes off the cores of the ranks",
        lambda line, plan: any((r.unhidden_share or 0) > UNHIDDEN_SHARE for r in line.results),
        mark="U",
    ),
    "busy": BUSY,
    "batched": Flag(
        "too short for the clock: one stamp covers several calls, so there are no percentiles",
        lambda line, plan: any(r.batch > 1 for r in line.results),
        mark="K",
    ),
    "stopped": STOPPED,
}


@dataclass(frozen=True)
class Mode:
    """One of the two modes of a call's times."""

    seconds: float  # median of its repetitions
    share: float  # of all repetitions


def modes(quantiles: Floats, repetitions: int) -> tuple[Mode, ...]:
    """Return the two modes of the repetitions, the shorter first; empty unless there are two.

    Launches that differ from each other have no modes. quantiles: float64[launch, quantile],
    seconds, of each launch, evenly spaced by rank. repetitions: of all launches.
    """
    if repetitions < FEWEST or not quantiles.size or quantiles.min() <= 0:
        return ()
    few = np.arange(quantiles.shape[1])
    many = np.linspace(0, few[-1], BETWEEN * int(few[-1]) + 1)
    logs = np.array([np.interp(many, few, each) for each in np.log(quantiles)])
    cut = _valley(np.sort(logs.ravel()), repetitions)
    if cut is None:
        return ()
    below = (logs < cut).mean(axis=1)
    if np.median(np.minimum(below, 1 - below)) < LEAST_SHARE / 2:
        return ()  # most launches have only one of them
    low, high = (math.exp(float(np.median(logs[side]))) for side in (logs < cut, logs >= cut))
    if high < LEAST_RATIO * low:
        return ()
    share = float((logs < cut).mean())
    return Mode(low, share), Mode(high, 1 - share)


def _valley(logs: Floats, repetitions: int) -> float | None:
    """Return the value between two peaks where the density of these sorted values is lowest."""
    low, high = np.percentile(logs, [0.5, 99.5])  # modes are within these
    quarter, three = np.percentile(logs, [25, 75])
    deviation = float(logs.std())
    if not (deviation and high > low):
        return None
    width = 0.6 * min(deviation, (three - quarter) / 1.34 or deviation) * repetitions**-0.2
    grid = np.linspace(low - 3 * width, high + 3 * width, POINTS)
    density = np.exp(-0.5 * ((grid[:, None] - logs) / width) ** 2).sum(axis=1)
    rising = density[1:] > density[:-1]
    valleys = 1 + np.flatnonzero(~rising[:-1] & rising[1:])
    best = 1.0, 0.0  # depth, value
    for valley in valleys:
        share = float((logs < grid[valley]).mean())
        if LEAST_SHARE <= share <= 1 - LEAST_SHARE:
            beside = min(density[:valley].max(), density[valley:].max())
            best = min(best, (float(density[valley] / beside), float(grid[valley])))
    return best[1] if best[0] <= DEEPEST else None
