"""Verdicts on many cases at once, shared by `compare` and the pytest plugin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import expm1
from typing import TypeVar

import numpy as np

from ddpbench.analysis.stats import Floats
from ddpbench.verdicts import drift, verdict
from ddpbench.verdicts.matching import AnyCase, Side, row_of
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
    # Launches per side, about, to settle INCONCLUSIVE; None if launches do not help.
    needed: int | None = None
    drift: float = 0.0  # by which the sides may differ because they are apart in time
    earlier: int = 0  # runs that show the drift
    noticeable: float | None = None  # the change that such a comparison notices; None: none


RowT = TypeVar("RowT", bound=Row)


def count_verdicts(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of rows of each verdict that occurs, in order of importance."""
    counts = Counter(row.verdict for row in rows)
    return {name: counts[name] for name in ORDER if counts[name]}


def judge_rows(
    rows: Sequence[RowT],
    list_logs: Callable[[RowT], Sequence[float]] | None = None,
    paired: bool = False,
    confidence: float = verdict.CONFIDENCE,
) -> tuple[RowT, ...]:
    """Judge the rows without verdict, and return all rows in order of importance.

    One of several must also pass the test for their number. list_logs: log times of earlier runs,
    which show the drift; None: the sides are not apart in time. paired: launches of the same number
    ran one after the other. They are judged as pairs with intervals of this confidence.
    """
    todo = [row for row in rows if not row.verdict]
    if list_logs is not None:
        known = [list_logs(row) for row in todo]
        todo = [
            replace(row, drift=drift.drift_margin(logs, len(todo)), earlier=len(logs))
            for row, logs in zip(todo, known, strict=True)
        ]
    judged = [*(row for row in rows if row.verdict), *_judge(todo, paired, confidence)]

    def order(row: RowT) -> tuple[int, float, str, int]:
        change = abs(row.shift.estimate) if row.shift else 0.0
        return ORDER.index(row.verdict), -change, *row_of(row.case)

    return tuple(sorted(judged, key=order))


def _judge(rows: Sequence[RowT], paired: bool, confidence: float) -> list[RowT]:
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
        row = _explain(replace(row, verdict=judge(row.drift)), judge())
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


def _explain(row: RowT, without_drift: str) -> RowT:
    """Return the row with the reason for INCONCLUSIVE. without_drift: the verdict without it."""
    why = ""
    if row.verdict == INCONCLUSIVE and without_drift != INCONCLUSIVE:
        why = f"two runs of identical code may differ by ±{row.drift * 100:.1f} %"
        if row.earlier < drift.FEWEST_RUNS:
            why += f" (assumed: {row.earlier} of {drift.FEWEST_RUNS} earlier runs are stored)"
    elif row.verdict == INCONCLUSIVE:
        row = replace(row, needed=verdict.launches_needed(row.shift, row.margin))
        why = _explain_inconclusive(row)
    return replace(row, why="; ".join(filter(None, [row.why, why])))


def _explain_inconclusive(row: Row) -> str:
    shift, needed = row.shift, row.needed
    if shift is None:
        return f"too few launches: needs {needed} per side"
    width = f"±{expm1(shift.half_width) * 100:.1f} %"
    if verdict.beyond(shift, row.margin):
        width = "may be chance among so many cases"
    launches = f"about {needed}" if needed is not None and needed <= MOST else f"more than {MOST}"
    return f"{width}: needs {launches} launches per side"
