"""The verdicts of a watch on its job. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddpbench.analysis import stats
from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.wording import name_ranks
from ddpbench.watch.judging import (
    sentences,
    shares,
    slow_links,
    stragglers,
)
from ddpbench.watch.judging.history import Calls, History, who_most_often

FEWEST = stragglers.FEWEST  # steps that any verdict on steps needs
FEWEST_CALLS = 24  # calls that a verdict needs
MOST_OFTEN = 0.6  # of the calls, at which the same rank is last
LEAST_SHARE = 0.05  # of the time between two calls


def judge(history: History, world_size: int) -> tuple[Finding, ...]:
    """Return what is wrong with the job, the worst first; empty while too little is known.

    Nothing is an error: a watch does not change the exit code of its job. If reports of ranks are
    missing, nothing is said of all ranks: those that are missing may be the reason.
    """
    missing = history.find_missing(world_size)
    links = slow_links.find_slow_links(history.links.values(), history.hosts, history.link_seconds)
    findings = [slow_links.describe_slow_link(link) for link in links]
    if missing and (history.job or history.calls):
        findings.append(_describe_missing(missing, world_size))
    pauses = list(sentences.describe_pauses(history, missing))
    findings += pauses
    if len(history.job) >= FEWEST:
        step_seconds = float(np.median(history.job.values["seconds"][-stragglers.RECENT :]))
        late = stragglers.find_late(history, step_seconds)
        pausing = {finding.place.get("rank") for finding in pauses}
        late = [one for one in late if one.every == 1 or one.rank not in pausing]
        findings.extend(sentences.describe_late(history, late))
        if not missing:
            since = [one.since for one in late if one.since is not None]
            findings.extend(shares.judge_speed(history, since))
            findings.extend(shares.judge_shares(history))
        findings.extend(shares.judge_hosts(history))
    elif not history.call_steps:
        findings.extend(_judge_arrivals(history))
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _describe_missing(missing: list[int], world_size: int) -> Finding:
    return Finding(
        "note",
        "missing-ranks",
        f"the findings rest on {world_size - len(missing)} of {world_size} ranks, so none is about "
        f"all ranks: no comparable report comes from {name_ranks(missing)}",
        "start all ranks under the watch; look in the job's output for why a watch has failed",
        {"ranks": missing},
    )


def _judge_arrivals(history: History) -> Iterator[Finding]:
    """Yield a finding for the calls at which the same rank is nearly always the last to arrive.

    For a job without steps.
    """
    host_of = history.host_of
    for (group, operation, nbytes), calls in history.calls.items():
        if calls.ranks < 2 or len(calls.newest) < FEWEST_CALLS:
            continue
        rank, often = who_most_often(calls.last_ranks)
        seconds, low, high = _measure(calls, rank)
        between = float(np.median(np.diff(sorted(call.last_ns for call in calls.newest)))) * 1e-9
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
            "ranks' devices: ddpbench doctor --only stragglers",
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
    waited_ns = [(c.last_ns - c.second_ns) * (c.last_rank == rank) for c in calls.newest]
    waited = np.array(waited_ns) * 1e-9
    interval = stats.median_interval(waited)
    seconds = float(np.median(waited))
    return (seconds, interval.low, interval.high) if interval else (seconds, 0.0, seconds)
