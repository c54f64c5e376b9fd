"""What is kept of many ranks' stamps: bounded, and enough for the figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_stamps import kept_in_bursts, stamps_on_one_clock
from stored_runs import a_result

from ddpbench.analysis import stats
from ddpbench.analysis.stats import Kept
from ddpbench.measure.pace import Samples
from ddpbench.records import store
from ddpbench.session.summary import summarise_result


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_below_the_limit_every_stamp_is_kept(burst: int) -> None:
    """Each rank's stamps of each repetition, once, rank by rank, however they were gathered."""
    stamps = stamps_on_one_clock(3, 7)
    rows = kept_in_bursts(stamps, burst).rows()
    assert rows.shape == (21, 5)
    np.testing.assert_array_equal(rows[:, 0], np.tile(np.arange(7), 3))
    np.testing.assert_array_equal(rows[:, 1], np.repeat(np.arange(3), 7))
    np.testing.assert_array_equal(rows[:, 2:], stamps.reshape(-1, 3))
    assert Kept().rows().shape == (0, 5)


@pytest.mark.parametrize("burst", [1, 4, 50])
def test_above_the_limit_rows_are_bounded_and_tell_the_same(
    monkeypatch: pytest.MonkeyPatch, burst: int
) -> None:
    """The first repetitions are whole, of each later one at most five ranks stay, with their own
    stamps; the slowest, the fastest, first in, last in and last out follow from them exactly."""
    monkeypatch.setattr(stats, "KEPT_STAMPS", 200)
    stamps = stamps_on_one_clock(64, 50)
    its = kept_in_bursts(stamps, burst)
    rows = its.rows()
    repetition, rank = rows[:, 0], rows[:, 1]
    np.testing.assert_array_equal(rows[:, 2:], stamps[rank, repetition])
    assert len(np.unique(rows[:, :2], axis=0)) == len(rows) <= 200 + 5 * 50
    for number in range(50):
        own = rows[repetition == number][:, None, 2:]
        assert len(own) == 64 if number < 3 else 2 <= len(own) <= 5
        one, all_ = stats.over_ranks(own), stats.over_ranks(stamps[:, number : number + 1])
        for name in ("slowest", "fastest", "first_in", "last_in", "last_out"):
            assert getattr(one, name) == getattr(all_, name)


def test_the_summary_is_of_all_ranks_whatever_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that kept a part has the summary of the case that kept all, and as many repetitions;
    warm-ups and the cold call stay below 0."""
    timed = stamps_on_one_clock(16, 40)

    def summed() -> tuple[object, dict[str, Any]]:
        samples = Samples(
            cold=stamps_on_one_clock(16, 1),
            warm_up=kept_in_bursts(stamps_on_one_clock(16, 10, 2), 10),
            timed=kept_in_bursts(timed, 8), stop_reason="precision",
        )  # fmt: skip
        result, columns = summarise_result(a_result(), samples, clock_off_seconds=0.0)
        assert columns is not None
        return result.summary, columns

    summary, columns = summed()
    assert summary == stats.summary(stats.over_ranks(timed), 1, common_clock=True)
    assert {len(columns[name]) for name in store.SAMPLE_COLUMNS} == {16 * 51}
    monkeypatch.setattr(stats, "KEPT_STAMPS", 64)
    bounded, fewer = summed()
    assert bounded == summary
    repetition = np.asarray(fewer["repetition"])
    np.testing.assert_array_equal(np.unique(repetition), np.arange(-11, 40))
    np.testing.assert_array_equal(np.asarray(fewer["warm_up"]), repetition < 0)
    assert len(repetition) < 16 * 51 / 2
