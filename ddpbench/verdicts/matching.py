"""What each of two sides measured, and which case of one belongs to which of the other.

A case is the identity of what was measured: only equal ones are compared. Cases that differ, but
were asked for as the same row (operation and size, or workload), belong together too, and can only
be told to differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from ddpbench.analysis import findings, limits, stats
from ddpbench.records.schema import Case, Interval, Result, Run, StepCase, StepResult

Outcome = Result | StepResult
AnyCase = Case | StepCase


@dataclass(frozen=True)
class Source:
    """One side: its name, and the runs that are pooled: each launch of each is a replicate."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Side:
    """One case on one side: the median of its launches' times, its interval from 6 launches on."""

    seconds: float
    interval: Interval | None
    times: tuple[float, ...]  # seconds, one a launch
    launches: tuple[int, ...]  # their numbers
    # Lower quartiles, likewise; empty where a launch has none: a DDP step, another tool's log, an
    # older run.
    quartiles: tuple[float, ...] = ()
    statistic: str = "median"  # of a launch, that `times` are
    handoffs: tuple[float, ...] = ()  # seconds, between the ranks' cores, one a launch that has it

    def of_quartiles(self) -> Side | None:
        """The same side with the lower quartiles of its launches in place of their medians: where
        calls have two usual times, it stays with one while the median goes from one to the other,
        and needs a tenth of the launches (tests/perf/modes.py)."""
        if not self.quartiles:
            return None
        seconds, interval = stats.over_launches(np.array(self.quartiles))
        return replace(
            self, seconds=seconds, interval=interval, times=self.quartiles,
            statistic="lower quartile",
        )  # fmt: skip


def alike(base: Side, new: Side) -> tuple[Side, Side]:
    """Both by the statistic with which they are compared: the lower quartile where both have it."""
    left, right = base.of_quartiles(), new.of_quartiles()
    return (base, new) if left is None or right is None else (left, right)


@dataclass(frozen=True)
class Found:
    """What one side has of a case."""

    case: AnyCase
    asked: tuple[str, int]  # the row asked for: operation or workload, and bytes
    side: Side | None  # None: it was measured in no launch
    fault: str | None  # why its figures are not to be used
    reason: str  # why it was not measured

    @property
    def tried(self) -> bool:
        """Whether there are figures, be they wrong."""
        return self.side is not None or self.fault is not None


def everything(case: AnyCase) -> bool:
    """All cases are wanted."""
    return True


def found(source: Source, wanted: Callable[[AnyCase], bool] = everything) -> dict[AnyCase, Found]:
    """The wanted cases of one side over all launches of all its runs."""
    by_case: dict[AnyCase, list[Outcome]] = {}
    by_key: dict[str, AnyCase] = {}
    for outcome in (outcome for run in source.runs for outcome in run.outcomes):
        case = outcome.case
        first = by_key.setdefault(case.key, case)
        if len(source.runs) > 1 and first != case:
            raise ValueError(
                f"the runs in {source.name} are not comparable with each other: "
                f"{case.key} has {differing(first, case)}"
            )
        if wanted(case):
            by_case.setdefault(case, []).append(outcome)
    return {case: _one(case, outcomes) for case, outcomes in by_case.items()}


def _one(case: AnyCase, outcomes: list[Outcome]) -> Found:
    name, nbytes = row_of(case)
    nbytes = next((o.requested_nbytes for o in outcomes if isinstance(o, Result)), nbytes)
    fault = next((f"launch {o.launch}: {f}" for o in outcomes if (f := _fault(o))), None)
    timed = [(o.launch, seconds) for o in outcomes if (seconds := _seconds(o)) is not None]
    side = None
    if timed and fault is None:
        launches, times = zip(*timed, strict=True)
        quartiles = tuple(q for o in outcomes if (q := _quartile(o)) is not None)
        side = Side(
            *stats.over_launches(np.array(times)), times, launches,
            quartiles if len(quartiles) == len(times) else (),
            handoffs=tuple(seconds for o in outcomes if (seconds := _handoff(o)) is not None),
        )  # fmt: skip
    return Found(case, (name, nbytes), side, fault, outcomes[0].reason or "not measured")


def row_of(case: AnyCase) -> tuple[str, int]:
    """What names the row of a case: operation and bytes, or workload."""
    return (case.workload, 0) if isinstance(case, StepCase) else (case.operation, case.nbytes)


def _seconds(outcome: Outcome) -> float | None:
    """The launch's median."""
    if outcome.summary is None:
        return None
    if isinstance(outcome, StepResult):
        return outcome.summary.step.value
    return outcome.summary.median_seconds


def _quartile(outcome: Outcome) -> float | None:
    """The launch's lower quartile."""
    if isinstance(outcome, StepResult) or outcome.summary is None:
        return None
    known = outcome.summary.quantiles_seconds
    return stats.lower_quartile(known) if len(known) == stats.QUANTILES else None


def _handoff(outcome: Outcome) -> float | None:
    """A cache line's round trip between the ranks' cores."""
    return outcome.handoff_seconds if isinstance(outcome, Result) else None


def _fault(outcome: Outcome) -> str | None:
    """Why an outcome must not be used."""
    seconds = _seconds(outcome)
    if isinstance(outcome, StepResult):
        if findings.replicas_bad(outcome):
            return "the replicas differed, or were not finite"
    elif outcome.wrong:
        rank = outcome.wrong[0].rank
        return f"{'a rank' if rank < 0 else f'rank {rank}'} got a wrong result"
    elif seconds is not None and limits.impossible(outcome, seconds):
        return "faster than the data can move"
    if seconds is not None and not 0 < seconds < math.inf:
        return f"a median of {seconds} s"
    return None


def pairs(
    base: dict[AnyCase, Found], new: dict[AnyCase, Found]
) -> Iterator[tuple[Found | None, Found | None]]:
    """Each case with its partner; None where the other side has none."""
    left = {case: each for case, each in new.items() if case not in base}
    for case, mine in base.items():
        other = new.get(case)
        if other is None and mine.tried and (other := _nearest(mine, left)) is not None:
            del left[other.case]
        yield mine, other
    for each in left.values():
        yield None, each


def _nearest(mine: Found, left: dict[AnyCase, Found]) -> Found | None:
    """Of the other side's unmatched, the one asked for as the same row that differs least."""
    same = [each for each in left.values() if each.tried and each.asked == mine.asked]
    return min(same, key=lambda each: len(fields_differing(mine.case, each.case)), default=None)


def fields_differing(base: AnyCase, new: AnyCase) -> list[str]:
    """The names of the fields in which two cases differ."""
    names = [field.name for field in fields(base) if hasattr(new, field.name)]
    return [name for name in names if getattr(base, name) != getattr(new, name)]


def differing(base: AnyCase, new: AnyCase) -> str:
    """The fields in which two cases differ, with both values."""
    return ", ".join(
        f"{name} {_said(getattr(base, name))} → {_said(getattr(new, name))}"
        for name in fields_differing(base, new)
    )


def _said(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
