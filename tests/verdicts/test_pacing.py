"""How long launches in turns should be: the variances are found, and the optimum is one."""

import numpy as np
import pytest
from stored_runs import a_result, a_run, a_summary

from ddpbench.verdicts import matching, pacing
from ddpbench.verdicts.matching import Source
from ddpbench.verdicts.pacing import Spread


def test_both_variances_are_found() -> None:
    """Simulated pairs of launches of half a second: 8 % within one, 3 % from one to the next."""
    draw = np.random.default_rng(0)
    between, within = draw.normal(0, 0.03, (2, 4000)), draw.normal(0, 0.08, (2, 4000))
    a, b = between + within
    spread = pacing.estimate_spread(b - a, np.full(8000, 0.08**2), 0.5)
    assert spread.within == pytest.approx(0.08**2 * 0.5)
    assert spread.between == pytest.approx(0.03**2, rel=0.2)


def test_the_optimum_narrows_the_interval_most() -> None:
    """No other duration gives the mean of the launches of a minute a smaller variance."""
    spread, start, cases = Spread(1e-3, 4e-4), 0.9, 2
    best = pacing.best_seconds([spread], start, cases)

    def variance(seconds: float) -> float:
        launches = 60 / (start + cases * seconds)
        return (spread.between + spread.within / seconds) / launches

    assert all(variance(best) <= variance(best * f) for f in (0.5, 0.9, 1.1, 2))


def test_a_case_shows_its_spread_if_its_launches_have_intervals() -> None:
    """The variance is that of the interval; two pairs do not show how launches differ."""

    def side(launches: int, width: float | None) -> matching.Side:
        results = [a_result(None, n, a_summary(1e-3, width)) for n in range(launches)]
        (found,) = matching.find_cases(Source("x", (a_run(*results),))).values()
        assert found.side is not None
        return found.side

    spread = pacing.spread_of(side(3, 0.1), side(3, 0.1), [1.0, 1.0, 1.0])
    assert spread is not None
    assert spread.within == pytest.approx((np.log(1.1 / 0.9) / 3.92) ** 2)
    assert spread.between == pacing.LEAST_BETWEEN
    few = pacing.spread_of(side(2, 0.1), side(2, 0.1), [1.0] * 2)
    assert few is not None
    assert few.between == pacing.USUAL_BETWEEN
    assert pacing.spread_of(side(3, None), side(3, 0.1), [1.0] * 3) is None
