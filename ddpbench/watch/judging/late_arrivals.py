"""A rank that arrives late at the collectives of a job without steps. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddpbench.analysis import stats
from ddpbench.records.schema import Finding
from ddpbench.watch.judging.history import Calls, History, who_most_often

FEWEST = 24  # calls that a verdict needs
MOST_OFTEN = 0.6  # of the calls, at which the same rank is last
LEAST_SHARE = 0.05  # of the time between two calls


def judge_arrivals(history: History) -> Iterator[Finding]:
    """Yield a finding for the calls at which the same rank is nearly always the last to arrive."""
    host_of = {rank: host for host, ranks in history.hosts.items() for rank in ranks}
    for (group, operation, nbytes), calls in history.calls.items():
        if calls.ranks < 2 or len(calls.late) < FEWEST:
            continue
        rank, often = who_most_often(list(calls.last_ranks))
        seconds, low, high = _measure(calls, rank)
        between = float(np.median(np.diff(np.sort(calls.ended_ns)))) * 1e-9
        if often < MOST_OFTEN or low < LEAST_SHARE * between:
            continue
        name = f"{operation} of {nbytes / 1e3:.4g} kB on group {group}"
        yield Finding(
            "warning",
            "late-arrival",
            f"rank {rank} on {host_of.get(rank, 'an unknown host')} is the last to arrive "
            f"at {name} in {often:.0%} of the calls: {seconds * 1e3:.3g} ms [{low * 1e3:.3g}, "
            f"{high * 1e3:.3g}] after the other ranks, {seconds / between:.1%} of the time from "
            "one call to the next",
            f"find what rank {rank} does longer than the others before this call; to compare the "
            "ranks' devices: python -m ddpbench doctor --only stragglers",
            {
                "rank": rank,
                "group": group,
                "operation": operation,
                "nbytes": nbytes,
                "seconds": seconds,
                "share": seconds / between,
            },
        )


def _measure(calls: Calls, rank: int) -> tuple[float, float, float]:
    """How long the others waited for this rank alone: seconds, median and its interval.

    Where another rank was last, they did not.
    """
    waited = np.array(calls.late) * (np.array(calls.last_ranks) == rank)
    interval = stats.median_interval(waited)
    seconds = float(np.median(waited))
    return (seconds, interval.low, interval.high) if interval else (seconds, 0.0, seconds)
