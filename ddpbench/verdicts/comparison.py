"""The verdict on two sets of runs, case by case, with notes on their reliability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

from ddpbench.records.schema import LEFT_OUT
from ddpbench.records.wording import counted
from ddpbench.verdicts import matching, verdict
from ddpbench.verdicts.drift import Drift
from ddpbench.verdicts.environments import Difference, compare_environments
from ddpbench.verdicts.matching import AnyCase, SideCase, Source
from ddpbench.verdicts.rows import (
    COMPARED,
    ONLY_BASE,
    ONLY_NEW,
    Row,
    count_verdicts,
    judge_rows,
)
from ddpbench.verdicts.verdict import INCOMPARABLE, INCONCLUSIVE, INVALID, SLOWER

DRIFTS = (
    "a machine changes over time, so a change counts only if its whole range is beyond the column "
    "drift; `ddpbench ab` measures in turns, without drift"
)


@dataclass(frozen=True)
class Rule:
    """The rules for verdicts."""

    margin: float = verdict.MARGIN  # the smallest change that counts
    drift: Drift | None = None  # between two sides that are apart in time
    paired: bool = False  # launches of the same number ran one after the other: judge them in pairs
    confidence: float = verdict.CONFIDENCE  # of paired intervals
    varied: tuple[str, ...] = ()  # identity fields that the user varies on purpose
    allow_missing: bool = False  # accept cases that only one side measured


@dataclass(frozen=True)
class Comparison:
    """All rows in order of importance, differences of the environments, and notes."""

    base: Source
    new: Source
    rule: Rule
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of rows of each verdict that occurs, in order of importance."""
        return count_verdicts(self.rows)


def compare(
    base: Source, new: Source, rule: Rule, wanted: Callable[[AnyCase], bool] = lambda case: True
) -> Comparison:
    """Compare the wanted cases of two sides.

    Raises ValueError if the runs of a side measured different cases and so are not replicates.
    """
    sides = matching.find_cases(base, wanted), matching.find_cases(new, wanted)
    rows = [row for pair in matching.pair_cases(*sides) if (row := _match(*pair, rule))]
    drift = rule.drift
    list_logs = None if drift is None else lambda row: drift.known.get(row.case, ())
    judged = judge_rows(rows, list_logs, rule.paired, rule.confidence)
    differences = compare_environments(base.runs, new.runs)
    notes = [*_list_conditions("BASE", base), *_list_conditions("NEW", new)]
    if drift is not None:
        apart = timedelta(seconds=round(drift.seconds))
        notes.append(f"the two sides are {apart} apart: {DRIFTS}")
    return Comparison(base, new, rule, judged, differences, tuple(notes))


def exit_code(comparison: Comparison, strict: bool) -> int:
    """Return 1 if a row is SLOWER, else 3 if something is not compared.

    Else return 2 if `strict` and a row is INCONCLUSIVE; else 0.
    """
    if SLOWER in comparison.counts:
        return 1
    if explain_shortfall(comparison):
        return 3
    return 2 if strict and INCONCLUSIVE in comparison.counts else 0


def explain_shortfall(comparison: Comparison) -> str:
    """Return which requested cases were not compared; "" if none, or if the user allows it."""
    counts = comparison.counts
    some = bool(counts.keys() & set(COMPARED))
    missing = () if comparison.rule.allow_missing and some else (ONLY_BASE, ONLY_NEW)
    left = [
        f"{counts[name]} {name}" for name in (INVALID, INCOMPARABLE, *missing) if name in counts
    ]
    if not left:
        return ""
    accept = some and counts.keys() & set(missing)
    advice = "; --allow-missing accepts cases that only one side measured" if accept else ""
    return f"not compared: {', '.join(left)} of {counted(len(comparison.rows), 'case')}{advice}"


def _match(base: SideCase | None, new: SideCase | None, rule: Rule) -> Row | None:
    """Return the row of a matched pair, without verdict if it can be judged; None: unmeasured."""
    case = (base or new).case  # type: ignore[union-attr]
    left, right = (found.side if found is not None else None for found in (base, new))
    row = Row(case, left, right, rule.margin)
    faults = [
        f"{name}: {found.fault}"
        for name, found in (("BASE", base), ("NEW", new))
        if found is not None and found.fault is not None
    ]
    if faults:
        return replace(row, verdict=INVALID, why="; ".join(faults))
    if left is None and right is None:
        return None
    if right is None:
        return replace(row, verdict=ONLY_BASE, why=new.reason if new else "")
    if left is None:
        case = new.case if new else case
        return replace(row, verdict=ONLY_NEW, case=case, why=base.reason if base else "")
    assert base is not None
    assert new is not None
    row = replace(row, why=matching.differing(base.case, new.case))
    if not set(matching.fields_differing(base.case, new.case)) <= set(rule.varied):
        return replace(row, verdict=INCOMPARABLE)
    return row


def _list_conditions(name: str, source: Source) -> Iterator[str]:
    """Yield notes on one side: runs that are not complete, and cases that were left out."""
    for run in source.runs:
        if run.state != "complete":
            yield f"{name} is PARTIAL: {run.id} is {run.state}"
        for finding in run.findings:
            if finding.code == LEFT_OUT:
                yield f"{name} is only a part of {run.id}: {finding.sentence}"
