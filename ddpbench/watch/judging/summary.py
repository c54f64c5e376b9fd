"""A watched job in figures, for the line, the table and the stored run. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ddpbench.analysis import stats
from ddpbench.analysis.steps import EXPOSED
from ddpbench.records import watched
from ddpbench.records.schema import Figure, Part, Phase, StepSummary
from ddpbench.records.watched import (
    COLUMNS,
    Moment,
    Watched,
    WatchedCollective,
    WatchedLink,
    WatchedRank,
)
from ddpbench.watch.judging.history import OWN, Floats, History, Integers, find_most_frequent
from ddpbench.watch.judging.slow_links import find_rate

LATEST = 64  # steps of `Summary.latest`, at most
STANDS_OUT = 2.0  # times the share that each rank would have, to be named as last


@dataclass(frozen=True)
class Summary:
    """A job in figures. `steps` and `latest` are None in a job without steps."""

    steps: StepSummary | None
    watched: Watched
    latest: Moment | None  # the newest steps, for who follows the job


def summarize(history: History) -> Summary | None:
    """Summarize a job; None before its first step or call."""
    if not history.job and not history.calls:
        return None
    record = Watched(
        hosts={host: len(ranks) for host, ranks in history.hosts.items()},
        collectives=tuple(_list_collectives(history)),
        links=tuple(_list_links(history)),
    )
    if not history.job:  # as of a job without an optimizer
        return Summary(steps=None, watched=record, latest=None)
    steps, even = _summarize_steps(history), history.job.evenly()
    # Divide the steps evenly, so that the timeline is of the whole run.
    width = math.ceil(len(even) / watched.MOST_MOMENTS)
    moments = _take_medians(history, even[len(even) % width :].reshape(-1, width))
    record = replace(
        record,
        steps=history.steps,
        last_step=history.last_step,
        step_seconds=steps.step.value,
        median_seconds=tuple(np.median(history.job.values["median"][even], axis=0).tolist()),
        exposed_seconds=steps.budget[0].figure.value,
        moments=tuple(moments),
        ranks=tuple(_list_ranks(history)),
        balance=history.balance,
        pauses=history.pauses,
    )
    latest = next(_take_medians(history, np.arange(len(history.job))[None, -LATEST:]))
    return Summary(steps, record, latest)


def _summarize_steps(history: History) -> StepSummary:
    job = history.job.values[history.job.evenly()]
    step, exposed = _make_figure(job["seconds"]), float(np.median(job["exposed"]))
    phases = []
    for column, name in enumerate(COLUMNS):
        rank, share = find_most_frequent(job["slowest_rank"][:, column])
        slowest = _make_figure(job["slowest"][:, column])
        fastest = float(np.median(job["fastest"][:, column]))
        phases.append(Phase(name, slowest, fastest, rank, share))
    return StepSummary(
        rounds=history.steps,
        in_a_row=1,
        warm_up=max(0, history.last_step + 1 - history.steps),
        step=step,
        samples_per_second=0.0,
        phases=tuple(phases),
        budget=(Part(EXPOSED, Figure(exposed, None), exposed / step.value, resolved=True),),
    )


def _make_figure(seconds: Floats) -> Figure:
    return Figure(float(np.median(seconds)), stats.median_interval(np.asarray(seconds, np.float64)))


def _take_medians(history: History, steps: Integers) -> Iterator[Moment]:
    """Yield the medians of some steps. steps: [moments, steps], their indices in the samples."""
    for chosen in steps:
        values = history.job.values[chosen]
        yield Moment(
            ended=float(values["ended_ns"][-1]) * 1e-9,
            step=int(history.job.number[chosen[-1]]),
            step_seconds=float(np.median(values["seconds"])),
            seconds=tuple(np.median(values["median"], axis=0).tolist()),
            exposed_seconds=float(np.median(values["exposed"])),
        )


def _list_ranks(history: History) -> Iterator[WatchedRank]:
    """Yield the ranks with the most own time, in order of their numbers."""
    host_of = history.host_of
    known = [rank for rank in history.ranks if rank in host_of]
    known.sort(key=lambda rank: -history.ranks[rank].values["excess"][:, OWN].mean())
    for rank in sorted(known[: watched.MOST_RANKS]):
        kept = history.ranks[rank]
        even = kept.values[kept.evenly()]
        yield WatchedRank(
            rank=rank,
            host=host_of[rank],
            seconds=tuple(np.median(even["row"], axis=0).tolist()),
            steps=kept.steps,
            mean_seconds=tuple(even["row"].mean(axis=0, dtype=np.float64).tolist()),
        )


def _list_collectives(history: History) -> list[WatchedCollective]:
    """Return the collectives, those with the longest waits first."""
    rows = []
    for (group, operation, nbytes), calls in history.calls.items():
        last_rank, share = find_most_frequent([call.last_rank for call in calls])
        count, ranks = history.call_counts[group, operation, nbytes], calls[-1].ranks
        stands_out = share >= min(STANDS_OUT / ranks, (1 + 1 / ranks) / 2)
        waits = [(call.last_ns - call.first_ns) * 1e-9 for call in calls]
        row = WatchedCollective(
            group=group,
            ranks=ranks,
            operation=operation,
            nbytes=nbytes,
            calls=count / (history.call_steps or 1),
            wait_seconds=float(np.median(waits)),
            last_rank=last_rank if stands_out and ranks > 1 else None,
            last_share=share,
        )
        rows.append(row)
    rows.sort(key=lambda row: -row.wait_seconds * row.calls)
    return rows[: watched.MOST_COLLECTIVES]


def _list_links(history: History) -> Iterator[WatchedLink]:
    for link in history.links[: watched.MOST_LINKS]:
        yield WatchedLink(
            host=link.host,
            peer=link.peer,
            interface=link.interface,
            nbytes=link.nbytes,
            bytes_per_second=find_rate(link) if link.busy_seconds else None,
            rtt_seconds=link.rtt_seconds or None,
            retransmitted=link.retransmitted,
        )
