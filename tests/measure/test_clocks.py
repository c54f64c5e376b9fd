"""Clocks of several hosts: what one is ahead of another is bounded, and never believed beyond."""

from __future__ import annotations

import random
import re
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frozen import Frozen
from random_stamps import stamps_on_one_clock
from rank_pool import RankPool

from ddpbench.analysis import clocks, stats
from ddpbench.analysis.clocks import Ahead
from ddpbench.launch.placement import free_port
from ddpbench.measure import offsets
from ddpbench.records import store
from ddpbench.runtime import control

# --- what ping-pongs say --------------------------------------------------------------------------


def exchanges(draw: random.Random, ahead_ns: int, count: int, drift: float = 0.0) -> stats.Stamps:
    """Ping-pongs with a clock that is so far ahead, gaining `drift` each ns; ways there and back of
    any two lengths."""
    now, found = draw.randrange(10**15), []
    for _ in range(count):
        there, back = draw.randrange(5_000, 10**6), draw.randrange(5_000, 10**6)
        at = now + there
        found.append((now, at + ahead_ns + round(drift * (at - now)), at + back))
        now = at + back
    return np.array(found, dtype=np.int64)


def test_the_truth_is_always_within_the_bound() -> None:
    """Whatever the two ways take and however far the clock is ahead: the offset is within the half
    of the shortest round trip."""
    for seed in range(300):
        draw = random.Random(seed)
        truth = draw.choice([0, 1, -7, draw.randrange(-(10**16), 10**16)])
        pings = exchanges(draw, truth, draw.choice([1, 2, 20, 200]))
        found = clocks.ahead(pings)
        shortest = int((pings[:, 2] - pings[:, 0]).min())
        assert found.least_ns <= truth <= found.most_ns
        assert found.most_ns - found.least_ns == shortest
        assert abs(found.middle_ns - truth) <= found.off_ns(found.middle_ns) <= shortest / 2 + 1


def test_a_drift_widens_the_bound() -> None:
    """What was found before and after, joined, holds all offsets in between, and the bound of a
    correction made before grows by what the clock gained."""
    before, after = Ahead(-10, 10), Ahead(490, 510)
    both = before.joined(after)
    assert (both, both.off_ns(before.middle_ns)) == (Ahead(-10, 510), 510)
    assert both.off_ns(both.middle_ns) == 260
    assert all(both.least_ns <= 5 * n <= both.most_ns for n in range(101))


def test_a_corrected_bracket_is_off_by_no_more_than_the_bound() -> None:
    """Skew, last in and global of stamps from clocks of their own, corrected: within the bound of
    what one clock says; the time itself is the same to the ns."""
    names = ("skew_seconds", "last_in_seconds", "global_seconds")
    for seed in range(50):
        draw, true = random.Random(seed), stamps_on_one_clock(4, 9, seed)
        truths = [0, *(draw.randrange(-(10**12), 10**12) for _ in range(3))]
        found = [Ahead(0, 0), *(clocks.ahead(exchanges(draw, t, 20)) for t in truths[1:])]
        shift = np.array([t - its.middle_ns for t, its in zip(truths, found, strict=True)])
        read = true + shift[:, None, None] * np.array([1, 1, 0])
        one, other = (
            stats.summary(stats.over_ranks(s), 1, common_clock=True) for s in (true, read)
        )
        off = clocks.off_ns(found, [its.middle_ns for its in found]) * 1e-9
        assert one.median_seconds == other.median_seconds
        for name in names:
            assert abs(getattr(one, name) - getattr(other, name)) <= off * 1.000001


# --- where they are compared ----------------------------------------------------------------------


def test_ranks_share_a_clock_by_boot_and_time_namespace() -> None:
    """Both must be the same; where the boot is not known two names of hosts are two clocks."""
    boots = [("a", 1), ("a", 1), ("b", 1), ("a", 2), ("b", 1)]
    facts = [{"boot_id": boot, "time_namespace": own, "hostname": "h"} for boot, own in boots]
    assert clocks.clocks(facts) == [[0, 1], [2, 4], [3]]
    assert clocks.clocks([{"hostname": "h"}, {"hostname": "i"}, {"hostname": "h"}]) == [[0, 2], [1]]


def a_group(rank: int) -> Any:
    """One of two ranks on hosts of their own, without a network."""
    return SimpleNamespace(
        rank=rank,
        timeout=timedelta(seconds=60),
        watchdog=SimpleNamespace(begin_phase=lambda what: None),
        members=[SimpleNamespace(host="node1"), SimpleNamespace(host="node2")],
    )


def test_clocks_that_cannot_be_compared_are_left_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot connect to rank 0 says so; nothing is corrected, nothing known, and the
    run goes on."""
    port = free_port()  # where nobody listens
    monkeypatch.setattr(control, "gather_values", lambda *_: [["127.0.0.1", port], None])
    monkeypatch.setattr(control, "agree_objection", lambda world, objection: objection)
    with offsets.open_clocks(a_group(1), [{"hostname": "node1"}, {"hostname": "node2"}]) as its:
        assert "cannot connect to 127.0.0.1" in str(its.objection)
        assert (its.compare_again([[0, 1]]), its.ahead_ns, its.offsets) == (None, 0, ())
        assert its.compare_again([[0], [1]]) == 0.0  # inside each host


def test_a_rank_that_is_lost_meanwhile_is_named(frozen: Frozen) -> None:
    """The other end closes: an error that names the rank and its host, at once."""
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(RuntimeError) as caught:
        offsets._gather_ahead(a_group(0), [[0], [1]], {1: here})
    assert "rank 1 (node2)" in str(caught.value)
    frozen.text(str(caught.value))


# --- real ranks -----------------------------------------------------------------------------------


def test_planted_offsets_are_found_and_corrected(pool: RankPool, tmp_path: Path) -> None:
    """Three ranks, two with clocks of their own, a day ahead and 2 s behind: each offset is found
    to within its bound, and in the stored stamps no rank leaves an all_reduce before all are in."""
    planted = (0, 86_400_000_000_007, -2_000_000_000)
    environs = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "AHEAD_NS": str(ns) if rank else ""}
        for rank, ns in enumerate(planted)
    ]
    done = pool.ask(
        tmp_path, environs, "collectives", "--import", "shifted_clock", "--backend", "gloo", "--op",
        "all_reduce", "--sizes", "4,4M", "--case-time", "0.2", "--peak-bandwidth", "100",
        "--output", "run",
    )  # fmt: skip
    assert done.returncode == 0, done
    run = store.read(tmp_path / "run")
    found = run.launches[0].offsets
    assert [its.ranks for its in found] == [(1,), (2,)]
    for its, truth in zip(found, planted[1:], strict=True):
        assert abs(its.seconds - truth * 1e-9) <= its.bound_seconds + 1e-9
    assert re.search(r"\+86\d{3}\.\d{6} s ± ", done.stdout)
    stamps = store.read_samples(tmp_path / "run")
    for result in run.results:
        assert result.summary is not None
        # There is a skew exactly where the bound allows it, and then it is none of days.
        seconds, skew = result.summary.median_seconds * result.calls, result.summary.skew_seconds
        assert (skew is not None) == clocks.comparable(result.clock_off_seconds, seconds)
        assert skew is None or 0 <= skew < 3600
        own = stamps[stamps["case"] == result.case.key].groupby("repetition")
        assert result.clock_off_seconds is not None
        early_ns = own["entry_ns"].max() - own["exit_ns"].min()
        assert early_ns.max() <= result.clock_off_seconds * 1e9
