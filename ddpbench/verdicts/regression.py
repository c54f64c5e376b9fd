"""Verdicts on tests, each against its earlier measurement; launches are the replicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddpbench.verdicts import differences, many_pairs, matching
from ddpbench.verdicts.comparison import ONLY_NEW, ORDER
from ddpbench.verdicts.many_pairs import Pair
from ddpbench.verdicts.matching import AnyCase, Side
from ddpbench.verdicts.verdict import INCOMPARABLE, Shift


@dataclass(frozen=True)
class Measured:
    """The measurement of one test."""

    case: AnyCase
    side: Side
    warnings: tuple[str, ...] = ()  # that affect the figures, such as a busy host
    source: str = ""  # the file in which it is saved
    torch: str = ""  # version of torch


@dataclass(frozen=True)
class Row:
    """One test; `shift` exists only if it is comparable."""

    test: str
    verdict: str  # "" until it is judged
    base: Measured | None
    new: Measured
    margin: float  # the smallest change that counts
    shift: Shift | None = None
    why: str = ""
    noticeable: float | None = None  # the change that such a comparison notices; None: none


def judge_tests(
    saved: Mapping[str, Sequence[Measured]], new: Mapping[str, Measured], margin: float
) -> tuple[Row, ...]:
    """Judge each test of `new`; rows come in order of importance, then by name.

    saved: measurements of each test in earlier sessions, the newest last. The newest is the base;
    all of them show how sessions drift apart. One of several tests must also pass the test that is
    corrected for their number.
    """
    base = {name: measurements[-1] for name, measurements in saved.items() if measurements}
    rows = [_row(name, base.get(name), measured, margin) for name, measured in new.items()]
    todo = [i for i, row in enumerate(rows) if row.base is not None and not row.verdict]
    pairs = []
    for i in todo:
        row = rows[i]
        assert row.base is not None
        old, now = matching.alike(row.base.side, row.new.side)
        rows[i] = replace(row, base=replace(row.base, side=old), new=replace(row.new, side=now))
        sides = [one.side for one in saved[row.test] if one.case == row.new.case]
        logs = [math.log((side.of_quartiles() or side).seconds) for side in sides]
        drifted, busy = differences.drift_margin(logs, len(todo)), (old.busy, now.busy)
        times = np.array(old.times), np.array(now.times)
        pairs.append(Pair(*times, margin, drifted, len(logs), busy))
    for i, judgement in zip(todo, many_pairs.judge_pairs(pairs), strict=True):
        names = ("verdict", "shift", "why", "noticeable")
        rows[i] = replace(rows[i], **{name: getattr(judgement, name) for name in names})
    return tuple(sorted(rows, key=lambda row: (ORDER.index(row.verdict), row.test)))


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of tests of each verdict that occurs, in order of importance."""
    counted = Counter(row.verdict for row in rows)
    return {name: counted[name] for name in ORDER if counted[name]}


def explain_shortfall(rows: Sequence[Row], skipped: Mapping[str, str], allow: bool) -> str:
    """Return which tests were not compared, although they should be; "" if all were.

    skipped: tests that were saved before and measured nothing now → reason. allow: whether to
    accept tests that only one session measured.
    """
    failed = (INCOMPARABLE,) if allow else (INCOMPARABLE, ONLY_NEW)
    left = [f"{count} {name}" for name, count in counts(rows).items() if name in failed]
    left += [f"{test} (skipped: {why})" for test, why in skipped.items() if not allow]
    left += [] if rows or skipped or allow else ["no test measured ranks"]
    accept = "" if allow else "; --ddpbench-allow-missing accepts ONLY NEW and skipped tests"
    return f"not compared: {', '.join(left)}{accept}" if left else ""


def _row(name: str, base: Measured | None, new: Measured, margin: float) -> Row:
    if base is None:
        return Row(name, ONLY_NEW, None, new, margin, why="not saved before")
    why = matching.differing(base.case, new.case)
    return Row(name, INCOMPARABLE if why else "", base, new, margin, why=why)
