"""Figures from stamps, against the same figures computed another way."""

import statistics
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from random_stamps import random_stamps
from scipy.stats import quantile_test

from ddpbench.analysis import stats
from ddpbench.analysis.lines import modes
from ddpbench.records import codec

# --- the time of a repetition ---------------------------------------------------------------------


def test_the_time_of_a_repetition_needs_no_common_clock() -> None:
    """Shifting one rank's clock by an hour changes neither t_max nor the mean over ranks."""
    stamps = random_stamps(4, 50, 3)
    shifted = stamps.copy()
    shifted[2, :, :2] += 3600 * 10**9
    ranks = map(stats.over_ranks, (stamps, shifted))
    one, other = (stats.summary(over, 1, common_clock=False) for over in ranks)
    assert one == other
    assert (one.skew_seconds, one.last_in_seconds, one.global_seconds) == (None, None, None)


def test_device_time_is_used_where_every_stamp_has_one() -> None:
    """Device times, 0 among them, stand for exit - entry when all are there; one that was not
    taken (-1) and the host's stamps are used."""
    stamps = random_stamps(3, 10, 4, device=True)
    stamps[1, 1, 2] = 0
    wanted = [[int(v) / 10**9 / 2 for v in row] for row in stamps[:, :, 2]]
    np.testing.assert_allclose(stats.spent_ns(stamps) * 1e-9 / 2, wanted, rtol=1e-14)
    stamps[2, 9, 2] = -1
    wanted = [[int(v) / 10**9 / 2 for v in row] for row in stamps[:, :, 1] - stamps[:, :, 0]]
    np.testing.assert_allclose(stats.spent_ns(stamps) * 1e-9 / 2, wanted, rtol=1e-14)


# --- intervals and percentiles --------------------------------------------------------------------


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.968, 0.9975])
@pytest.mark.parametrize("count", [1, 5, 6, 7, 10, 13, 100, 501])
def test_the_ends_of_a_median_are_those_of_scipys_test(count: int, confidence: float) -> None:
    """To the bit; None where scipy has none, as at 95 % below six values."""
    values = np.random.default_rng(count).random(count)
    test = quantile_test(values, q=float(np.median(values)), p=0.5)
    found = test.confidence_interval(confidence)
    wanted = None if np.isnan(found.low) else (found.low, found.high)
    assert stats.ends_of_median(values, confidence) == wanted


@pytest.mark.parametrize("count", [5, 6, 119])
def test_the_interval_of_a_median_is_the_exact_one(count: int) -> None:
    """Of repetitions, and of launches, which are the replicates; below six there is none."""
    values = np.random.default_rng(count).permutation(count) + 1.0
    ends = stats.ends_of_median(values, 0.95)
    centre, launches = stats.over_launches(values)
    assert centre == (count + 1) / 2
    for found, of in ((stats.median_interval(values), "repetitions"), (launches, "launches")):
        assert ends == (found and (found.low, found.high))
        assert found is None or found.of == f"median of {count} {of}"


@pytest.mark.parametrize("count", [120, 139, 1013])
def test_long_series_are_judged_by_batches(count: int) -> None:
    """From 120 repetitions on, the interval is that of the medians of batches of 20 neighbours;
    repetitions that fill no batch are left out of it."""
    times = np.random.default_rng(count).exponential(1.0, count)
    batches = [statistics.median(times[i : i + 20].tolist()) for i in range(0, count - 19, 20)]
    found = stats.median_interval(times)
    assert found is not None
    assert (found.low, found.high) == stats.ends_of_median(np.array(batches), 0.95)
    assert found.of == f"median of {len(batches)} medians of 20 repetitions"


@pytest.mark.parametrize("name", stats.PERCENTILES)
def test_a_percentile_is_given_when_its_interval_exists(name: str) -> None:
    """n values bound the p-quantile on both sides with 95 % only if neither all below it (pⁿ) nor
    all above it ((1-p)ⁿ) has a chance over 2.5 %; a launch has it where six like it are as many."""
    p = float(name[1:]) / 100
    fewest = next(n for n in range(1, 10_000) if max(p, 1 - p) ** n <= 0.025)
    assert stats.PERCENTILES[name] == fewest
    in_each = -(-fewest // 6)
    assert name not in stats.percentiles(np.arange(in_each - 1.0))
    times = np.random.default_rng(0).permutation(in_each) + 0.0
    assert stats.percentiles(times)[name] == pytest.approx(p * (in_each - 1), rel=1e-12)


def launches(share: float, ratio: float, count: int = 6, repetitions: int = 200) -> Any:
    """Launches of calls of which a share takes `ratio` times as long."""
    draw = np.random.default_rng(0)
    slow = draw.random((count, repetitions)) < share
    times = np.where(slow, ratio, 1.0) * 1e-3 * np.exp(0.1 * draw.standard_normal(slow.shape))
    return np.array([stats.quantiles(each) for each in times])


@pytest.mark.parametrize(("share", "ratio"), [(0.33, 10.0), (0.5, 2.0), (0.85, 4.0)])
def test_two_usual_times_are_both_shown(share: float, ratio: float) -> None:
    """Each with its share."""
    low, high = modes(launches(share, ratio), 1200)
    assert [low.seconds, high.seconds] == pytest.approx([1e-3, ratio * 1e-3], rel=0.05)
    assert [low.share, high.share] == pytest.approx([1 - share, share], abs=0.03)


def test_one_usual_time_is_no_two() -> None:
    """Not with a tail, with another time that hardly differs, in a clock's steps, nor where few
    calls were made, or every launch has one time of its own."""
    assert modes(launches(0.05, 10.0), 1200) == ()
    assert modes(launches(0.3, 1.2), 1200) == ()
    draw = np.random.default_rng(0)
    assert modes(np.array([stats.quantiles(1 + draw.pareto(1.5, 5000))]), 5000) == ()
    stepped = np.round(5 + 0.2 * draw.standard_normal(1000), 1) * 1e-6
    assert modes(np.array([stats.quantiles(stepped)]), 1000) == ()
    assert modes(launches(0.33, 10.0), 99) == ()
    assert modes(launches(0.0, 1.0) * [[1.0], [1], [1], [5], [5], [5]], 1200) == ()
    assert modes(np.empty((0, 0)), 1000) == ()


# --- warm-up --------------------------------------------------------------------------------------

Floats = npt.NDArray[np.float64]
STEADY = np.random.default_rng(0).uniform(1.0, 2.0, 20)


def outlier(mean: float) -> Floats:
    """A window of ones with an outlier that makes it this mean."""
    return np.array([1 + 20 * (mean - 1), *[1.0] * 19])


@pytest.mark.parametrize(
    ("before", "after", "agree"),
    [
        (STEADY, STEADY * 1.049, True),
        (STEADY, STEADY * 0.951, True),
        (STEADY, STEADY * 1.051, False),
        (STEADY, STEADY * 0.949, False),
        (np.ones(20), outlier(1.09), True),
        (np.ones(20), outlier(1.11), False),
        (outlier(1.99), np.ones(20), True),
        (outlier(2.01), np.ones(20), False),
    ],
)
def test_neighbouring_windows_agree(before: Floats, after: Floats, agree: bool) -> None:
    """If their quartiles lie within 5 % of each other, and the mean falls by half at most and grows
    by a tenth at most."""
    assert stats.windows_agree(before, after) == agree


# --- the summary ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "calls"), [(1, 1), (2, 20), (5, 2)])
def test_the_bracket_holds_the_time(world: int, calls: int) -> None:
    """In one repetition: last-in ≤ t_max ≤ global, and global - last-in is the skew, of which a
    call has its share. Every figure is the one computed by hand."""
    stamps = random_stamps(world, 40, seed=world * 100 + calls)
    for repetition in range(40):
        over = stats.over_ranks(stamps[:, repetition : repetition + 1])
        one = stats.summary(over, calls, common_clock=True)
        entry = [int(v) for v in stamps[:, repetition, 0]]
        leave = [int(v) for v in stamps[:, repetition, 1]]
        spent = [b - a for a, b in zip(entry, leave, strict=True)]
        wanted = {
            "skew_seconds": (max(entry) - min(entry)) * calls,
            "last_in_seconds": max(leave) - max(entry),
            "global_seconds": max(leave) - min(entry),
            "median_seconds": max(spent),
            "mean_seconds": max(spent),
            "min_seconds": max(spent),
            "max_seconds": max(spent),
            "rank_mean_seconds": sum(spent) / world,
            "rank_min_seconds": min(spent),
        }
        for name, nanoseconds in wanted.items():
            assert getattr(one, name) == pytest.approx(nanoseconds / calls / 1e9, rel=1e-12)
        assert wanted["last_in_seconds"] <= max(spent) <= wanted["global_seconds"]


def test_a_summary_is_of_t_max() -> None:
    """Median, mean, extremes, percentiles, outliers and autocorrelation are those of the series of
    slowest ranks."""
    stamps = random_stamps(3, 500, 7)
    stamps[1, 17, 1] += 10**9
    summary = stats.summary(stats.over_ranks(stamps), 1, common_clock=True)
    times = [float(max(row)) / 1e9 for row in (stamps[:, :, 1] - stamps[:, :, 0]).T]
    assert summary.repetitions == 500
    assert summary.median_seconds == pytest.approx(statistics.median(times))
    assert summary.mean_seconds == pytest.approx(statistics.fmean(times))
    assert summary.min_seconds == pytest.approx(min(times))
    assert summary.max_seconds == pytest.approx(max(times))
    assert summary.max_seconds > 1
    assert list(summary.percentiles_seconds) == ["p50", "p90", "p99"]
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    for counted, distance in ((summary.outliers, 1.5), (summary.far_outliers, 3.0)):
        reach = distance * (third - first)
        assert counted == sum(not first - reach <= t <= third + reach for t in times)
    assert summary.outliers > summary.far_outliers == 1
    assert summary.interval == stats.median_interval(stats.over_ranks(stamps).times(1))


def test_a_repetition_of_many_calls_has_no_percentiles() -> None:
    """Percentiles of averages over calls would not be percentiles of calls."""
    stamps = random_stamps(2, 500, 8)
    several = stats.summary(stats.over_ranks(stamps), 2, common_clock=True, single=False)
    assert several.percentiles_seconds == {}
    assert stats.summary(stats.over_ranks(stamps), 1, common_clock=True).percentiles_seconds != {}


@pytest.mark.parametrize("count", [1, 5, 6, 130])
def test_every_summary_can_be_stored(count: int) -> None:
    """Whatever the clock's resolution makes of the times, many ties among them, a summary holds no
    NaN and encodes."""
    for seed in range(20):
        stamps = random_stamps(2, count, seed)
        stamps[:, :, 1] = stamps[:, :, 0] + (stamps[:, :, 1] % 3 + 1) // 2 * 10**6 + 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            summary = stats.summary(stats.over_ranks(stamps), 1, common_clock=True)
        codec.encode(summary)
