"""Collect the cases of two sides, and match each case with the same case on the other side.

A case is the identity of a measurement: only equal cases are compared. Different cases that were
requested as the same row (operation and size, or workload) are matched too, so that the comparison
can name their differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddpbench.analysis import lines, stats
from ddpbench.records.schema import Case, Interval, Result, Run, StepCase, StepResult

Outcome = Result | StepResult
AnyCase = Case | StepCase


@dataclass(frozen=True)
class Source:
    """One side: its name and its pooled runs, each launch of which is a replicate."""

    name: str
    runs: tuple[Run, ...]
    folders: tuple[Path, ...] = ()  # where the runs are stored, if that is known


@dataclass(frozen=True)
class Side:
    """One case on one side: the median over launches, with an interval if there are six or more."""

    seconds: float
    interval: Interval | None
    times: tuple[float, ...]  # seconds, one per launch
    launches: tuple[int, ...]  # their numbers


@dataclass(frozen=True)
class SideCase:
    """The measurements of a case on one side."""

    case: AnyCase
    row: tuple[str, int]  # the requested row: operation or workload, and bytes
    side: Side | None  # None: no launch measured it
    fault: str | None  # why its figures must not be used
    reason: str  # why it was not measured


ABSENT: dict[str, Any] = {"side": None, "fault": None, "reason": ""}  # case of the other side only


def find_cases(
    source: Source, wanted: Callable[[AnyCase], bool] = lambda case: True
) -> dict[AnyCase, SideCase]:
    """Collect the wanted cases of one side over all launches of all its runs.

    Raises ValueError if two runs of the side measured a case of the same name differently.
    """
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
    found = {}
    for case, outcomes in by_case.items():
        name, nbytes = row_of(case)
        nbytes = next((o.requested_nbytes for o in outcomes if isinstance(o, Result)), nbytes)
        fault = next((f"launch {o.launch}: {f}" for o in outcomes if (f := _fault(o))), None)
        timed = [(o.launch, seconds) for o in outcomes if (seconds := _seconds(o)) is not None]
        side = None
        if timed and fault is None:
            launches, times = zip(*timed, strict=True)
            side = Side(*stats.over_launches(np.array(times)), times, launches)
        reason = outcomes[0].reason or "not measured"
        found[case] = SideCase(case, (name, nbytes), side, fault, reason)
    return found


def row_of(case: AnyCase) -> tuple[str, int]:
    """Return the name of a case's row: operation and bytes, or workload."""
    return (case.workload, 0) if isinstance(case, StepCase) else (case.operation, case.nbytes)


def _seconds(outcome: Outcome) -> float | None:
    if outcome.summary is None:
        return None
    if isinstance(outcome, StepResult):
        return outcome.summary.step.value
    return outcome.summary.median_seconds


def _fault(outcome: Outcome) -> str | None:
    seconds = _seconds(outcome)
    if isinstance(outcome, StepResult):
        if outcome.replicas is not None and outcome.replicas.failed:
            return "the replicas differed, or were not finite"
    elif outcome.wrong:
        rank = outcome.wrong[0].rank
        return f"{'a rank' if rank < 0 else f'rank {rank}'} got a wrong result"
    elif lines.impossible(outcome):
        return "faster than the data can move"
    elif (outcome.unhidden_share or 0.0) >= 0.5:
        return "the kernel launch of most calls was not hidden, so the time includes it"
    if seconds is not None and not 0 < seconds < math.inf:
        return f"a median of {seconds} s"
    return None


def pair_cases(
    base: dict[AnyCase, SideCase], new: dict[AnyCase, SideCase]
) -> Iterator[tuple[SideCase, SideCase]]:
    """Yield each case with its partner; if the other side has none, with one without a side."""
    unmatched = {case: found for case, found in new.items() if case not in base}
    for case, found in base.items():
        partner = new.get(case)
        if partner is None:  # the case of the same row that differs least
            same = [each for each in unmatched.values() if each.row == found.row]
            same.sort(key=lambda each: len(fields_differing(case, each.case)))
            partner = unmatched.pop(same[0].case) if same else replace(found, **ABSENT)
        yield found, partner
    for found in unmatched.values():
        yield replace(found, **ABSENT), found


def fields_differing(base: AnyCase, new: AnyCase) -> list[str]:
    """Return the names of the fields in which two cases differ."""
    names = [field.name for field in fields(base) if hasattr(new, field.name)]
    return [name for name in names if getattr(base, name) != getattr(new, name)]


def differing(base: AnyCase, new: AnyCase) -> str:
    """Format the fields in which two cases differ, with both values."""
    names = fields_differing(base, new)
    return ", ".join(f"{name} {getattr(base, name)} → {getattr(new, name)}" for name in names)
