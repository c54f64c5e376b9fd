"""One line per case of a DDP step, over all launches of a run: read by tables and checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ddpbench.analysis import stats, steps
from ddpbench.analysis.flags import BUSY, STOPPED, AnyLine, Flag, group_by, note_fastest
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

RecordT = TypeVar("RecordT", Phase, Bucket, Collective)
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
    by_case = group_by(run.steps, lambda result: result.case)
    names = list(dict.fromkeys([*run.operations, *(r.case.workload for r in run.steps)]))
    backends = [*run.backends, *(launch.backend for launch in run.launches)]
    backends = list(dict.fromkeys([*backends, *(r.case.backend for r in run.steps)]))
    groups = list(dict.fromkeys(map(same_but_backend, by_case)))

    def order(case: StepCase) -> tuple[int, ...]:
        group = groups.index(same_but_backend(case))
        return names.index(case.workload), group, backends.index(case.backend)

    known = [_line(case, by_case[case], run.plan) for case in sorted(by_case, key=order)]
    return note_fastest(known)


def keep_default(run: Run) -> Run:
    """Return a run of tune with only its defaults, which it measured first; others as they are."""
    if run.command != "tune":
        return run
    return replace(run, steps=tuple(results[0] for results in group_by_backend(run)))


def group_by_backend(run: Run) -> list[list[StepResult]]:
    """Return the results of each workload on each backend, in the order of measurement."""
    cases = group_by(run.steps, lambda r: (r.case.workload, r.case.backend, r.case.provider))
    return list(cases.values())


def same_but_backend(case: StepCase) -> StepCase:
    """Return the identity that cases of several backends have in common."""
    return replace(case, backend="", provider="")


def _line(case: StepCase, results: list[StepResult], plan: Plan) -> StepLine:
    known = tuple(r for r in results if r.summary or r.replicas or r.watched)
    if not known:
        return StepLine(case=case, results=(), reason=results[0].reason or "nothing was measured")
    summaries = [r.summary for r in known if r.summary is not None]
    line = StepLine(case=case, results=known)
    if summaries:
        summary = _over_launches(summaries)
        step = summary.step
        line = replace(line, summary=summary, seconds=step.value, interval=step.interval)
    raised = (name for name, flag in FLAGS.items() if flag.is_raised(line, plan))
    return replace(line, flags=tuple(raised))


def _is_imprecise(line: StepLine, plan: Plan) -> bool:
    if any(result.watched for result in line.results):
        return False  # a job is not measured again for precision
    return line.summary is not None and (line.half_width is None or line.half_width > PRECISION)


FLAGS: dict[str, Flag[StepLine]] = {  # in the order in which a row shows them
    "DIFFER": Flag(
        "the replicas differed after a step: do not train like this",
        lambda line, plan: any(
            r.replicas is not None and not r.replicas.equal for r in line.results
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


def _over_launches(summaries: Sequence[StepSummary]) -> StepSummary:
    """Return medians of the launches' medians; intervals over launches need six launches."""
    if len(summaries) == 1:
        return summaries[0]
    return replace(
        summaries[0],
        rounds=sum(s.rounds for s in summaries),
        step=_middle([s.step for s in summaries]),
        samples_per_second=float(np.median([s.samples_per_second for s in summaries])),
        phases=_merge_all([s.phases for s in summaries]),
        budget=tuple(_merge_parts(summaries)),
        buckets=_merge_all([s.buckets for s in summaries]),
        collectives=_merge_all([s.collectives for s in summaries]),
        peak_nbytes=max(s.peak_nbytes for s in summaries),
    )


def _middle(figures: Sequence[Figure]) -> Figure:
    return Figure(*stats.over_launches(np.array([figure.value for figure in figures])))


def _merge_all(launches: Sequence[tuple[RecordT, ...]]) -> tuple[RecordT, ...]:
    """Merge one by one; empty unless all launches have the same phases, buckets or collectives."""
    if len({tuple(map(_identify, records)) for records in launches}) > 1:
        return ()
    return tuple(map(_merge, zip(*launches, strict=True)))


def _identify(record: RecordT) -> tuple[object, ...]:
    values = vars(record).items()
    return tuple(v for name, v in values if isinstance(v, str | int) and not name.endswith("rank"))


def _merge(same: Sequence[RecordT]) -> RecordT:
    """Return medians of all figures, the rank that is mostly slowest, and the rank that is late."""
    changes: dict[str, Any] = {}
    for name, first in vars(same[0]).items():
        values = [getattr(each, name) for each in same]
        if isinstance(first, Figure):
            changes[name] = _middle(values)
        elif isinstance(first, float):
            changes[name] = float(np.median(values))
        elif name == "slowest_rank":
            changes[name] = max(values, key=values.count)
        elif name == "late_rank" and len(set(values)) > 1:
            changes[name] = None
    return replace(same[0], **changes)


def _merge_parts(summaries: Sequence[StepSummary]) -> Iterator[Part]:
    """Yield the parts that all launches have, of the launches with the median step: they add up.

    Fewer than six launches give no interval: a part is then resolved if every launch resolves it.
    """
    ordered = sorted(summaries, key=lambda summary: summary.step.value)
    middle = slice((len(ordered) - 1) // 2, len(ordered) // 2 + 1)
    step = float(np.mean([summary.step.value for summary in ordered[middle]]))
    for part in summaries[0].budget:
        same = [each for s in ordered for each in s.budget if each.name == part.name]
        if len(same) < len(ordered):
            continue
        value = float(np.mean([each.figure.value for each in same[middle]]))
        figure = steps.holding(value, _middle([each.figure for each in same]).interval)
        resolved = all(each.resolved for each in same)
        if figure.interval is not None:
            least = steps.LATE_SHARE * step if part.rank is not None else 0.0
            resolved = figure.interval.low > least
        yield Part(part.name, figure, value / step, resolved, part.rank)
