"""Since when the whole job is slower or faster. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

import numpy as np

from ddpbench.records.schema import Finding
from ddpbench.watch.judging import changes
from ddpbench.watch.judging.history import History

LEAST, LARGE = 0.1, 0.25  # of the step
FEWEST, SHORTEST_SECONDS = 64, 60.0  # of the new level: a shorter one may be the host's
BESIDE = 32  # steps between a change of the job and that of a rank that explains it


def judge_speed(history: History, explained: Sequence[int]) -> Iterator[Finding]:
    """Report the latest lasting change of the step time; `explained`: steps of ranks' changes."""
    job, number = history.job.values, history.job.number
    series = job["seconds"]
    parts = changes.find_parts(series, LEAST * float(np.median(series)))
    if len(parts) < 2:
        return
    before, now = np.concatenate([series[part] for part in parts[:-1]]), series[parts[-1]]
    old, new = float(np.median(series[parts[-2]])), float(np.median(now))
    first = parts[-1].start
    lasts = (job["ended_ns"][-1] - job["ended_ns"][first]) * 1e-9 >= SHORTEST_SECONDS
    # Two speeds that take turns are no change.
    known = np.percentile(before, 5) < new < np.percentile(before, 95)
    if len(now) < FEWEST or not lasts or known:
        return
    if any(abs(step - number[first]) <= BESIDE for step in explained):
        return
    change = new / old - 1
    yield Finding(
        "warning" if change >= LARGE else "note",
        "slower-since" if change > 0 else "faster-since",
        f"since step {number[first]} ({clock_time(history, int(number[first]))}) steps take "
        f"{abs(change):.0%} {'longer' if change > 0 else 'less'}: {new * 1e3:.4g} ms instead "
        f"of {old * 1e3:.4g} ms",
        "find what changed at that time: shapes of batches, other jobs on the hosts, clocks; to "
        "see the timeline: python -m ddpbench show last"
        if change > 0
        else "",
        {"since_step": int(number[first]), "since": ended(history, int(number[first]))}
        | {"seconds": new, "before_seconds": old},
    )


def ended(history: History, step: int) -> float:
    """Return when a step ended, in seconds since 1970."""
    times = history.job.values["ended_ns"]
    return float(np.interp(step, history.job.number, times)) * 1e-9


def clock_time(history: History, step: int) -> str:
    """Return when a step ended, as `format_time` does."""
    return format_time(ended(history, step))


def format_time(seconds: float) -> str:
    """Return a time since 1970 in UTC as in the table's timeline: "14:32:10 UTC"."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%H:%M:%S UTC")
