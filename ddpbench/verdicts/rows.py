"""Verdicts on many cases at once, shared by `compare` and the pytest plugin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import expm1
from typing import TypeVar

import numpy as np

from ddpbench.analysis.stats import Floats
from ddpbench.verdicts import drift, verdict
from ddpbench.verdicts.matching import AnyCase, Side
from ddpbench.verdicts.verdict import (
    FASTER,
    INCOMPARABLE,
    INCONCLUSIVE,
    INVALID,
    MOST,
    SAME,
    SLOWER,
    Chance,
    Shift,
)

ONLY_BASE, ONLY_NEW = "ONLY BASE", "ONLY NEW"
# In order of importance.
COMPARED = (SLOWER, INCONCLUSIVE, FASTER, SAME)
ORDER = (SLOWER, INVALID, INCOMPARABLE, INCONCLUSIVE, FASTER, SAME, ONLY_BASE, ONLY_NEW)
DRIFT, BUSY = "drift", "busy"  # reasons to withhold SLOWER or FASTER; more launches do not help
BUSY_LAUNCHES = 0.5  # share of a side's launches at which a busy host may explain its times


@dataclass(frozen=True)
class Row:
    """One case on two sides."""

    case: AnyCase  # BASE's if it has one
    base: Side | None
    new: Side | None
    margin: float  # the smallest change that counts
    verdict: str = ""  # "" until it is judged
    why: str = ""
    shift: Shift | None = None  # None: not comparable, or too few launches
    needed: int | None = None  # launches per side, about, to settle INCONCLUSIVE
    drift: float = 0.0  # by which the sides may differ because they are apart in time
    earlier: int = 0  # runs that show the drift
    withheld: str = ""  # DRIFT or BUSY: INCONCLUSIVE for that reason alone
    noticeable: float | None = None  # the change that such a comparison notices; None: none


RowT = TypeVar("RowT", bound=Row)


def count_verdicts(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of rows of each verdict that occurs, in order of importance."""
    counts = Counter(row.verdict for row in rows)
    return {name: counts[name] for name in ORDER if counts[name]}


def judge_rows(
    rows: Sequence[RowT], paired: bool = False, confidence: float = verdict.CONFIDENCE
) -> list[RowT]:
    """Judge rows with both sides; one of several must also pass the test for their number.

    paired: launches of the same number ran one after the other. They are judged as pairs with
    intervals of this confidence.
    """
    shift, chance, false_share = verdict.shift, verdict.chance, verdict.FALSE_SHARE
    if paired:
        shift, chance = verdict.paired_shift, verdict.paired_chance
        false_share = 1 - confidence
    times = [_list_times(row, paired) for row in rows]
    shifts = [shift(*sides, 1 - false_share) for sides in times]
    tested = [i for i, found in enumerate(shifts) if found is not None]
    chances: dict[int, Chance] = {}
    if len(tested) > 1:
        alone = [chance(*times[i], rows[i].margin) for i in tested]
        chances = dict(zip(tested, verdict.adjust_chances(alone), strict=True))
    judged = []
    for i, (row, sides) in enumerate(zip(rows, times, strict=True)):
        row, found = replace(row, shift=shifts[i]), shifts[i]
        judge = partial(verdict.judge, found, row.margin, chances.get(i), false_share)
        row = _explain(replace(row, verdict=judge(row.drift)), judge(), paired)
        if (strict := shift(*sides, 1 - false_share / len(rows))) is not None:
            row = replace(row, noticeable=verdict.noticeable(strict, row.margin, row.drift))
        judged.append(row)
    return judged


def _list_times(row: Row, paired: bool) -> tuple[Floats, Floats]:
    """Return float64[launch] in seconds of both sides; in pairs, of the launches that both have."""
    assert row.base is not None
    assert row.new is not None
    base, new = row.base, row.new
    if not paired:
        return np.array(base.times), np.array(new.times)
    left, right = (dict(zip(side.launches, side.times, strict=True)) for side in (base, new))
    both = sorted(left.keys() & right.keys())
    return np.array([left[n] for n in both]), np.array([right[n] for n in both])


def _explain(row: RowT, without_drift: str, paired: bool) -> RowT:
    """Return the row with the reason for INCONCLUSIVE. without_drift: the verdict without it."""
    why = ""
    if row.verdict == INCONCLUSIVE and without_drift != INCONCLUSIVE:
        why = f"two runs of identical code may differ by ±{row.drift * 100:.1f} %"
        if row.earlier < drift.FEWEST_RUNS:
            why += f" (assumed: {row.earlier} of {drift.FEWEST_RUNS} earlier runs are stored)"
        row = replace(row, withheld=DRIFT)
    elif row.verdict == INCONCLUSIVE:
        row = replace(row, needed=verdict.launches_needed(row.shift, row.margin))
        why = _explain_inconclusive(row)
    elif busy := _find_busy_side(row, paired):
        why = f"{busy} was measured on a busy host: measure again"
        row = replace(row, verdict=INCONCLUSIVE, withheld=BUSY)
    return replace(row, why="; ".join(filter(None, [row.why, why])))


def _find_busy_side(row: Row, paired: bool) -> str:
    """Return the side that other processes slowed down, if that may explain the verdict.

    If both sides of a pair ran on a busy host, both were slowed down alike.
    """
    base, new = (side is not None and side.busy >= BUSY_LAUNCHES for side in (row.base, row.new))
    if paired and base and new:
        return ""
    if new and row.verdict == SLOWER:
        return "NEW"
    return "BASE" if base and row.verdict == FASTER else ""


def _explain_inconclusive(row: Row) -> str:
    shift, needed = row.shift, row.needed
    if shift is None:
        return f"too few launches: needs {needed} per side"
    width = f"±{expm1(shift.half_width) * 100:.1f} %"
    if verdict.beyond(shift, row.margin):
        width = "may be chance among so many cases"
    launches = f"about {needed}" if needed is not None and needed <= MOST else f"more than {MOST}"
    return f"{width}: needs {launches} launches per side"
