"""A watched job in figures, for the line, the table and the stored run. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import stats
from ddpbench.analysis.steps import EXPOSED
from ddpbench.records import watched
from ddpbench.records.load import Load
from ddpbench.records.schema import Figure, Part, Phase, StepSummary
from ddpbench.records.watched import (
    LOSS,
    Moment,
    Watched,
    WatchedCollective,
    WatchedLink,
    WatchedPhase,
    WatchedRank,
)
from ddpbench.watch.judging.history import (
    Calls,
    Floats,
    FloatsOrLess,
    History,
    who_most_often,
)
from ddpbench.watch.judging.samples import Samples
from ddpbench.watch.judging.slow_links import find_rate
from ddpbench.watch.window import BLOCKED

LATEST = 64  # steps of `Summary.latest`, at most
MEAN_DECIMALS = 7  # of seconds
STANDS_OUT = 2.0  # times the share that each rank would have, to be named as last
Array = npt.NDArray[Any]
DIGITS = 6  # of a stored mean
RESOLUTION = 6  # decimals of a lateness in seconds


@dataclass(frozen=True)
class Summary:
    """What a watch knows of a job. `steps` and `latest` are None in a job without steps."""

    steps: StepSummary | None
    watched: Watched
    latest: Moment | None  # the newest steps, for who follows the job


def summarize(history: History) -> Summary | None:
    """Summarize a job; None before its first step or call."""
    if not history.job and not history.calls:
        return None
    known = Watched(
        steps=0,
        last_step=-1,
        step_seconds=0.0,
        phases=(),
        exposed_seconds=0.0,
        hosts={host: len(ranks) for host, ranks in history.hosts.items()},
        collectives=tuple(_collectives(history)),
        links=tuple(_links(history)),
    )
    if not history.job:  # as of a job without an optimizer
        return Summary(steps=None, watched=known, latest=None)
    job = history.job.values[history.job.evenly()]
    moments = _moments(history)
    phases = [_phase(name, job, column) for column, name in enumerate(watched.COLUMNS)]
    steps = _summarize_steps(history, job, phases)
    return Summary(
        steps=steps,
        watched=replace(
            known,
            steps=history.steps,
            last_step=history.last_step,
            step_seconds=steps.step.value,
            phases=tuple(phases),
            exposed_seconds=steps.budget[0].figure.value,
            moments=tuple(moments),
            ranks=tuple(_ranks(history, moments)),
            balance=history.balance,
            pauses=history.pauses,
        ),
        latest=next(_take_medians(history, np.arange(len(history.job))[None, -LATEST:])),
    )


def _summarize_steps(history: History, job: Array, phases: Sequence[WatchedPhase]) -> StepSummary:
    step, exposed = figure(job["seconds"]), float(np.median(job["exposed"]))
    return StepSummary(
        rounds=history.steps,
        in_a_row=1,
        warm_up=max(0, history.last_step + 1 - history.steps),
        step=step,
        samples_per_second=0.0,
        phases=tuple(
            Phase(
                name=phase.name,
                slowest=figure(job["slowest"][:, column]),
                fastest_seconds=phase.fastest_seconds,
                slowest_rank=phase.slowest_rank,
                slowest_share=phase.slowest_share,
            )
            for column, phase in enumerate(phases)
        ),
        budget=(Part(EXPOSED, Figure(exposed, None), exposed / step.value, resolved=True),),
    )


def figure(seconds: Floats) -> Figure:
    """Return the median of steps and its interval."""
    return Figure(float(np.median(seconds)), stats.median_interval(seconds))


def _means(values: FloatsOrLess) -> tuple[float, ...]:
    return tuple(values.astype(float).mean(axis=0).round(MEAN_DECIMALS).tolist())


def _phase(name: str, job: Array, column: int) -> WatchedPhase:
    median, slowest, fastest = (
        float(np.median(job[part][:, column])) for part in ("median", "slowest", "fastest")
    )
    rank, share = who_most_often(job["slowest_rank"][:, column])
    return WatchedPhase(name, median, slowest, fastest, rank, share)


def _moments(history: History) -> list[Moment]:
    """Divide the steps evenly, so that the timeline is of the whole run."""
    even = history.job.evenly()
    width = math.ceil(len(even) / watched.MOST_MOMENTS)
    moments = list(_take_medians(history, even[len(even) % width :].reshape(-1, width)))
    return add_readings(history, moments)


def _take_medians(history: History, steps: npt.NDArray[np.int64]) -> Iterator[Moment]:
    """Yield the medians of some steps. steps: [moments, steps], their indices in the samples."""
    values = history.job.values[steps]
    seconds, rows, exposed = (
        np.median(values[name], axis=1).tolist() for name in ("seconds", "median", "exposed")
    )
    for i, end in enumerate(steps[:, -1].tolist()):
        ended = float(history.job.values["ended_ns"][end]) * 1e-9
        number = int(history.job.number[end])
        yield Moment(ended, number, seconds[i], tuple(rows[i]), exposed[i])


def _ranks(history: History, moments: Sequence[Moment]) -> Iterator[WatchedRank]:
    """Yield the ranks with the most own time, in order of their numbers."""
    host_of = history.host_of
    excess = {
        rank: float(kept.values["own"].mean())
        for rank, kept in history.ranks.items()
        if rank in host_of
    }
    latest_last = sorted(excess, key=excess.__getitem__)[-watched.MOST_RANKS :]
    for rank in sorted(latest_last):
        kept = history.ranks[rank]
        even = kept.values[kept.evenly()]
        is_late = rank in latest_last[-watched.MOST_LATE :]
        yield WatchedRank(
            rank=rank,
            host=host_of[rank],
            seconds=tuple(np.median(even["row"], axis=0).astype(float).tolist()),
            steps=kept.steps,
            late_seconds=find_lateness(kept, moments) if is_late else (),
            mean_seconds=_means(even["row"]),
            extra_seconds=_means(even["excess"])[:BLOCKED],
        )


def _collectives(history: History) -> list[WatchedCollective]:
    """Return the collectives, those with the longest waits first."""
    rows = [_collective(*key, calls, history.call_steps) for key, calls in history.calls.items()]
    rows.sort(key=lambda row: -row.wait_seconds * row.calls)
    return rows[: watched.MOST_COLLECTIVES]


def _collective(
    group: str, operation: str, nbytes: int, calls: Calls, steps: int
) -> WatchedCollective:
    last_rank, share = who_most_often(calls.last_ranks)
    wires = calls.wires
    stands_out = share >= min(STANDS_OUT / calls.ranks, (1 + 1 / calls.ranks) / 2)
    return WatchedCollective(
        group=group,
        ranks=calls.ranks,
        operation=operation,
        nbytes=nbytes,
        calls=calls.count / (steps or 1),
        wait_seconds=float(np.median([(c.last_ns - c.first_ns) * 1e-9 for c in calls.newest])),
        last_rank=last_rank if stands_out and calls.ranks > 1 else None,
        last_share=share,
        wire_seconds=float(np.median(wires)) if wires else None,
    )


def _links(history: History) -> Iterator[WatchedLink]:
    most = sorted(history.links.items(), key=lambda item: -item[1].nbytes)
    for (host, peer), link in most[: watched.MOST_LINKS]:
        yield WatchedLink(
            host=host,
            peer=peer,
            interface=link.interface,
            nbytes=int(link.nbytes),
            bytes_per_second=find_rate(link) if link.busy_seconds else None,
            rtt_seconds=link.rtt_seconds or None,
            retransmitted=int(link.retransmitted),
        )


def add_readings(history: History, moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments with the load, the loss and the values of their time."""
    if not moments:
        return []
    ends = np.array([moment.ended for moment in moments])
    loads = [_make_load(row) for row in _take_means(history.loads, ends).tolist()]
    steps = np.array([moment.step for moment in moments])
    values: list[dict[str, float]] = [{} for _ in moments]
    for name, kept in history.values.items():
        means = _take_means(kept, steps)[:, 0]
        for place in np.flatnonzero(np.isfinite(means)).tolist():
            values[place][name] = float(f"{means[place]:.{DIGITS}g}")
    return [
        replace(moment, load=load, loss=named.pop(LOSS, None), values=named)
        for moment, load, named in zip(moments, loads, values, strict=True)
    ]


def find_lateness(kept: Samples, moments: Sequence[Moment]) -> tuple[float | None, ...]:
    """Return a rank's own time beyond that of the others, the mean in each moment, in seconds."""
    even = kept.evenly()
    steps = np.array([moment.step for moment in moments])
    excess = kept.values["own"][even][:, None]
    late = _find_means(kept.number[even], excess, steps)[:, 0].tolist()
    return tuple(round(each, RESOLUTION) if math.isfinite(each) else None for each in late)


def _make_load(row: Sequence[float]) -> Load | None:
    cores, most_cores, memory, gpu_share, gpu_memory = row
    if not math.isfinite(cores):
        return None
    return Load(
        cpu_cores=round(cores, 3),
        most_cpu_cores=round(most_cores, 3),
        memory_nbytes=round(memory),
        gpu_share=round(gpu_share, 3) if math.isfinite(gpu_share) else None,
        gpu_memory_nbytes=round(gpu_memory) if math.isfinite(gpu_memory) else None,
    )


def _take_means(kept: Samples, ends: Array) -> Floats:
    read = kept.values[kept.evenly()]
    return _find_means(read["when"], read["read"], ends)


def _find_means(when: Array, values: Array, ends: Array) -> Floats:
    """Return the mean of the values of each moment; NaN where it has none, or an unknown one.

    when: of each value; values: [values, columns]; ends: of the moments, in the unit of `when`; the
    result: [moments, columns]. What is newer than the last moment counts there.
    """
    place = np.minimum(np.searchsorted(ends, when), len(ends) - 1)
    counts = np.bincount(place, minlength=len(ends))
    sums = [np.bincount(place, column, minlength=len(ends)) for column in values.T]
    with np.errstate(invalid="ignore"):
        return np.stack(sums, axis=1) / counts[:, None]
