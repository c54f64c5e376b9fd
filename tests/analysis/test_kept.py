"""What is kept of many ranks' stamps: bounded, and enough for the figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_store import a_result

from ddpbench.analysis import kept, stats
from ddpbench.analysis.kept import Kept
from ddpbench.measure.pace import Samples
from ddpbench.records import store
from ddpbench.session.summary import summarise_result


def some_stamps(world: int, count: int, seed: int = 1) -> stats.Stamps:
    """Entries within 0.1 ms of each other, durations of 1 to 2 ms, the clock going on."""
    draw = np.random.default_rng(seed)
    entry = draw.integers(0, 10**5, (world, count)) + np.arange(count) * 10**7
    exits = entry + draw.integers(10**6, 2 * 10**6, (world, count))
    return np.stack([entry, exits, np.full_like(entry, -1)], axis=2)


def filled(stamps: stats.Stamps, burst: int) -> Kept:
    """All repetitions, gathered in bursts."""
    its = Kept()
    for first in range(0, stamps.shape[1], burst):
        its.add(stamps[:, first : first + burst])
    return its


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_below_the_limit_every_stamp_is_kept(burst: int) -> None:
    """Each rank's stamps of each repetition, once, rank by rank, however they were gathered."""
    stamps = some_stamps(3, 7)
    rows = filled(stamps, burst).rows()
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
    monkeypatch.setattr(kept, "KEPT_STAMPS", 200)
    stamps = some_stamps(64, 50)
    its = filled(stamps, burst)
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
    timed = some_stamps(16, 40)

    def summed() -> tuple[object, dict[str, Any]]:
        samples = Samples(
            cold=some_stamps(16, 1), warm_up=filled(some_stamps(16, 10, 2), 10),
            timed=filled(timed, 8), stop_reason="precision",
        )  # fmt: skip
        result, columns = summarise_result(a_result(), samples, clock_off_seconds=0.0)
        assert columns is not None
        return result.summary, columns

    summary, columns = summed()
    assert summary == stats.summarise(timed, 1, common_clock=True)
    assert {len(columns[name]) for name in store.SAMPLE_COLUMNS} == {16 * 51}
    monkeypatch.setattr(kept, "KEPT_STAMPS", 64)
    bounded, fewer = summed()
    assert bounded == summary
    repetition = np.asarray(fewer["repetition"])
    np.testing.assert_array_equal(np.unique(repetition), np.arange(-11, 40))
    np.testing.assert_array_equal(np.asarray(fewer["warm_up"]), repetition < 0)
    assert len(repetition) < 16 * 51 / 2


def test_what_is_gathered_at_once_is_bounded() -> None:
    """However many the ranks, ranks × repetitions of one gathering stay within the limit; there is
    always one repetition."""
    for world in (1, 2, 1000, 16384, 2**20, 2**21):
        count = kept.fitting(world)
        assert count >= 1
        assert count == 1 or count * world <= kept.GATHERED_STAMPS
