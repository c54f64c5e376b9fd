"""The verdict on launch medians: against scipy itself, against plain loops, and at its edges."""

import itertools
import math
import statistics
import warnings

import numpy as np
import pytest
from scipy import stats as scipy_stats
from stored_runs import Floats, a_case, a_result, a_run, a_summary, launch_medians

from ddpbench.verdicts import comparison, verdict
from ddpbench.verdicts.comparison import Rule
from ddpbench.verdicts.matching import Source
from ddpbench.verdicts.verdict import FASTER, INCONCLUSIVE, SAME, SLOWER, Chance, Shift


def found(base: Floats, new: Floats) -> Shift:
    """Their shift, which exists."""
    shift = verdict.shift(base, new)
    assert shift is not None
    return shift


# --- the shift ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "new"), [(5, 5), (6, 9), (30, 30)])
def test_the_shift_is_the_median_of_all_differences_of_logs(base: int, new: int) -> None:
    """Hodges–Lehmann against a plain loop over all pairs, its interval against theilslopes."""
    a, b = launch_medians(base, seed=1), launch_medians(new, 1.2e-3, 0.02, seed=2)
    shift = found(a, b)
    each = [math.log(y / x) for x, y in itertools.product(a, b)]
    assert shift.estimate == pytest.approx(statistics.median(each), abs=1e-9)
    plain = scipy_stats.theilslopes(np.log([*a, *b]), [0] * base + [1] * new, 0.95)
    assert (shift.low, shift.high) == pytest.approx((plain.low_slope, plain.high_slope), abs=1e-9)
    assert shift.low < shift.estimate < shift.high
    assert shift.launches == min(base, new)
    assert shift.half_width == pytest.approx((plain.high_slope - plain.low_slope) / 2)


@pytest.mark.parametrize(("base", "new"), [(4, 4), (4, 30), (30, 4), (0, 6)])
def test_below_five_launches_a_side_there_is_no_verdict(base: int, new: int) -> None:
    """However far the sides lie apart, and however many launches the other has: INCONCLUSIVE, and
    six are asked for."""
    shift = verdict.shift(launch_medians(base), launch_medians(new, 1.0))
    assert shift is None
    assert verdict.judge(shift, 0.03) == INCONCLUSIVE
    assert verdict.launches_needed(shift, 0.03) == 6


def test_launches_without_any_variance_are_the_same_without_a_warning() -> None:
    """All medians equal, on which theilslopes alone fails: SAME; another constant: SLOWER."""
    same = np.full(5, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shift, other = found(same, same), found(same, same * 1.5)
        assert verdict.chance(same, same, 0.03).slower > 0.5
    assert (shift.estimate, shift.half_width) == pytest.approx((0, 0), abs=1e-9)
    assert (verdict.judge(shift, 0.03), verdict.judge(other, 0.03)) == (SAME, SLOWER)
    assert (other.low, other.high) == pytest.approx([math.log(1.5)] * 2, abs=1e-9)


def test_ties_do_not_narrow_the_interval() -> None:
    """Where two of six launches are far slower and all others tie, scipy's own interval is [0, 0];
    here it holds the slow ones: INCONCLUSIVE, not SAME."""
    base, new = np.full(6, 1.0), np.array([1.0, 1, 1, 1, 2, 3])
    plain = scipy_stats.theilslopes(np.log([*base, *new]), [0] * 6 + [1] * 6, 0.95)
    assert (plain.low_slope, plain.high_slope) == (0, 0)
    shift = found(base, new)
    assert shift.low == pytest.approx(0, abs=1e-9)
    assert shift.high >= math.log(2)
    assert verdict.judge(shift, 0.03) == INCONCLUSIVE


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [6, 9, 24])
@pytest.mark.parametrize("confidence", [0.95, 0.968])
def test_the_paired_interval_is_scipys_signed_rank_test_inverted(
    pairs: int, confidence: float
) -> None:
    """Shifts within it have p values above 1 - confidence, those outside at most that; the
    one-sided chances are scipy's own p values."""
    base, new = launch_medians(pairs, seed=pairs), launch_medians(pairs, 1.1e-3, seed=pairs + 1)
    shift, each = verdict.paired_shift(base, new, confidence), np.log(new) - np.log(base)
    assert shift is not None
    for end, outward in ((shift.low, -1), (shift.high, 1)):
        inside, outside = (
            scipy_stats.wilcoxon(each - end - step, method="exact").pvalue
            for step in (-outward * 1e-9, outward * 1e-9)
        )
        assert outside <= 1 - confidence + 1e-12 < inside
    for margin in (0.0, 0.03, 0.1, 0.2):
        found, limit = verdict.paired_chance(base, new, margin), math.log1p(margin)
        slower = scipy_stats.wilcoxon(each - limit, alternative="greater", method="exact")
        faster = scipy_stats.wilcoxon(each + limit, alternative="less", method="exact")
        assert found == pytest.approx(Chance(slower.pvalue, faster.pvalue))


def test_pairs_that_cannot_reach_a_confidence_have_no_interval_of_it() -> None:
    """Six pairs reach 96.875 % at most, and five not even 95 %."""
    base, new = np.ones(6), np.full(6, 2.0)
    assert verdict.paired_shift(base[:5], new[:5]) is None
    assert verdict.judge(verdict.paired_shift(base, new, 0.968), 0.03) == SLOWER
    assert verdict.judge(verdict.paired_shift(base, new, 0.97), 0.03) == INCONCLUSIVE


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


# --- the rule -------------------------------------------------------------------------------------

LIMIT = math.log1p(0.03)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (LIMIT + 1e-6, 0.5, SLOWER),
        (LIMIT, 0.5, INCONCLUSIVE),
        (-0.5, -LIMIT - 1e-6, FASTER),
        (-0.5, -LIMIT, INCONCLUSIVE),
        (-LIMIT, LIMIT, SAME),
        (0.01, 0.02, SAME),  # a change, but smaller than the margin
        (-LIMIT - 1e-6, 0, INCONCLUSIVE),
        (0, LIMIT + 1e-6, INCONCLUSIVE),
        (-1, 1, INCONCLUSIVE),
    ],
)
def test_the_whole_interval_must_lie_beyond_the_margin_or_inside(
    low: float, high: float, wanted: str
) -> None:
    """The table of verdicts at its edges."""
    assert verdict.judge(Shift((low + high) / 2, low, high, 6), 0.03) == wanted


def test_a_sweep_corrects_for_its_cases() -> None:
    """Benjamini–Hochberg in both directions; a change that is clear alone is INCONCLUSIVE when the
    corrected p is above 5 %."""
    corrected = verdict.adjust_chances([Chance(p, 1 - p) for p in (0.004, 0.03, 0.5, 0.9, 0.02)])
    assert [each.slower for each in corrected] == pytest.approx([0.02, 0.05, 0.625, 0.9, 0.05])
    clear = Shift(0.3, 0.2, 0.4, 5)
    assert verdict.judge(clear, 0.03, Chance(0.05, 1)) == SLOWER
    assert verdict.judge(clear, 0.03, Chance(0.051, 1)) == INCONCLUSIVE
    fast = Shift(-0.3, -0.4, -0.2, 5)
    assert verdict.judge(fast, 0.03, Chance(1, 0.05)) == FASTER
    assert verdict.judge(fast, 0.03, Chance(0, 0.051)) == INCONCLUSIVE
    assert verdict.adjust_chances([]) == []


def test_identical_code_is_seldom_called_different_in_a_sweep() -> None:
    """Of 60 sweeps of 20 cases, six launches a side that differ by 10 %, at most one has a change,
    where the intervals alone would name more."""
    alone = swept = 0
    for sweep in range(60):
        sides = [
            (launch_medians(6, noise=0.1, seed=n), launch_medians(6, noise=0.1, seed=n + 10**6))
            for n in range(sweep * 20, sweep * 20 + 20)
        ]
        chances = verdict.adjust_chances([verdict.chance(a, b, 0.03) for a, b in sides])
        shifts = [found(a, b) for a, b in sides]
        alone += any(verdict.beyond(shift, 0.03) for shift in shifts)
        swept += any(
            verdict.judge(shift, 0.03, chance) in (SLOWER, FASTER)
            for shift, chance in zip(shifts, chances, strict=True)
        )
    assert swept <= 1 < alone


# --- launches needed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "launches", "needed"),
    [
        (-2 * LIMIT, 2 * LIMIT, 6, 24),  # R·(half-width/margin)²
        (0, 3 * LIMIT, 5, 12),  # 11.25
        (0.2 * LIMIT, 1.02 * LIMIT, 6, 7),  # never fewer than there were
    ],
)
def test_the_launches_that_would_decide(
    low: float, high: float, launches: int, needed: int
) -> None:
    """Noise shrinks with the root of the launches: so many until the interval fits."""
    assert verdict.launches_needed(Shift((low + high) / 2, low, high, launches), 0.03) == needed
