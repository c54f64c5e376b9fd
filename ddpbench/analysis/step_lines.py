"""One line a DDP step's case, over all launches of a run: what tables print and checks read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddpbench.analysis import stats, steps
from ddpbench.analysis.lines import BUSY_SHARE
from ddpbench.records.schema import (
    Bucket,
    Figure,
    Interval,
    Part,
    Phase,
    Replicas,
    Run,
    StepCase,
    StepResult,
    StepSummary,
)

PRECISION = 0.025  # relative half-width of a step's interval that is not remarked on


@dataclass(frozen=True)
class StepLine:
    """One case over its launches."""

    case: StepCase
    results: tuple[StepResult, ...]  # one a launch in which there is something to show
    reason: str | None  # why it was measured in none
    summary: StepSummary | None  # the one launch's; medians over several
    flags: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Of one step."""
        return None if self.summary is None else self.summary.step.value

    @property
    def interval(self) -> Interval | None:
        """Of these seconds."""
        return None if self.summary is None else self.summary.step.interval

    @property
    def half_width(self) -> float | None:
        """Relative half-width of the interval."""
        return None if self.interval is None else stats.half_width(self.interval)

    @property
    def replicas(self) -> Replicas | None:
        """Of the launch where they were worst; None: verified in none."""
        known = [r.replicas for r in self.results if r.replicas is not None]
        return (
            min(known, key=lambda each: (each.equal, not each.failed, each.ok)) if known else None
        )

    def part(self, name: str) -> Part | None:
        """A part of the budget by its name, without the rank where one is to blame."""
        parts = self.summary.budget if self.summary else ()
        return next((part for part in parts if part.name in (name, f"{name} {part.rank}")), None)

    def phase(self, name: str) -> Phase | None:
        """A phase by its name."""
        phases = self.summary.phases if self.summary else ()
        return next((phase for phase in phases if phase.name == name), None)


def lines(run: Run) -> list[StepLine]:
    """The cases of a run by workload as asked for, settings, then backend in the order measured."""
    by_case: dict[StepCase, list[StepResult]] = {}
    for result in run.steps:
        by_case.setdefault(result.case, []).append(result)
    names = list(dict.fromkeys([*run.operations, *(r.case.workload for r in run.steps)]))
    backends = [*run.backends, *(launch.backend for launch in run.launches)]
    backends = list(dict.fromkeys([*backends, *(r.case.backend for r in run.steps)]))
    first = {same_but_backend(case): None for case in by_case}
    groups = list(first)

    def order(case: StepCase) -> tuple[int, ...]:
        group = groups.index(same_but_backend(case))
        return names.index(case.workload), group, backends.index(case.backend)

    return [_line(case, by_case[case]) for case in sorted(by_case, key=order)]


def same_but_backend(case: StepCase) -> StepCase:
    """What cases have in common that only the backends tell apart."""
    return replace(case, backend="", provider="")


def _line(case: StepCase, results: list[StepResult]) -> StepLine:
    known = tuple(r for r in results if r.summary or r.replicas or r.epochs)
    if not known:
        return StepLine(case, (), results[0].reason or "nothing was measured", None)
    summaries = [_upgraded(r.summary) for r in known if r.summary is not None]
    line = StepLine(case, known, None, _over_launches(summaries) if summaries else None)
    flags = tuple(name for name, (_, raised) in FLAGS.items() if raised(line))
    return replace(line, flags=flags)


def _upgraded(summary: StepSummary) -> StepSummary:
    """As it is stored today. Runs without OVERHEAD took it off HIDDEN, which could fall below 0."""
    if any(part.name == steps.OVERHEAD for part in summary.budget):
        return summary
    return replace(summary, budget=tuple(map(_not_below_zero, summary.budget)))


def _not_below_zero(part: Part) -> Part:
    if part.name != steps.HIDDEN:
        return part
    value, interval = max(0.0, part.figure.value), part.figure.interval
    if interval is not None:
        interval = replace(interval, low=max(0.0, interval.low), high=max(0.0, interval.high))
    share = None if part.share is None else max(0.0, part.share)
    return replace(part, figure=Figure(value, interval), share=share)


def _imprecise(line: StepLine) -> bool:
    wide = line.half_width is None or line.half_width > PRECISION
    return line.summary is not None and wide


# name → (legend, whether it is raised); in the order in which a row shows them
FLAGS: dict[str, tuple[str, Callable[[StepLine], bool]]] = {
    "DIFFER": (
        "the replicas were not equal after a step or an epoch; do not train like this",
        lambda line: any(
            (r.replicas is not None and not r.replicas.equal)
            or any(epoch.replicas_equal is False for epoch in r.epochs)
            for r in line.results
        ),
    ),
    "NONFINITE": (
        "parameters or optimizer state hold NaN or infinities",
        lambda line: any(
            r.replicas is not None and r.replicas.equal and r.replicas.failed for r in line.results
        ),
    ),
    "imprecise": (
        f"the step is not known to ±{PRECISION * 100:g} %: give it more --seconds or --rounds, or "
        "a quiet host",
        _imprecise,
    ),
    "busy": (
        "other processes used more than 5 % of the cores meanwhile: measure again on a quiet host",
        lambda line: any((r.others_share or 0) > BUSY_SHARE for r in line.results),
    ),
    "stopped": (
        "ended by Ctrl-C or a signal before its time",
        lambda line: any(r.stop_reason == "interrupted" for r in line.results),
    ),
}


def faster(group: Sequence[StepLine]) -> StepLine | None:
    """Of lines that differ in backend only, the one whose interval lies below all others'.

    None is named on a busy host, nor where replicas differ.
    """
    barred = {"DIFFER", "NONFINITE", "busy"}
    measured = [line for line in group if line.summary is not None]
    if len(measured) < 2 or any(barred & set(line.flags) for line in measured):
        return None
    best = min(measured, key=lambda line: line.seconds or 0.0)
    others = [line.interval for line in measured if line is not best]
    clear = best.interval is not None and all(
        other is not None and best.interval.high < other.low for other in others
    )
    return best if clear else None


def _over_launches(found: list[StepSummary]) -> StepSummary:
    """Medians of the launches' medians, and intervals over launches from six of them on."""
    if len(found) == 1:
        return found[0]
    step = _middle([each.step for each in found])
    rate = float(np.median([each.samples_per_second for each in found]))
    factors = [each.speed_up for each in found if each.speed_up is not None]
    timers = [each.timers for each in found]
    names = [name for name in timers[0] if all(name in each for each in timers)]
    return replace(
        found[0],
        rounds=sum(each.rounds for each in found),
        step=step,
        samples_per_second=rate,
        phases=tuple(_phase(same) for same in zip(*(s.phases for s in found), strict=True)),
        budget=tuple(_parts([each.budget for each in found])),
        speed_up=_middle(factors) if len(factors) == len(found) else None,
        timers={name: float(np.median([each[name] for each in timers])) for name in names},
        buckets=_buckets([each.buckets for each in found]),
        observer=next(_parts([(s.observer,) if s.observer else () for s in found]), None),
    )


def _middle(figures: Iterable[Figure]) -> Figure:
    return Figure(*stats.over_launches(np.array([each.value for each in figures])))


def _phase(same: Sequence[Phase]) -> Phase:
    fastest = float(np.median([phase.fastest_seconds for phase in same]))
    ranks = [phase.slowest_rank for phase in same]
    rank = max(ranks, key=ranks.count)
    share = sum(phase.slowest_share for phase in same if phase.slowest_rank == rank) / len(same)
    return Phase(same[0].name, _middle([p.slowest for p in same]), fastest, rank, share)


def _parts(budgets: Sequence[tuple[Part, ...]]) -> Iterator[Part]:
    """The parts that all launches have; below six launches, which give no interval, one that is
    resolved in each of them is."""
    values = _adding_up(budgets)
    whole = sum(values.get(name, 0.0) for name in steps.CHAINS[0])
    for part in budgets[0]:
        same = [each for budget in budgets for each in budget if each.name == part.name]
        if len(same) < len(budgets):
            continue
        found = _middle([each.figure for each in same])
        found = steps.holding(values.get(part.name, found.value), found.interval)
        shares = [each.share for each in same if each.share is not None]
        share = float(np.median(shares)) if shares else None
        if part.name in values and whole:
            share = values[part.name] / whole
        if found.interval is None:
            resolved = all(each.resolved for each in same)
        else:
            least = steps.LATE_SHARE if part.rank is not None else 0.0
            step = found.value / share if share else 0.0
            resolved = found.interval.low > least * step
        yield Part(part.name, found, share, resolved, part.rank)


def _adding_up(budgets: Sequence[tuple[Part, ...]]) -> dict[str, float]:
    """Medians over launches of the parts that make others, such that they add up here too: of what
    a part ends, less that of what it begins."""
    launches = [{part.name: part.figure.value for part in budget} for budget in budgets]
    common = set.intersection(*(set(launch) for launch in launches))
    values: dict[str, float] = {}
    for chain in steps.CHAINS:
        names, before = [name for name in chain if name in common], 0.0
        for end, name in enumerate(names, 1):
            after = float(np.median([sum(map(each.__getitem__, names[:end])) for each in launches]))
            values[name], before = after - before, after
    if {steps.EXPOSED, steps.TRANSFER} <= common:
        values[steps.OVERHEAD] = values[steps.EXPOSED] - values[steps.TRANSFER]
        values[steps.COMMUNICATION] = values[steps.TRANSFER] + values[steps.HIDDEN]
    return values


def _buckets(found: Sequence[tuple[Bucket, ...]]) -> tuple[Bucket, ...]:
    """Bucket by bucket, where all launches have the same ones."""
    layouts = {tuple((each.index, each.nbytes) for each in buckets) for buckets in found}
    if len(layouts) > 1:
        return ()
    merged = []
    for same in zip(*found, strict=True):
        late = {each.late_rank for each in same}
        merged.append(
            replace(
                same[0],
                handed_seconds=float(np.median([each.handed_seconds for each in same])),
                wire=_middle([each.wire for each in same]),
                wait=_middle([each.wait for each in same]),
                late_rank=late.pop() if len(late) == 1 else None,
            )
        )
    return tuple(merged)
