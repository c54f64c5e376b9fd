"""Verdicts on tests, each against its earlier measurement; launches are the replicates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpbench.verdicts import matching
from ddpbench.verdicts.comparison import ONLY_NEW, Row, count_verdicts, judge_rows
from ddpbench.verdicts.matching import AnyCase, Side
from ddpbench.verdicts.verdict import INCOMPARABLE


@dataclass(frozen=True)
class Measured:
    """The measurement of one test."""

    case: AnyCase
    side: Side
    warnings: tuple[str, ...] = ()  # that affect the figures, such as a busy host
    source: str = ""  # the file in which it is saved
    torch: str = ""  # version of torch


@dataclass(frozen=True, kw_only=True)
class JudgedTest(Row):
    """The row of one test."""

    test: str
    saved: Measured | None
    measured: Measured


def judge_tests(
    saved: Mapping[str, Sequence[Measured]], new: Mapping[str, Measured], margin: float
) -> tuple[JudgedTest, ...]:
    """Judge each test of `new`; rows come in order of importance.

    saved: measurements of each test in earlier sessions, the newest last. The newest is the base;
    all of them show how sessions drift apart. margin: the smallest change that counts, a fraction.
    """

    def list_logs(row: JudgedTest) -> list[float]:
        return [math.log(one.side.seconds) for one in saved[row.test] if one.case == row.case]

    rows = []
    for test, measured in new.items():
        base = saved[test][-1] if saved.get(test) else None
        sides = base.side if base else None, measured.side
        row = JudgedTest(measured.case, *sides, margin, test=test, saved=base, measured=measured)
        if base is None:
            row = replace(row, verdict=ONLY_NEW, why="not saved before")
        elif why := matching.differing(base.case, measured.case):
            row = replace(row, verdict=INCOMPARABLE, why=why)
        rows.append(row)
    return judge_rows(rows, list_logs)


def explain_shortfall(rows: Sequence[Row], skipped: Mapping[str, str], allow: bool) -> str:
    """Return which tests were not compared, although they should be; "" if all were.

    skipped: tests that were saved before and measured nothing now → reason. allow: whether to
    accept tests that only one session measured.
    """
    failed = (INCOMPARABLE,) if allow else (INCOMPARABLE, ONLY_NEW)
    left = [f"{count} {name}" for name, count in count_verdicts(rows).items() if name in failed]
    left += [f"{test} (skipped: {why})" for test, why in skipped.items() if not allow]
    left += [] if rows or skipped or allow else ["no test measured ranks"]
    accept = "" if allow else "; --ddpbench-allow-missing accepts ONLY NEW and skipped tests"
    return f"not compared: {', '.join(left)}{accept}" if left else ""
