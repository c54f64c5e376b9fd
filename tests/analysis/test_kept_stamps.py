"""The stamps that are kept of many ranks: bounded, and enough for the figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_stamps import kept_in_bursts, stamps_on_one_clock
from stored_runs import a_result

from ddpbench.analysis import stats
from ddpbench.measure.repetitions import Samples, summarise_result
from ddpbench.records import store


def test_the_summary_is_of_all_ranks_whatever_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that kept a part has the summary of the case that kept all;
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
    np.testing.assert_array_equal(np.unique(repetition), [*range(-11, -6), *range(4)])
    np.testing.assert_array_equal(np.asarray(fewer["warm_up"]), repetition < 0)
    assert len(repetition) < 16 * 51 / 2
