"""One line a case, over all launches of a run: what a table prints and a comparison reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ddpbench.analysis import bandwidth, limits, stats
from ddpbench.analysis.modes import Mode, modes
from ddpbench.records.schema import Case, Interval, Plan, Result, Run

SKEW_SHARE, BUSY_SHARE = 0.10, 0.05
OVER_LAUNCHES = 0.10  # half-width of an interval over launches from which a row is imprecise
DISAGREEING = 1.5  # the longest of the launches' medians over the shortest


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
    def medians(self) -> list[float]:
        """Of its launches, in order of size; seconds."""
        return sorted(r.summary.median_seconds for r in self.results if r.summary)

    @property
    def handoffs(self) -> list[float]:
        """Between the ranks' cores in its launches, in order of size; seconds."""
        return sorted(r.handoff_seconds for r in self.results if r.handoff_seconds)

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """Both usual times of the repetitions of all launches, where there are two."""
        known = [r.summary for r in self.results if r.summary and r.summary.quantiles_seconds]
        quantiles = np.array([summary.quantiles_seconds for summary in known])
        return modes(quantiles, sum(summary.repetitions for summary in known))

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
    together = sum(s.repetitions for s in summaries)
    common = set.intersection(*(set(s.percentiles_seconds) for s in summaries))
    common = {name for name in common if together >= stats.PERCENTILES[name]}
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
    return replace(line, flags=flags)


def _imprecise(line: Line, plan: Plan) -> bool:
    wanted = plan.precision if len(line.results) == 1 else OVER_LAUNCHES
    return line.half_width is None or line.half_width > wanted


def _disagreeing(line: Line, plan: Plan) -> bool:
    """Whether launches differ by more than their own intervals admit, and by much."""
    spread = sorted((r.summary for r in line.results if r.summary), key=lambda s: s.median_seconds)
    low, high = spread[0], spread[-1]
    if low.interval is None or high.interval is None:
        return False
    apart = high.median_seconds > DISAGREEING * low.median_seconds
    return apart and high.interval.low > low.interval.high


def _moved(line: Line) -> bool:
    """Whether a handoff between the ranks' cores took longer in some launches, by half or more."""
    return bool(line.handoffs) and line.handoffs[-1] > DISAGREEING * line.handoffs[0]


def _skewed(line: Line, plan: Plan) -> bool:
    """A skew is of a repetition, `seconds` of one of its calls."""
    calls = min(r.calls for r in line.results)
    return (line.skew or 0) > SKEW_SHARE * (line.seconds or 0) * calls


def _faults(result: Result) -> bool:
    """Whether a call touched as much new memory as a quarter of its message, and some at all."""
    pages = (result.page_faults or 0.0) / result.calls
    return pages >= 16 and pages * 4096 >= result.case.nbytes / 4


def _refused(result: Result) -> bool:
    """Whether huge pages were asked for and the kernel left a tenth or more in small ones."""
    return (
        result.case.buffers == "huge"
        and (result.huge_share or 0.0) < 0.9
        and result.case.nbytes > 0
    )


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
        "there is no interval, or it is wider: ±10 % over launches, of one launch --precision",
        _imprecise,
    ),
    "launches": (
        "the medians of the launches, here the shortest and the longest in µs, differ by half or "
        "more: no one figure stands for the case",
        _disagreeing,
    ),
    "cores": (
        "where launches differ, what a cache line took between the ranks' cores and back, here in "
        "µs, differs too: a hypervisor has put them near each other or apart; make more launches, "
        "or have the virtual cores pinned",
        lambda line, plan: _disagreeing(line, plan) and _moved(line),
    ),
    "modes": (
        "the calls have two usual times, here in µs with their shares: the median is one of them, "
        "or lies between",
        lambda line, plan: bool(line.modes),
    ),
    "skew": (
        "the ranks entered apart by more than 10 % of the time",
        _skewed,
    ),
    "busy": (
        "other processes used more than 5 % of the cores meanwhile: measure again on a quiet host",
        lambda line, plan: any((r.others_share or 0) > BUSY_SHARE for r in line.results),
    ),
    "small-pages": (
        "huge pages were asked for and not granted, or not for all: see what "
        "/sys/kernel/mm/transparent_hugepage/enabled says and whether memory is free",
        lambda line, plan: any(_refused(r) for r in line.results),
    ),
    "faults": (
        "each call takes page faults, here their number, for a quarter of its bytes: memory is "
        "mapped anew each time; MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000 in the "
        "environment lets glibc keep it",
        lambda line, plan: any(_faults(r) for r in line.results),
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
