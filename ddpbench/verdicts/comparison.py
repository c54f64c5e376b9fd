"""The verdict on two sets of runs, case by case, with notes on their reliability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ddpbench.analysis.flags import BUSY_SHARE
from ddpbench.records.schema import LEFT_OUT
from ddpbench.records.wording import counted
from ddpbench.verdicts import differences, many_pairs, matching, verdict
from ddpbench.verdicts.differences import ASSUMED, FEWEST_RUNS, MACHINE, Difference, Drift
from ddpbench.verdicts.many_pairs import DRIFT, Pair
from ddpbench.verdicts.matching import AnyCase, Side, SideCase, Source
from ddpbench.verdicts.verdict import (
    FASTER,
    INCOMPARABLE,
    INCONCLUSIVE,
    INVALID,
    SAME,
    SLOWER,
    Shift,
)

ONLY_BASE, ONLY_NEW = "ONLY BASE", "ONLY NEW"
# In order of importance.
COMPARED = (SLOWER, INCONCLUSIVE, FASTER, SAME)
ORDER = (SLOWER, INVALID, INCOMPARABLE, INCONCLUSIVE, FASTER, SAME, ONLY_BASE, ONLY_NEW)


@dataclass(frozen=True)
class Rule:
    """The rules for verdicts."""

    margin: float = verdict.MARGIN  # the smallest change that counts
    drift: Drift | None = None  # between two sides that are apart in time
    paired: bool = False  # launches of the same number ran one after the other: judge them in pairs
    confidence: float = verdict.CONFIDENCE  # of paired intervals
    varied: tuple[str, ...] = ()  # identity fields that the user varies on purpose
    allow_missing: bool = False  # accept cases that only one side measured
    one_machine: bool = False  # sides from two machines are not compared


@dataclass(frozen=True)
class PartRow:
    """A part of a step on both sides: medians over launches, in seconds."""

    name: str
    base_seconds: float
    new_seconds: float
    verdict: str
    shift: Shift | None


@dataclass(frozen=True)
class Row:
    """One case; `shift` exists only if the two sides are comparable."""

    verdict: str  # "" until it is judged
    case: AnyCase  # BASE's if it has one
    base: Side | None
    new: Side | None
    margin: float = 0.0
    shift: Shift | None = None
    needed: int | None = None  # launches per side, about, to settle INCONCLUSIVE
    why: str = ""
    drift: float = 0.0  # smaller changes are not claimed, because the sides are apart in time
    withheld: str = ""  # why SLOWER or FASTER is not claimed: many_pairs.DRIFT or BUSY
    noticeable: float | None = None  # the change that such a comparison notices; None: none
    parts: tuple[PartRow, ...] = ()  # of a step; they do not count for the exit code


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
        """The number of rows of each verdict that occurs, in order of importance."""
        counted = Counter(row.verdict for row in self.rows)
        return {name: counted[name] for name in ORDER if counted[name]}


def compare(
    base: Source, new: Source, rule: Rule, wanted: Callable[[AnyCase], bool] = lambda case: True
) -> Comparison:
    """Compare the wanted cases of two sides.

    Raises ValueError if the runs of a side measured different cases and so are not replicates.
    """
    sides = matching.find_cases(base, wanted), matching.find_cases(new, wanted)
    rows = _judged([row for pair in matching.pairs(*sides) for row in _row(*pair, rule)], rule)

    def order(row: Row) -> tuple[int, float, str, int]:
        change = abs(row.shift.estimate) if row.shift else 0.0
        return ORDER.index(row.verdict), -change, *matching.row_of(row.case)

    rows.sort(key=order)
    environments = differences.differences(base.runs, new.runs)
    return Comparison(
        base, new, rule, tuple(rows), environments, tuple(_notes(base, new, rule, rows))
    )


def exit_code(comparison: Comparison, strict: bool) -> int:
    """Return 3 for two machines, else 1 if a row is SLOWER, else 3 if something is not compared.

    Else return 2 if `strict` and a row is INCONCLUSIVE; else 0.
    """
    if SLOWER in comparison.counts and not explain_other_machine(comparison):
        return 1
    if explain_shortfall(comparison):
        return 3
    return 2 if strict and INCONCLUSIVE in comparison.counts else 0


def explain_shortfall(comparison: Comparison) -> str:
    """Return which requested cases were not compared; "" if none, or if the user allows it."""
    if other := explain_other_machine(comparison):
        return other
    counts = comparison.counts
    allowed = comparison.rule.allow_missing and bool(counts.keys() & set(COMPARED))
    missing = () if allowed else (ONLY_BASE, ONLY_NEW)
    failed = (INVALID, INCOMPARABLE, *missing)
    left = [f"{counts[name]} {name}" for name in failed if name in counts]
    if not left:
        return ""
    accept = any(name in counts for name in missing) and counts.keys() & set(COMPARED)
    advice = "; --allow-missing accepts cases that only one side measured" if accept else ""
    return f"not compared: {', '.join(left)} of {counted(len(comparison.rows), 'case')}{advice}"


def explain_other_machine(comparison: Comparison) -> str:
    """Return how the machines differ if both sides must be of one; "" if they do not differ."""
    differing = comparison.differences if comparison.rule.one_machine else ()
    changed = [
        f"{each.name} {' and '.join(each.base)} → {' and '.join(each.new)}"
        for each in differing
        if each.name in MACHINE
    ]
    if not changed:
        return ""
    return (
        f"{comparison.base.name} was measured on another machine ({', '.join(changed)}), so it is "
        "not comparable: save a baseline on this machine, or add --other-machine"
    )


def _row(base: SideCase | None, new: SideCase | None, rule: Rule) -> Iterator[Row]:
    """Yield the row of a matched pair, without verdict if it can be judged; none if unmeasured."""
    case, *_ = [found.case for found in (base, new) if found is not None]
    left, right = (found.side if found is not None else None for found in (base, new))
    faults = [
        f"{name}: {found.fault}"
        for name, found in (("BASE", base), ("NEW", new))
        if found is not None and found.fault is not None
    ]
    if faults:
        yield Row(INVALID, case, left, right, why="; ".join(faults))
    elif base is not None and left is not None and (new is None or right is None):
        yield Row(ONLY_BASE, case, left, None, why=new.reason if new else "")
    elif new is not None and right is not None and (base is None or left is None):
        yield Row(ONLY_NEW, new.case, None, right, why=base.reason if base else "")
    elif base is not None and new is not None and left is not None:
        why = matching.differing(base.case, new.case)
        varied = set(matching.fields_differing(base.case, new.case)) <= set(rule.varied)
        yield Row("" if varied else INCOMPARABLE, case, left, right, why=why)


def _judged(rows: list[Row], rule: Rule) -> list[Row]:
    todo = {
        i: matching.alike(row.base, row.new)
        for i, row in enumerate(rows)
        if row.base is not None and row.new is not None and not row.verdict
    }
    pairs = []
    for i, (base, new) in todo.items():
        rows[i] = replace(rows[i], base=base, new=new)
        pair = _pair(base, new, rule)
        if rule.drift is not None:
            logs = rule.drift.known.get(rows[i].case, ())
            pair = replace(pair, drift=differences.drift_margin(logs, len(todo)), earlier=len(logs))
        pairs.append(pair)
    judgements = many_pairs.judge_pairs(pairs, rule.paired, rule.confidence)
    for i, pair, judgement in zip(todo, pairs, judgements, strict=True):
        rows[i] = replace(
            rows[i],
            verdict=judgement.verdict,
            margin=pair.margin,
            shift=judgement.shift,
            needed=judgement.needed,
            why="; ".join(filter(None, [rows[i].why, judgement.why])),
            drift=pair.drift,
            withheld=judgement.withheld,
            noticeable=judgement.noticeable,
        )
    rows = [replace(row, parts=tuple(_judge_parts(row, rule))) for row in rows]
    return [_without_moved_cores(row) for row in rows] if rule.drift is not None else rows


def _judge_parts(row: Row, rule: Rule) -> Iterator[PartRow]:
    if row.shift is None or row.base is None or row.new is None:
        return
    parts = row.base.parts, row.new.parts
    names = [name for name in parts[0] if name in parts[1]]
    pairs = []
    for name in names:
        base, new = replace(row.base, times=parts[0][name]), replace(row.new, times=parts[1][name])
        pairs.append(replace(_pair(base, new, rule), drift=row.drift))
    judgements = many_pairs.judge_pairs(pairs, rule.paired, rule.confidence)
    for name, pair, judgement in zip(names, pairs, judgements, strict=True):
        medians = float(np.median(pair.base)), float(np.median(pair.new))
        yield PartRow(name, *medians, judgement.verdict, judgement.shift)


def _without_moved_cores(row: Row) -> Row:
    """Withdraw the claim and `noticeable` if the placement of the ranks' cores explains it."""
    if row.base is None or row.new is None:
        return row
    longer, why = differences.find_moved_cores(row.base, row.new)
    if not why:
        return row
    row = replace(row, noticeable=None)
    if row.verdict != (SLOWER if longer > 1 else FASTER):
        return row
    return replace(row, verdict=INCONCLUSIVE, why=why, withheld=DRIFT)


def _pair(base: Side, new: Side, rule: Rule) -> Pair:
    times = base.times, new.times
    if rule.paired:
        sides = [dict(zip(side.launches, side.times, strict=True)) for side in (base, new)]
        both = sorted(sides[0].keys() & sides[1].keys())
        first, second = (tuple(side[n] for n in both) for side in sides)
        times = first, second
    return Pair(np.array(times[0]), np.array(times[1]), rule.margin, busy=(base.busy, new.busy))


def _notes(base: Source, new: Source, rule: Rule, rows: list[Row]) -> Iterator[str]:
    for name, source in (("BASE", base), ("NEW", new)):
        for run in source.runs:
            if run.state != "complete":
                yield f"{name} is PARTIAL: {run.id} is {run.state}"
            for finding in run.findings:
                if finding.code == LEFT_OUT:
                    yield f"{name} is only a part of {run.id}: {finding.sentence}"
        measured = [o for run in source.runs for o in run.outcomes if o.summary is not None]
        busy = sum((o.others_share or 0) > BUSY_SHARE for o in measured)
        if busy:
            yield (
                f"{name} was measured on a busy host: other processes used more than "
                f"{BUSY_SHARE * 100:g} % of the cores in {busy} of {len(measured)} measurements"
            )
    if rule.drift is not None:
        counts = {len(rule.drift.known.get(row.case, ())) for row in rows if row.shift is not None}
        fewest = min(counts, default=0)
        known = f"learned from at least {fewest} earlier runs in BASE's environment"
        if fewest < FEWEST_RUNS:
            known = (
                f"{ASSUMED * 100:g} % is assumed for cases with fewer than {FEWEST_RUNS} "
                f"earlier runs in BASE's environment: measure {FEWEST_RUNS - fewest} more"
            )
        yield (
            f"the two sides are {_span(rule.drift.seconds)} apart, and a machine changes over "
            "time: a change counts only if its whole range is beyond the column drift "
            f"({known}); `ddpbench ab` measures in turns, without drift"
        )


def _span(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return f"{seconds:.0f} seconds"
