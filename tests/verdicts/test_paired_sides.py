"""Sides that are measured in turns: their launches are compared in pairs."""

import math

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
