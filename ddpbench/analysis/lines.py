"""One line a case, over all launches of a run: what a table prints and a comparison reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddpbench.analysis import bandwidth, limits, stats
from ddpbench.records.schema import Case, Interval, Plan, Result, Run

SKEW_SHARE, BUSY_SHARE = 0.10, 0.05


@dataclass(frozen=True)
class Line:
    """One case: times in seconds of one operation, rates in bytes a second."""

    case: Case
    results: tuple[Result, ...]  # one a launch in which it was measured
    reason: str | None  # why it was measured in none
    seconds: float | None
    interval: Interval | None
    percentiles: dict[str, float]  # of the one launch; medians over several
    skew: float | None
    algbw: float | None
    busbw: float | None
    fraction: float | None  # of the limit
    flags: tuple[str, ...]

    @property
    def half_width(self) -> float | None:
        """Relative half-width of the interval."""
        return None if self.interval is None else stats.half_width(self.interval)


def lines(run: Run) -> list[Line]:
    """The cases of a run by operation, form, dtype, size, then backend in the order measured."""
    by_case: dict[Case, list[Result]] = {}
    for result in run.results:
        by_case.setdefault(result.case, []).append(result)
    names = list(dict.fromkeys([*run.operations, *(r.case.operation for r in run.results)]))
    backends = list(dict.fromkeys(launch.backend for launch in run.launches))
    backends += [r.case.backend for r in run.results if r.case.backend not in backends]

    def order(case: Case) -> tuple[object, ...]:
        return (
            names.index(case.operation), case.form, case.in_place, case.dtype,
            case.reduce_op or "", len(case.ranks_per_host), case.world_size,  # inside a host first
            case.nbytes, backends.index(case.backend),
        )  # fmt: skip

    return [_line(case, by_case[case], run.plan) for case in sorted(by_case, key=order)]


def _line(case: Case, results: list[Result], plan: Plan) -> Line:
    measured = [r for r in results if r.summary is not None]
    if not measured:
        return Line(case, (), results[0].reason, None, None, {}, None, None, None, None, ())
    summaries = [r.summary for r in measured if r.summary is not None]
    seconds, interval = summaries[0].median_seconds, summaries[0].interval
    if len(summaries) > 1:
        seconds, interval = stats.over_launches(np.array([s.median_seconds for s in summaries]))
    common = set.intersection(*(set(s.percentiles_seconds) for s in summaries))
    skews = [s.skew_seconds for s in summaries if s.skew_seconds is not None]
    first = measured[0]
    fractions = [f for r in measured if (f := limits.fraction(r, seconds)) is not None]
    line = Line(
        case=case,
        results=tuple(measured),
        reason=None,
        seconds=seconds,
        interval=interval,
        percentiles={
            name: float(np.median([s.percentiles_seconds[name] for s in summaries]))
            for name in sorted(common)
        },
        skew=float(np.median(skews)) if skews else None,
        algbw=bandwidth.algbw(case.nbytes, seconds) if case.nbytes else None,
        busbw=bandwidth.busbw(case.nbytes, seconds, first.bus_factor) if case.nbytes else None,
        fraction=float(np.median(fractions)) if fractions else None,
        flags=(),
    )
    flags = tuple(name for name, (_, raised) in FLAGS.items() if raised(line, plan))
    return Line(**{**vars(line), "flags": flags})


def _imprecise(line: Line, plan: Plan) -> bool:
    return line.half_width is None or line.half_width > plan.precision


def _skewed(line: Line, plan: Plan) -> bool:
    """A skew is of a repetition, `seconds` of one of its calls."""
    calls = min(r.calls for r in line.results)
    return (line.skew or 0) > SKEW_SHARE * (line.seconds or 0) * calls


# name → (legend, whether it is raised); in the order in which a row shows them
FLAGS: dict[str, tuple[str, Callable[[Line, Plan], bool]]] = {
    "WRONG": (
        "a result was wrong; do not use the row",
        lambda line, plan: any(r.wrong for r in line.results),
    ),
    "INVALID": (
        "faster than the data can move; do not use the row",
        lambda line, plan: any(
            limits.impossible(r, r.summary.median_seconds) for r in line.results if r.summary
        ),
    ),
    ">limit": (
        "busbw above the measured limit: caches, or a network that reduces",
        lambda line, plan: (line.fraction or 0) > 1,
    ),
    "imprecise": (
        "the interval is wider than --precision asks, or there is none",
        _imprecise,
    ),
    "skew": (
        "the ranks entered apart by more than 10 % of the time",
        _skewed,
    ),
    "busy": (
        "other processes used more than 5 % of the cores meanwhile: measure again on a quiet host",
        lambda line, plan: any((r.others_share or 0) > BUSY_SHARE for r in line.results),
    ),
    "batched": (
        "too short for the clock: several calls a stamp, no percentiles",
        lambda line, plan: any(r.batch > 1 for r in line.results),
    ),
    "rounded": (
        "the size asked for does not divide into whole elements of every rank",
        lambda line, plan: any(r.requested_nbytes != r.case.nbytes for r in line.results),
    ),
    "stopped": (
        "ended by Ctrl-C or a signal before its time",
        lambda line, plan: any(r.stop_reason == "interrupted" for r in line.results),
    ),
}


def faster(group: list[Line]) -> Line | None:
    """Of lines that differ in backend only, the one whose interval lies below all others'.

    None is named on a busy host: a polling backend loses there to any neighbour.
    """
    barred = {"WRONG", "INVALID", "busy"}
    known = [line for line in group if line.interval is not None and not barred & set(line.flags)]
    if len(known) < 2 or len(known) < len([line for line in group if line.seconds is not None]):
        return None
    best = min(known, key=lambda line: line.seconds or 0.0)
    assert best.interval is not None
    clear = all(
        line.interval is not None and best.interval.high < line.interval.low
        for line in known
        if line is not best
    )
    return best if clear else None
