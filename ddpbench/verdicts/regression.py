"""The verdict on tests, each against what it measured before: the launch is the replicate, the
margin is the test's own. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddpbench.verdicts import drift, judging, matching
from ddpbench.verdicts.comparison import ONLY_NEW, ORDER
from ddpbench.verdicts.judging import Pair
from ddpbench.verdicts.matching import AnyCase, Side
from ddpbench.verdicts.verdict import INCOMPARABLE, Shift


@dataclass(frozen=True)
class Measured:
    """What one test measured."""

    case: AnyCase
    side: Side
    margin: float | None = None  # of this machine's noise, a fraction; None: not known
    warnings: tuple[str, ...] = ()  # that bear upon the figures: a busy host, …
    source: str = ""  # the saved file it is from


@dataclass(frozen=True)
class Row:
    """One test. `shift` is there only where it may be compared."""

    test: str
    verdict: str
    base: Measured | None
    new: Measured
    margin: float  # a smaller change is none
    shift: Shift | None = None
    why: str = ""


def judged(
    saved: Mapping[str, Sequence[Measured]], new: Mapping[str, Measured], margin: float
) -> tuple[Row, ...]:
    """The verdict on each test of `new`, by name, what matters first.

    saved: each test as earlier sessions have it, the newest last. The newest is the base; all tell
    how sessions drift apart. One of several tests must also pass the test that is corrected for
    their number.
    """
    base = {name: every[-1] for name, every in saved.items() if every}
    rows = [_alike(_row(name, base.get(name), each, margin)) for name, each in new.items()]
    todo = [(i, pair) for i, row in enumerate(rows) if (pair := _pair(row))]
    logs = [_logs(rows[i], saved[rows[i].test]) for i, _ in todo]
    found = judging.judge_pairs([
        replace(pair, drift=drift.margin(known, len(todo)))
        for (_, pair), known in zip(todo, logs, strict=True)
    ])  # fmt: skip
    for (i, _), one in zip(todo, found, strict=True):
        rows[i] = replace(rows[i], verdict=one.verdict, shift=one.shift, why=one.why)
    return tuple(sorted(rows, key=lambda row: (ORDER.index(row.verdict), row.test)))


def _pair(row: Row) -> Pair | None:
    if row.verdict or row.base is None:
        return None
    return Pair(np.array(row.base.side.times), np.array(row.new.side.times), row.margin)


def _alike(row: Row) -> Row:
    """With both sides by the statistic with which they are compared."""
    if row.verdict or row.base is None:
        return row
    base, new = matching.alike(row.base.side, row.new.side)
    return replace(row, base=replace(row.base, side=base), new=replace(row.new, side=new))


def _logs(row: Row, saved: Sequence[Measured]) -> list[float]:
    """Log times of what is saved of the same case."""
    sides = [each.side for each in saved if each.case == row.new.case]
    return [math.log((side.of_quartiles() or side).seconds) for side in sides]


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Verdict → tests, in order, without those that have none."""
    counted = Counter(row.verdict for row in rows)
    return {name: counted[name] for name in ORDER if counted[name]}


def _row(name: str, base: Measured | None, new: Measured, margin: float) -> Row:
    """A test, without a verdict where there is one to be found."""
    if base is None:
        return Row(name, ONLY_NEW, None, new, margin, why="not saved before")
    margin = max(margin, base.margin or 0.0, new.margin or 0.0)
    why = matching.differing(base.case, new.case)
    return Row(name, INCOMPARABLE if why else "", base, new, margin, why=why)
