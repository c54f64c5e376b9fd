"""The machine's noise: what identical launches differ by, and the margin that follows."""

import math
from dataclasses import replace

import numpy as np
import pytest
from stored_runs import a_case, a_launch, a_result, a_run, a_summary

from ddpbench.records.schema import Run
from ddpbench.verdicts import comparison, noise, verdict
from ddpbench.verdicts.comparison import Rule
from ddpbench.verdicts.matching import Source


def launches(count: int, sd: float, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    """float64[count], seconds, log-normal around 1 ms."""
    return np.asarray(1e-3 * np.exp(np.random.default_rng(seed).normal(0, sd, count)))


def a_calibration(sd: float = 0.02, count: int = 12, seed: int = 0, **case: object) -> Run:
    """One case in so many launches."""
    times = launches(count, sd, seed)
    return a_run(*(a_result(a_case(**case), n, a_summary(float(t))) for n, t in enumerate(times)))


def test_the_spread_is_robust() -> None:
    """1.4826 × the median distance from the median: the standard deviation of a normal log, and
    one launch of a hundred that takes ten times as long changes nothing much."""
    times = launches(2000, 0.05)
    assert noise.spread(times) == pytest.approx(0.05, rel=0.1)
    times[:20] *= 10
    assert noise.spread(times) == pytest.approx(0.05, rel=0.1)


def test_identical_launches_differ_by_less_than_the_margin() -> None:
    """Of new comparisons of identical launches about 95 % find a smaller change than the margin of
    as many launches, and none is called one."""
    margin = noise.margin(launches(400, 0.05, seed=1), 8)
    found = [
        verdict.shift(launches(8, 0.05, 2 * n), launches(8, 0.05, 2 * n + 1))
        for n in range(10, 210)
    ]
    within = [each is not None and abs(each.estimate) < math.log1p(margin) for each in found]
    assert 0.9 <= sum(within) / len(within) <= 0.99
    names = {verdict.judge(each, margin) for each in found}
    assert names <= {verdict.SAME, verdict.INCONCLUSIVE}


def test_more_launches_can_claim_less() -> None:
    """The margin shrinks about with the root of the launches, beyond those that are drawn exactly;
    the launches for a wanted margin are the first of STEPS that reach it."""
    times = launches(100, 0.05)
    margins = [noise.margin(times, n) for n in noise.STEPS]
    assert margins == sorted(margins, reverse=True)
    assert margins[0] / margins[4] == pytest.approx(2, rel=0.4)  # 6 and 24
    assert noise.margin(times, 4 * noise.MOST) == pytest.approx(margins[-1] / 2)
    assert noise.launches_for(times, margins[2]) == noise.STEPS[2]
    assert noise.launches_for(times, margins[-1] / 2) is None


@pytest.mark.parametrize(("known", "asked"), [(4, 6), (12, 4), (0, 6)])
def test_too_few_launches_give_no_margin(known: int, asked: int) -> None:
    """Below 5 there is no interval; 0 is no margin."""
    assert noise.margin(launches(known, 0.05), asked) == 0.0


def test_a_case_is_judged_at_its_own_noise() -> None:
    """10 % on a machine whose identical launches differ by more is no change; on a case that was
    not calibrated, and with no calibration, it is one. A user's greater margin stands."""
    base, new = (a_calibration(0.001, 6, n) for n in (1, 2))
    new = replace(new, results=tuple(
        replace(r, summary=a_summary(r.summary.median_seconds * 1.1)) for r in new.results
        if r.summary))  # fmt: skip
    noisy = noise.pool_launches("x", [a_calibration(0.25)])
    other = noise.pool_launches("x", [a_calibration(0.25, dtype="float64")])
    sides = Source("a", (base,)), Source("b", (new,))
    for rule, name in [
        (Rule(), "SLOWER"),
        (Rule(noise=noisy), "SAME"),
        (Rule(noise=other), "SLOWER"),
        (Rule(margin=0.2, noise=other), "SAME"),
    ]:
        (row,) = comparison.compare(*sides, rule).rows
        assert row.verdict == name
        case = base.results[0].case
        assert row.margin == max(rule.margin, rule.noise.margin(case, 6) if rule.noise else 0)


def test_a_calibration_serves_machines_alike_measured_as_long() -> None:
    """Another processor, other cores or a shorter slice make it useless; a longer one does not."""
    known = replace(
        a_calibration(), launches=(a_launch(facts={"cpu_model": "X", "cores_logical": 2}),)
    )
    assert noise.serves(known, known)
    for facts in ({"cpu_model": "Y", "cores_logical": 2}, {"cpu_model": "X", "cores_logical": 4}):
        assert not noise.serves(known, replace(known, launches=(a_launch(facts=facts),)))
    shorter = replace(known.plan, slice_seconds=known.plan.slice_seconds / 2)
    assert not noise.serves(known, replace(known, plan=shorter))
    assert noise.serves(replace(known, plan=shorter), known)
    assert not noise.serves(replace(known, launches=()), known)


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
