"""What costs all ranks a share of every step, and since when the job is slower. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TypeVar

import numpy as np

from ddpbench.analysis.flags import BUSY_SHARE
from ddpbench.records.schema import Finding
from ddpbench.records.watched import PHASES
from ddpbench.records.wording import list_all
from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.series import find_parts
from ddpbench.watch.judging.stragglers import RECENT

T = TypeVar("T")
NOTABLE, LARGE = 0.1, 0.3  # of the step, in input or communication
NOTABLE_PAUSES, LARGE_PAUSES = 0.01, 0.03  # of the time, in garbage collections
LASTING_SECONDS = 60.0  # after the first round: shorter jobs, and starts, have pauses of their own
NOTABLE_COMPILING = 0.03  # of the time, in torch.compile
ROUNDS = 3  # recent ones that a verdict on pauses needs, after the first, which has the start

LEAST_CHANGE, LARGE_CHANGE = 0.1, 0.25  # of the step
FEWEST, SHORTEST_SECONDS = 64, 60.0  # of the new level: a shorter one may be the host's
BESIDE = 32  # steps between a change of the job and that of a rank that explains it


def judge_shares(history: History) -> Iterator[Finding]:
    """Report what all ranks lose; no rank may be missing."""
    for judge in (_judge_input, _judge_communication, _judge_pauses, _judge_compilation):
        yield from judge(history)


def _judge_input(history: History) -> Iterator[Finding]:
    job = history.job.values[-RECENT:]
    fastest = float(np.median(job["fastest"][:, PHASES.index("input")]))
    step = float(np.median(job["seconds"]))
    if fastest >= NOTABLE * step:
        yield Finding(
            "warning" if fastest >= LARGE * step else "note",
            "waits-for-input",
            f"all ranks wait for their data loaders, even the fastest {fastest * 1e3:.3g} ms of "
            f"each {step * 1e3:.4g} ms step ({fastest / step:.0%})",
            "raise num_workers or prefetch_factor of the DataLoader, or use cheaper transforms",
            {"phase": "input", "seconds": fastest, "share": fastest / step},
        )


def _judge_communication(history: History) -> Iterator[Finding]:
    job = history.job.values[-RECENT:]
    exposed, step = float(np.median(job["exposed"])), history.mean_seconds
    # A wait for a message is no transfer: what comes before it may take that long.
    known = history.world_size > 1 and not history.find_ranks("messages")
    if known and exposed >= NOTABLE * step:
        yield Finding(
            "note",
            "exposed-communication",
            f"{exposed * 1e3:.3g} ms of each step, {exposed / step:.0%} of the job's time, is "
            "exposed communication: without any, the job would be at most "
            f"{step / max(step - exposed, 1e-9):.3g} times as fast",
            "communicate less often (no_sync with more micro-batches, a larger batch) or send "
            "fewer bytes (a compressing communication hook); to see what a hook gains: "
            'ddpbench ab --a "--comm-hook none" --b "--comm-hook fp16" ddp',
            {"seconds": exposed, "share": exposed / step},
        )


def _judge_pauses(history: History) -> Iterator[Finding]:
    share = _share(history, "gc_seconds")
    reads = [facts for ranks in _after_start(history, history.facts) for facts in ranks.values()]
    longest = max((facts.get("gc_longest_seconds", 0.0) for facts in reads), default=0.0)
    if share >= NOTABLE_PAUSES:
        yield Finding(
            "warning" if share >= LARGE_PAUSES and _lasts(history) else "note",
            "gc-pauses",
            f"Python's garbage collector stops the ranks for {share:.1%} of the time, at the "
            f"longest for {longest * 1e3:.3g} ms",
            "after the set-up, call gc.freeze() and gc.disable(); then call gc.collect() on all "
            "ranks every few hundred steps",
            {"share": share, "seconds": longest},
        )


def _judge_compilation(history: History) -> Iterator[Finding]:
    compiles = [
        sum(facts.get("compiles", 0.0) for facts in hosts.values()) for hosts in _rounds(history)
    ]
    share = _share(history, "compile_seconds")
    if sum(map(bool, compiles)) >= ROUNDS and share >= NOTABLE_COMPILING:
        yield Finding(
            "warning",
            "recompilations",
            f"torch.compile still compiles, long after the start: {share:.0%} of the time",
            "to see why, start the job again after: export TORCH_LOGS=recompiles; mark dimensions "
            "that change with torch._dynamo.mark_dynamic",
            {"share": share},
        )


def judge_hosts(history: History) -> Iterator[Finding]:
    """Report hosts whose cores other programs use, all in one note."""
    shares: dict[str, list[float]] = {}
    for hosts in history.host_facts:
        for host, facts in hosts.items():
            known = facts.get("seconds") and "host_busy_seconds" in facts
            if known and host in history.hosts:
                own = facts.get("cpu_seconds", 0.0) + facts.get("worker_seconds", 0.0)
                others = facts["host_busy_seconds"] - own * len(history.hosts[host])
                share = others / (facts["seconds"] * facts["cores"])
                shares.setdefault(host, []).append(share)
    medians = {host: float(np.median(np.array(values))) for host, values in shares.items()}
    busy = {host: share for host, share in medians.items() if share > BUSY_SHARE}
    if busy:
        least, most = min(busy.values()), max(busy.values())
        text = f"{most:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least:.0%} to {most:.0%}"
        where = {"host": next(iter(busy))} if len(busy) == 1 else {"hosts": list(busy)}
        yield Finding(
            "note",
            "busy-host",
            f"{list_all(busy)}: other programs use {text} of the cores",
            "run top there to see them; stop them, or run the job elsewhere",
            where | {"share": most},
        )


def _after_start(history: History, rounds: Iterable[T]) -> list[T]:
    """Return what is known of recent rounds, without that of the job's start."""
    known = list(rounds)
    return known[1:] if history.rounds == len(known) else known


def _rounds(history: History) -> list[Mapping[str, Mapping[str, float]]]:
    return _after_start(history, history.host_facts)


def _lasts(history: History) -> bool:
    """Whether the job has run for long after its first round."""
    seconds = [facts.get("seconds", 0.0) for hosts in _rounds(history) for facts in hosts.values()]
    usual = float(np.median(np.array(seconds or [0.0])))
    return (history.rounds - 1) * usual >= LASTING_SECONDS


def _share(history: History, name: str) -> float:
    """Return the share of the time that a fact in seconds takes: of hosts the mean, of rounds the
    median, 0 in too few of them."""
    shares = []
    for hosts in _rounds(history):
        known = [facts for facts in hosts.values() if name in facts and facts.get("seconds")]
        if known:
            shares.append(float(np.mean([facts[name] / facts["seconds"] for facts in known])))
    return float(np.median(shares)) if len(shares) >= ROUNDS else 0.0


def judge_speed(history: History, explained: Sequence[int]) -> Iterator[Finding]:
    """Report the latest lasting change of the step time; `explained`: steps of ranks' changes."""
    job, number = history.job.values, history.job.number
    series = job["seconds"]
    parts = find_parts(series, LEAST_CHANGE * float(np.median(series)))
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
        "warning" if change >= LARGE_CHANGE else "note",
        "slower-since" if change > 0 else "faster-since",
        f"since step {number[first]} ({clock_time(history, int(number[first]))}) steps take "
        f"{abs(change):.0%} {'longer' if change > 0 else 'less'}: {new * 1e3:.4g} ms instead "
        f"of {old * 1e3:.4g} ms",
        "find what changed at that time: shapes of batches, other jobs on the hosts, clocks; to "
        "see the timeline: ddpbench show last"
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
