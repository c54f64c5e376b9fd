"""One line per case of a DDP step, over all launches of a run: read by tables and checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ddpbench.analysis import stats, steps
from ddpbench.analysis.flags import BUSY, STOPPED, AnyLine, Flag, note_fastest, raised_flags
from ddpbench.analysis.spans import EXPOSED_OF
from ddpbench.records.schema import (
    Bucket,
    Collective,
    Figure,
    Part,
    Phase,
    Plan,
    Replicas,
    Run,
    StepCase,
    StepResult,
    StepSummary,
)

MergedT = TypeVar("MergedT", Bucket, Collective)
PRECISION = 0.025  # largest relative half-width of a step's interval without a flag


@dataclass(frozen=True, kw_only=True)
class StepLine(AnyLine):
    """One case over its launches; `seconds` is the time of a step."""

    case: StepCase
    results: tuple[StepResult, ...]
    summary: StepSummary | None = None  # medians over launches

    @property
    def replicas(self) -> Replicas | None:
        """The worst verification of all launches; None if no launch verified."""
        known = [r.replicas for r in self.results if r.replicas is not None]
        return min(known, key=lambda r: (r.equal, not r.failed, r.ok), default=None)

    def part(self, name: str) -> Part | None:
        """Return a part of the budget by its name without the rank that causes it."""
        parts = self.summary.budget if self.summary else ()
        return next((part for part in parts if part.name in (name, f"{name} {part.rank}")), None)

    def phase(self, name: str) -> Phase | None:
        phases = self.summary.phases if self.summary else ()
        return next((phase for phase in phases if phase.name == name), None)


def lines(run: Run) -> list[StepLine]:
    """Return the cases of a run by workload, settings, and backend in the requested order."""
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

    known = [_line(case, by_case[case], run.plan) for case in sorted(by_case, key=order)]
    return note_fastest(known, lambda line: same_but_backend(line.case))


def same_but_backend(case: StepCase) -> StepCase:
    """Return the identity that cases of several backends have in common."""
    return replace(case, backend="", provider="")


def _line(case: StepCase, results: list[StepResult], plan: Plan) -> StepLine:
    known = tuple(r for r in results if r.summary or r.replicas or r.epochs or r.watched)
    if not known:
        return StepLine(case=case, results=(), reason=results[0].reason or "nothing was measured")
    summaries = [r.summary for r in known if r.summary is not None]
    line = StepLine(case=case, results=known)
    if summaries:
        summary = _over_launches(summaries)
        step = summary.step
        line = replace(line, summary=summary, seconds=step.value, interval=step.interval)
    return replace(line, flags=raised_flags(line, plan, FLAGS))


def _is_imprecise(line: StepLine, plan: Plan) -> bool:
    if any(result.watched for result in line.results):
        return False  # a job is not measured again for precision
    return line.summary is not None and (line.half_width is None or line.half_width > PRECISION)


FLAGS: dict[str, Flag[StepLine]] = {  # in the order in which a row shows them
    "DIFFER": Flag(
        "the replicas differed after a step or an epoch: do not train like this",
        lambda line, plan: any(
            (r.replicas is not None and not r.replicas.equal)
            or any(epoch.replicas_equal is False for epoch in r.epochs)
            for r in line.results
        ),
    ),
    "NONFINITE": Flag(
        "parameters or optimizer state contain NaN or infinity",
        lambda line, plan: any(
            r.replicas is not None and r.replicas.equal and r.replicas.failed for r in line.results
        ),
    ),
    "imprecise": Flag(
        f"the 95 % interval of the step is missing or wider than ±{PRECISION * 100:g} %: raise "
        "--case-time or --rounds, or use a quiet host",
        _is_imprecise,
        mark="~",
    ),
    "busy": BUSY,
    "stopped": STOPPED,
}


def _over_launches(summaries: list[StepSummary]) -> StepSummary:
    """Return medians of the launches' medians; intervals over launches need six launches."""
    if len(summaries) == 1:
        return summaries[0]
    factors = [s.speed_up for s in summaries if s.speed_up is not None]
    return replace(
        summaries[0],
        rounds=sum(s.rounds for s in summaries),
        step=_middle(s.step for s in summaries),
        samples_per_second=_median(s.samples_per_second for s in summaries),
        phases=tuple(_phase(same) for same in zip(*(s.phases for s in summaries), strict=True)),
        budget=tuple(_parts([s.budget for s in summaries])),
        speed_up=_middle(factors) if len(factors) == len(summaries) else None,
        buckets=_buckets([s.buckets for s in summaries]),
        collectives=_collectives([s.collectives for s in summaries]),
        peak_nbytes=max(s.peak_nbytes for s in summaries),
        observer=next(_parts([(s.observer,) if s.observer else () for s in summaries]), None),
    )


def _middle(figures: Iterable[Figure]) -> Figure:
    return Figure(*stats.over_launches(np.array([figure.value for figure in figures])))


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _phase(same: Sequence[Phase]) -> Phase:
    ranks = [phase.slowest_rank for phase in same]
    rank = max(ranks, key=ranks.count)
    share = sum(phase.slowest_share for phase in same if phase.slowest_rank == rank) / len(same)
    fastest = _median(phase.fastest_seconds for phase in same)
    return Phase(same[0].name, _middle(phase.slowest for phase in same), fastest, rank, share)


def _parts(budgets: Sequence[tuple[Part, ...]]) -> Iterator[Part]:
    """Return the parts that all launches have.

    Fewer than six launches give no interval: a part is then resolved if every launch resolves it.
    """
    values = _adding_up(budgets)
    whole = sum(values.get(name, 0.0) for name in steps.CHAINS[0])
    for part in budgets[0]:
        same = [each for budget in budgets for each in budget if each.name == part.name]
        if len(same) < len(budgets):
            continue
        middle = _middle(each.figure for each in same)
        figure = steps.holding(values.get(part.name, middle.value), middle.interval)
        shares = [each.share for each in same if each.share is not None]
        share = _median(shares) if shares else None
        if part.name in values and whole:
            share = values[part.name] / whole
        if figure.interval is None:
            resolved = all(each.resolved for each in same)
        else:
            least = steps.LATE_SHARE if part.rank is not None else 0.0
            step = figure.value / share if share else 0.0
            resolved = figure.interval.low > least * step
        yield Part(part.name, figure, share, resolved, part.rank, part.source)


def _adding_up(budgets: Sequence[tuple[Part, ...]]) -> dict[str, float]:
    """Return medians over launches of the parts that make up others, so that they add up.

    A part is the median of its end less the median of its begin.
    """
    launches = [{part.name: part.figure.value for part in budget} for budget in budgets]
    common = set.intersection(*(set(launch) for launch in launches))
    values: dict[str, float] = {}
    for chain in steps.CHAINS:
        names, before = [name for name in chain if name in common], 0.0
        for end, name in enumerate(names, 1):
            after = _median(sum(map(launch.__getitem__, names[:end])) for launch in launches)
            values[name], before = after - before, after
    if {steps.EXPOSED, steps.TRANSFER} <= common:
        values[steps.OVERHEAD] = values[steps.EXPOSED] - values[steps.TRANSFER]
        values[steps.COMMUNICATION] = values[steps.TRANSFER] + values[steps.HIDDEN]
    if operations := common.intersection(EXPOSED_OF.values()):
        values |= {name: _median(each[name] for each in launches) for name in operations}
        if steps.EXPOSED in values:
            of_spans = sum(map(values.__getitem__, operations))
            values[steps.OVERHEAD] = values[steps.EXPOSED] - of_spans
    return values


def _buckets(launches: Sequence[tuple[Bucket, ...]]) -> tuple[Bucket, ...]:
    """Merge bucket by bucket; empty unless all launches have the same buckets."""
    if len({tuple((b.index, b.nbytes) for b in buckets) for buckets in launches}) > 1:
        return ()
    return tuple(
        replace(
            _merged(same, "wire", "wait", *_explained(same)),
            handed_seconds=_median(bucket.handed_seconds for bucket in same),
        )
        for same in zip(*launches, strict=True)
    )


def _explained(same: Sequence[Bucket]) -> tuple[str, ...]:
    """Return the fields that explain the wire, if all launches have them."""
    known = all(bucket.alone is not None for bucket in same)
    return ("alone", "queue", "contention", "unexplained") if known else ()


def _merged(same: Sequence[MergedT], *names: str) -> MergedT:
    """Merge these figures, and name the late rank if all launches name the same."""
    figures: dict[str, Any] = {
        name: _middle(getattr(each, name) for each in same) for name in names
    }
    late = {each.late_rank for each in same}
    return replace(same[0], **figures, late_rank=late.pop() if len(late) == 1 else None)


def _collectives(launches: Sequence[tuple[Collective, ...]]) -> tuple[Collective, ...]:
    """Merge one by one; empty unless all launches have the same collectives."""
    kinds = {
        tuple((c.layers, c.phase, c.operation, c.calls, c.nbytes) for c in collectives)
        for collectives in launches
    }
    if len(kinds) > 1:
        return ()
    return tuple(_merged(s, "exposed", "hidden", "wait") for s in zip(*launches, strict=True))
