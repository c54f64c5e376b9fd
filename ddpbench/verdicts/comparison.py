"""The verdict on two sets of runs, case by case, and what to know before believing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ddpbench.analysis.flags import BUSY_SHARE
from ddpbench.records.schema import LEFT_OUT
from ddpbench.verdicts import drift, judging, matching, verdict
from ddpbench.verdicts.differences import Difference, differences
from ddpbench.verdicts.drift import Drift
from ddpbench.verdicts.judging import Pair
from ddpbench.verdicts.matching import AnyCase, Found, Side, Source
from ddpbench.verdicts.noise import Noise
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
# What matters first.
ORDER = (SLOWER, INVALID, INCOMPARABLE, INCONCLUSIVE, FASTER, SAME, ONLY_BASE, ONLY_NEW)


@dataclass(frozen=True)
class Rule:
    """How the verdicts are found."""

    margin: float = verdict.MARGIN  # a smaller change is none
    noise: Noise | None = None  # this machine's: no change below it is claimed
    drift: Drift | None = None  # of the two sides, where they are apart in time
    # Launches of the same number are neighbours in time, and are judged in pairs.
    paired: bool = False
    confidence: float = verdict.CONFIDENCE  # of paired intervals
    # Fields of the identity that may differ: what the user varies, to see what it does.
    varied: tuple[str, ...] = ()


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
    drift: float = 0.0  # no smaller change is claimed, since the sides are apart in time
    drifts: bool = False  # it is INCONCLUSIVE for that reason alone


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


def compare(
    base: Source, new: Source, rule: Rule, wanted: Callable[[AnyCase], bool] = matching.everything
) -> Comparison:
    """The verdicts on the wanted cases. Raises ValueError when the runs of a side differ in what
    they measured, so that they are no replicates."""
    sides = matching.found(base, wanted), matching.found(new, wanted)
    rows = _judged([row for pair in matching.pairs(*sides) for row in _row(*pair, rule)], rule)

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


def _row(base: Found | None, new: Found | None, rule: Rule) -> Iterator[Row]:
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
        varied = set(matching.fields_differing(base.case, new.case)) <= set(rule.varied)
        yield Row("" if varied else INCOMPARABLE, case, left, right, why=why)


def _judged(rows: list[Row], rule: Rule) -> list[Row]:
    """The rows with all verdicts."""
    rows = [_by_quartiles(row) for row in rows]
    todo = [(place, pair) for place, row in enumerate(rows) if (pair := _pair(row, rule))]
    if rule.drift is not None:
        drifts = [rule.drift.margin(rows[place].case, len(todo)) for place, _ in todo]
        todo = [(place, replace(pair, drift=drift))
                for (place, pair), drift in zip(todo, drifts, strict=True)]  # fmt: skip
    found = judging.judge_pairs([pair for _, pair in todo], rule.paired, rule.confidence)
    for (place, pair), one in zip(todo, found, strict=True):
        rows[place] = replace(
            rows[place], verdict=one.verdict, margin=pair.margin, shift=one.shift,
            needed=one.needed, why="; ".join(filter(None, [rows[place].why, one.why])),
            drift=pair.drift, drifts=one.drifts,
        )  # fmt: skip
    return [_placed(row) for row in rows] if rule.drift is not None else rows


def _placed(row: Row) -> Row:
    """Without a claim that the placement of the ranks' cores explains."""
    if row.base is None or row.new is None or row.verdict not in (SLOWER, FASTER):
        return row
    why = drift.moved(row.base, row.new)
    return replace(row, verdict=INCONCLUSIVE, why=why, drifts=True) if why else row


def _by_quartiles(row: Row) -> Row:
    """With both sides by the statistic with which they are compared."""
    if row.verdict or row.base is None or row.new is None:
        return row
    base, new = matching.alike(row.base, row.new)
    return replace(row, base=base, new=new)


def _pair(row: Row, rule: Rule) -> Pair | None:
    """What is to be judged, if anything; where it is paired, the launches that both sides have."""
    if row.verdict or row.base is None or row.new is None:
        return None
    base, new = row.base.times, row.new.times
    if rule.paired:
        sides = [dict(zip(s.launches, s.times, strict=True)) for s in (row.base, row.new)]
        both = sorted(sides[0].keys() & sides[1].keys())
        base, new = (tuple(side[n] for n in both) for side in sides)
    noise = 0.0
    if rule.noise is not None:
        noise = rule.noise.margin(row.case, min(len(base), len(new)), row.base.statistic)
    return Pair(np.array(base), np.array(new), max(rule.margin, noise))


def _notes(base: Source, new: Source, rule: Rule, rows: list[Row]) -> Iterator[str]:
    """What a reader must know to believe the verdicts."""
    for name, source in (("BASE", base), ("NEW", new)):
        for run in source.runs:
            if run.state != "complete":
                yield f"{name} is PARTIAL: {run.id} is {run.state}"
            for finding in run.findings:
                if finding.code == LEFT_OUT:
                    yield f"{name} is not all of {run.id}: {finding.sentence}"
        measured = [o for run in source.runs for o in run.outcomes if o.summary is not None]
        busy = sum((o.others_share or 0) > BUSY_SHARE for o in measured)
        if busy:
            yield (
                f"{name} was measured on a busy host: other processes used more than "
                f"{BUSY_SHARE * 100:g} % of the cores in {busy} of {len(measured)} measurements"
            )
    if rule.drift is not None:
        counts = {rule.drift.stored(row.case) for row in rows if row.shift is not None}
        fewest = min(counts, default=0)
        known = (
            f"estimated from {fewest} or more stored runs of BASE's environment"
            if fewest
            else f"assumed for cases with fewer than {drift.FEWEST} stored runs"
        )
        yield (
            f"the two sides are {_span(rule.drift.seconds)} apart, and a machine drifts: no change "
            f"below the column drift is claimed ({known}); `ab` measures in turns, without drift"
        )


def _span(seconds: float) -> str:
    """ "40 seconds", "3 hours"."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return f"{seconds:.0f} seconds"
