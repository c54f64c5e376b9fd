"""Sides that are measured in turns: their launches are compared in pairs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from stored_runs import a_case, a_result, a_run, a_summary

from ddpbench.verdicts import comparison
from ddpbench.verdicts.comparison import Rule
from ddpbench.verdicts.matching import Source


def test_paired_sides_meet_in_launches_that_both_have() -> None:
    """Launches of equal number are pairs, in whatever order they were stored; one that only one
    side has is left out. A drift that both meet hides no change of 5 %."""
    drift = np.exp(np.linspace(0, 1, 8))
    case = a_case()

    def side(factor: float, numbers: list[int]) -> Source:
        times = {n: float(1e-3 * factor * drift[n]) for n in numbers}
        return Source("x", (a_run(*(a_result(case, n, a_summary(t)) for n, t in times.items())),))

    base, new = side(1.0, [0, 1, 2, 3, 4, 5, 6, 7]), side(1.05, [6, 5, 4, 3, 2, 1, 0])
    (row,) = comparison.compare(base, new, Rule(paired=True)).rows
    assert row.verdict == "SLOWER"
    assert row.shift is not None
    assert row.shift.launches == 7
    assert row.shift.estimate == pytest.approx(math.log(1.05))
    (row,) = comparison.compare(base, new, Rule()).rows
    assert row.verdict == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("busy", "factor", "alone", "paired"),
    [
        ((0, 3), 1.5, "INCONCLUSIVE", "INCONCLUSIVE"),
        ((0, 2), 1.5, "SLOWER", "SLOWER"),
        ((3, 0), 1.5, "SLOWER", "SLOWER"),
        ((3, 0), 1 / 1.5, "INCONCLUSIVE", "INCONCLUSIVE"),
        ((3, 3), 1.5, "INCONCLUSIVE", "SLOWER"),
        ((0, 6), 1.0, "SAME", "SAME"),
    ],
)
def test_a_busy_side_is_not_blamed(
    busy: tuple[int, int], factor: float, alone: str, paired: str
) -> None:
    """Other processes in half of the launches of the side that took longer explain the change,
    unless both sides of the pairs had them."""

    def side(factor: float, busy: int) -> Source:
        times = [1e-3 * factor * (1 + 1e-3 * n) for n in range(6)]
        results = [a_result(a_case(), n, a_summary(t)) for n, t in enumerate(times)]
        shares = [0.3 if n < busy else 0.01 for n in range(6)]
        results = [replace(r, others_share=s) for r, s in zip(results, shares, strict=True)]
        return Source("x", (a_run(*results),))

    sides = side(1.0, busy[0]), side(factor, busy[1])
    verdicts = [comparison.compare(*sides, Rule(paired=p)).rows[0].verdict for p in (False, True)]
    assert verdicts == [alone, paired]
