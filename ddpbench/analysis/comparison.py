"""The verdict on two sets of runs, case by case, and what to know before believing it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ddpbench.analysis import matching, verdict
from ddpbench.analysis.differences import Difference, differences
from ddpbench.analysis.lines import BUSY_SHARE
from ddpbench.analysis.matching import AnyCase, Found, Side, Source
from ddpbench.analysis.noise import Noise
from ddpbench.analysis.verdict import (
    FASTER,
    INCOMPARABLE,
    INCONCLUSIVE,
    INVALID,
    SAME,
    SLOWER,
    Floats,
    Shift,
)

ONLY_BASE, ONLY_NEW = "ONLY BASE", "ONLY NEW"
# What matters first.
ORDER = (SLOWER, INVALID, INCOMPARABLE, INCONCLUSIVE, FASTER, SAME, ONLY_BASE, ONLY_NEW)


@dataclass(frozen=True)
class Rule:
    """How the verdicts are found."""

    margin: float = verdict.MARGIN  # a smaller change is none
    noise: Noise | None = None  # this machine's: no change below it is claimed
    # Launches of the same number are neighbours in time, and are judged in pairs.
    paired: bool = False
    confidence: float = verdict.CONFIDENCE  # of paired intervals


@dataclass(frozen=True)
class Row:
    """One case. `shift` is there only where the two sides may be compared."""

    verdict: str
    case: AnyCase  # BASE's, where it has one
    base: Side | None
    new: Side | None
    margin: float = 0.0
    shift: Shift | None = None
    needed: int | None = None  # launches a side, about, where it is INCONCLUSIVE
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """All rows, what matters first; differences of the environments; notes on what to mind."""

    base: Source
    new: Source
    rule: Rule
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Verdict → rows, in order, without those that have none."""
        counted = Counter(row.verdict for row in self.rows)
        return {name: counted[name] for name in ORDER if counted[name]}


def everything(case: AnyCase) -> bool:
    """All cases are wanted."""
    return True


def compare(
    base: Source, new: Source, rule: Rule, wanted: Callable[[AnyCase], bool] = everything
) -> Comparison:
    """The verdicts on the wanted cases. Raises ValueError when the runs of a side differ in what
    they measured, so that they are no replicates."""
    sides = matching.found(base, wanted), matching.found(new, wanted)
    rows = _judged([row for pair in matching.pairs(*sides) for row in _row(*pair)], rule)

    def order(row: Row) -> tuple[int, float, str, int]:
        change = abs(row.shift.estimate) if row.shift else 0.0
        return ORDER.index(row.verdict), -change, *matching.row_of(row.case)

    rows.sort(key=order)
    return Comparison(
        base, new, rule, tuple(rows),
        differences(base.runs, new.runs), tuple(_notes(base, new, rule, rows)),
    )  # fmt: skip


def exit_code(comparison: Comparison, strict: bool) -> int:
    """1 where a row is SLOWER, whatever else is; else 3 where one is INVALID or INCOMPARABLE, or
    none could be compared; else, if strict, 2 where one is open: INCONCLUSIVE, or gone; else 0."""
    seen = set(comparison.counts)
    if SLOWER in seen:
        return 1
    if seen & {INVALID, INCOMPARABLE} or not seen & {SAME, FASTER, INCONCLUSIVE}:
        return 3
    return 2 if strict and seen & {INCONCLUSIVE, ONLY_BASE} else 0


def _row(base: Found | None, new: Found | None) -> Iterator[Row]:
    """A row for two that belong together, without a verdict where there is one to be found; none
    for what neither side measured."""
    case, *_ = [each.case for each in (base, new) if each is not None]
    left, right = (each.side if each is not None else None for each in (base, new))
    faults = [
        f"{name}: {each.fault}"
        for name, each in (("BASE", base), ("NEW", new))
        if each is not None and each.fault is not None
    ]
    if faults:
        yield Row(INVALID, case, left, right, why="; ".join(faults))
    elif base is not None and left is not None and (new is None or right is None):
        yield Row(ONLY_BASE, case, left, None, why=new.reason if new else "")
    elif new is not None and right is not None and (base is None or left is None):
        yield Row(ONLY_NEW, new.case, None, right, why=base.reason if base else "")
    elif base is not None and new is not None and left is not None:
        why = matching.differing(base.case, new.case)
        yield Row(INCOMPARABLE if why else "", case, left, right, why=why)


@dataclass(frozen=True)
class _Open:
    """A row to be judged: its place, and the launch medians of both sides."""

    place: int
    base: Floats
    new: Floats
    margin: float


def _judged(rows: list[Row], rule: Rule) -> list[Row]:
    """The rows with all verdicts; a change in a sweep must also pass the corrected test."""
    todo = list(_open(rows, rule))
    shift, chance = verdict.shift, verdict.chance
    false_share = verdict.FALSE_SHARE
    if rule.paired:
        shift, chance = (
            partial(verdict.paired_shift, confidence=rule.confidence),
            verdict.paired_chance,
        )
        false_share = 1 - rule.confidence
    shifts = {each.place: shift(each.base, each.new) for each in todo}
    tested = [each for each in todo if shifts[each.place] is not None]
    chances: dict[int, verdict.Chance] = {}
    if len(tested) > 1:
        adjusted = verdict.adjusted([chance(t.base, t.new, t.margin) for t in tested])
        chances = {each.place: one for each, one in zip(tested, adjusted, strict=True)}
    for each in todo:
        found = shifts[each.place]
        name = verdict.judge(found, each.margin, chances.get(each.place), false_share)
        row = replace(rows[each.place], verdict=name, shift=found, margin=each.margin)
        if name == INCONCLUSIVE:
            needed = verdict.launches_needed(found, each.margin, len(todo))
            row = replace(row, needed=needed, why=_why(found, each.margin, needed))
        rows[each.place] = row
    return rows


def _open(rows: list[Row], rule: Rule) -> Iterator[_Open]:
    """What is to be judged; where it is paired, the launches that both sides have."""
    for place, row in enumerate(rows):
        if row.verdict or row.base is None or row.new is None:
            continue
        base, new = (dict(zip(s.launches, s.medians, strict=True)) for s in (row.base, row.new))
        if rule.paired:
            both = sorted(base.keys() & new.keys())
            left, right = ([side[n] for n in both] for side in (base, new))
        else:
            left, right = list(row.base.medians), list(row.new.medians)
        least = rule.noise.margin(row.case, min(len(left), len(right))) if rule.noise else 0.0
        yield _Open(place, np.array(left), np.array(right), max(rule.margin, least))


def _why(found: Shift | None, margin: float, needed: int | None) -> str:
    """Why it is INCONCLUSIVE, and what would help."""
    if found is None:
        return f"too few launches, needs {needed} a side"
    if verdict.beyond(found, margin):
        return f"may be chance among so many cases, needs about {needed} launches a side"
    width = f"±{math.expm1(found.half_width) * 100:.1f} %"
    if needed is None:
        return f"{width}, at the margin"
    return f"{width}, needs about {needed} launches a side"


def _notes(base: Source, new: Source, rule: Rule, rows: list[Row]) -> Iterator[str]:
    """What a reader must know to believe the verdicts."""
    for name, source in (("BASE", base), ("NEW", new)):
        for run in source.runs:
            if run.state != "complete":
                yield f"{name} is PARTIAL: {run.id} is {run.state}"
        measured = [o for run in source.runs for o in run.outcomes if o.summary is not None]
        busy = sum((o.others_share or 0) > BUSY_SHARE for o in measured)
        if busy:
            yield (
                f"{name} is of a busy host: other processes used more than "
                f"{BUSY_SHARE * 100:g} % of the cores in {busy} of {len(measured)} measurements"
            )
    changed = any(row.verdict in (SLOWER, FASTER) for row in rows)
    if changed and not rule.paired and _apart(base, new):
        yield (
            "all launches of one side came before those of the other, so that a drift of the "
            "machine reads as a change; measure the two by turns"
        )


def _apart(base: Source, new: Source) -> bool:
    """Whether one side had ended before the other began."""
    starts = [
        sorted(launch.started for run in source.runs for launch in run.launches)
        for source in (base, new)
    ]
    if not all(starts) or "" in (starts[0][0], starts[1][0]):
        return False
    return starts[0][-1] < starts[1][0] or starts[1][-1] < starts[0][0]
