"""The verdicts of a watch on its job. No torch.

To add a finding, write a function that takes a Context and yields findings, and list it in one of
the tables at the end of this module. A finding states what, where, how much, and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddpbench.analysis import stats
from ddpbench.analysis.flags import BUSY_SHARE
from ddpbench.records.schema import SEVERITIES, Finding
from ddpbench.records.watched import COLUMNS, PHASES, WatchedPause
from ddpbench.records.wording import counted, list_all, name_ranks
from ddpbench.watch.judging import stragglers
from ddpbench.watch.judging.history import History, find_most_frequent, format_time
from ddpbench.watch.judging.series import find_parts
from ddpbench.watch.judging.slow_links import find_slow_links
from ddpbench.watch.judging.stragglers import COMPARE, RECENT, Late
from ddpbench.watch.window import ALL, BLOCKED

FEWEST_CALLS = 24  # calls that a verdict needs
MOST_OFTEN = 0.6  # of the calls, at which the same rank is last
LEAST_SHARE = 0.05  # of the time between two calls

NOTABLE, LARGE = 0.1, 0.3  # of the step, in input or communication
ROUNDS = 3  # that a verdict on a host needs

LEAST_CHANGE, LARGE_CHANGE = 0.1, 0.25  # of the step
FEWEST_CHANGED, SHORTEST_SECONDS = 64, 60.0  # of the new level: a shorter one may be the host's
BESIDE = 32  # steps between a change of the job and that of a rank that explains it

MOST_PAUSES = 4  # findings
NOTABLE_PAUSE, CLEAR_PAUSE, LARGE_PAUSE = 0.01, 0.03, 0.05  # of the job's time
FEWEST_PAUSES = 3
LONG_SECONDS, LONG_STEPS = 1.0, 10.0  # a pause that counts even if it is the only one
UNUSUAL = 0.1  # of a step: a line at which ranks are for less
PAUSE_STEPS = {  # by phase
    "input": "keep the workers, DataLoader(persistent_workers=True), or raise prefetch_factor",
    "blocked": "to measure each link: ddpbench doctor --only links",
    "other": "do this less often, or in the background, as torch.distributed.checkpoint.async_save "
    "does; if the line is a usual one, run top on the host",
}


@dataclass(frozen=True)
class Context:
    """The input of a judge. missing: ranks without comparable reports; late: that are, or were."""

    history: History
    world_size: int
    missing: Sequence[int]
    late: Sequence[Late]


def judge(history: History, world_size: int) -> tuple[Finding, ...]:
    """Return what is wrong with the job, the worst first; empty while too little is known.

    Nothing is an error: a watch does not change the exit code of its job. If reports of ranks are
    missing, nothing is said of all ranks: those that are missing may be the reason.
    """
    judges, missing, late = JUDGES, history.find_missing(world_size), list[Late]()
    if len(history.job) >= stragglers.FEWEST:
        judges += JUDGES_OF_STEPS if missing else JUDGES_OF_STEPS + JUDGES_OF_ALL_RANKS
        late = stragglers.find_late(history)
    elif not history.call_steps:
        judges += JUDGES_OF_CALLS
    context = Context(history, world_size, missing, late)
    findings = [finding for function in judges for finding in function(context)]
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _judge_links(context: Context) -> Iterator[Finding]:
    history = context.history
    yield from find_slow_links(history.links, history.hosts, history.link_seconds)


def _judge_missing(context: Context) -> Iterator[Finding]:
    missing, world_size = context.missing, context.world_size
    if missing and (context.history.job or context.history.calls):
        yield Finding(
            "note",
            "missing-ranks",
            f"only {world_size - len(missing)} of {world_size} ranks send comparable reports, so "
            f"no finding is about all ranks; missing: {name_ranks(missing)}",
            "start all ranks under the watch; look in the job's output for why a watch has failed",
            {"ranks": [*missing]},
        )


def _judge_arrivals(context: Context) -> Iterator[Finding]:
    """Report calls at which the same rank is nearly always the last to arrive."""
    for (group, operation, nbytes), calls in context.history.calls.items():
        if calls[-1].ranks < 2 or len(calls) < FEWEST_CALLS:
            continue
        rank, often = find_most_frequent([call.last_rank for call in calls])
        # Where another rank was last, the others did not wait for this one.
        alone_ns = [(c.last_ns - c.second_ns) * (c.last_rank == rank) for c in calls]
        waited = np.array(alone_ns) * 1e-9
        interval, seconds = stats.median_interval(waited), float(np.median(waited))
        between = float(np.median(np.diff(sorted(c.last_ns for c in calls)))) * 1e-9
        if not interval or often < MOST_OFTEN or interval.low < LEAST_SHARE * between:
            continue
        yield Finding(
            "warning",
            "late-arrival",
            f"rank {rank} on {context.history.host_of.get(rank, 'an unknown host')} is the last to "
            f"arrive at {operation} of {nbytes / 1e3:.4g} kB on group {group} in {often:.0%} of "
            f"the calls: {seconds * 1e3:.3g} ms after the other ranks",
            f"find what rank {rank} does longer than the others before this call; {COMPARE}",
            {"rank": rank, "group": group, "operation": operation, "seconds": seconds},
        )


def _judge_pauses(context: Context) -> Iterator[Finding]:
    """Report kinds of pauses that cost much; of all ranks if none is missing."""
    history = context.history
    if not history.job and history.balance is None:
        return
    kinds = [one for one in history.pauses if not (context.missing and one.rank is None)]
    for pause in kinds[:MOST_PAUSES]:
        share = pause.mean_seconds / history.mean_seconds
        is_clear = _is_clear(history, pause)
        if share < (NOTABLE_PAUSE if is_clear else LARGE_PAUSE):
            continue
        who, place = "all ranks pause", dict[str, object]()
        if pause.rank is not None:
            who = f"rank {pause.rank} on {history.host_of.get(pause.rank, '')} pauses"
            place = {"rank": pause.rank}
        where = f" at {pause.line}" if pause.line else ""
        often = f" every {pause.every} steps" if pause.every else ""
        yield Finding(
            "warning" if is_clear and share >= CLEAR_PAUSE else "note",
            "pauses",
            f"{who} in {pause.phase}{where}: {pause.seconds * 1e3:.0f} ms{often}, "
            f"{counted(pause.count, 'time')}, first in step {pause.first_step}; "
            f"{history.describe_cost(pause.mean_seconds)}",
            PAUSE_STEPS.get(pause.phase, PAUSE_STEPS["other"]),
            place
            | {"phase": pause.phase, "line": pause.line, "seconds": pause.seconds}
            | {"every": pause.every, "count": pause.count, "first_step": pause.first_step}
            | {"share": share},
        )


def _is_clear(history: History, pause: WatchedPause) -> bool:
    """Return whether the script causes a pause, not the host.

    It is regular, at a line at which steps usually are not found, or very long.
    """
    at_line = history.lines.get(ALL, {}).get(pause.line, 0.0)
    unusual = bool(pause.line) and at_line < UNUSUAL * history.mean_seconds
    if pause.phase == COLUMNS[BLOCKED]:  # a busy host delays transfers, too
        return False
    if pause.every:
        return unusual or pause.count > FEWEST_PAUSES
    very_long = max(LONG_SECONDS, LONG_STEPS * history.mean_seconds)
    return (unusual and pause.count >= FEWEST_PAUSES) or pause.longest_seconds >= very_long


def _judge_stragglers(context: Context) -> Iterator[Finding]:
    """Report late ranks; a rank whose pauses are reported is not late in some steps as well."""
    pausing = {finding.place.get("rank") for finding in _judge_pauses(context)}
    late = [one for one in context.late if one.every == 1 or one.rank not in pausing]
    return stragglers.describe_late(context.history, late)


def _judge_speed(context: Context) -> Iterator[Finding]:
    """Report since when the steps take longer, unless a late rank explains it."""
    history = context.history
    number, series = history.job.number, history.job.values["seconds"]
    parts = find_parts(series, LEAST_CHANGE * float(np.median(series)))
    if len(parts) < 2:
        return
    first = parts[-1].start
    before, now = series[:first], series[first:]
    old, new, since = np.median(series[parts[-2]]), np.median(now), int(number[first])
    ends = history.job.values["ended_ns"]
    lasts = len(now) >= FEWEST_CHANGED and (ends[-1] - ends[first]) * 1e-9 >= SHORTEST_SECONDS
    # Two speeds that alternate are no change.
    alternates = np.percentile(before, 5) < new < np.percentile(before, 95)
    is_explained = any(one.since and abs(one.since - since) <= BESIDE for one in context.late)
    change = float(new / old - 1)
    if change < 0 or not lasts or alternates or is_explained:
        return
    yield Finding(
        "warning" if change >= LARGE_CHANGE else "note",
        "slower-since",
        f"since step {since} ({format_time(history.find_end(since))}) steps take {change:.0%} "
        f"longer: {new * 1e3:.4g} ms instead of {old * 1e3:.4g} ms",
        "find what changed at that time: shapes of batches, other jobs on the hosts, clocks; to "
        "see the timeline: ddpbench show last",
        {"since_step": since, "seconds": float(new), "before_seconds": float(old)},
    )


def _judge_input(context: Context) -> Iterator[Finding]:
    steps = context.history.job.values[-RECENT:]
    fastest = float(np.median(steps["fastest"][:, PHASES.index("input")]))
    step = float(np.median(steps["seconds"]))
    if fastest >= NOTABLE * step:
        yield Finding(
            "warning" if fastest >= LARGE * step else "note",
            "waits-for-input",
            f"all ranks wait for their data loaders, even the fastest {fastest * 1e3:.3g} ms of "
            f"each {step * 1e3:.4g} ms step ({fastest / step:.0%})",
            "raise num_workers or prefetch_factor of the DataLoader, or use cheaper transforms",
            {"phase": "input", "seconds": fastest, "share": fastest / step},
        )


def _judge_communication(context: Context) -> Iterator[Finding]:
    history = context.history
    exposed = float(np.median(history.job.values["exposed"][-RECENT:]))
    step = history.mean_seconds
    # A wait for a message is no transfer: what comes before it may take that long.
    facts = [one for ranks in history.facts for one in ranks.values()]
    has_messages = any(one.get("messages") for one in facts)
    if context.world_size > 1 and not has_messages and exposed >= NOTABLE * step:
        yield Finding(
            "note",
            "exposed-communication",
            f"{exposed * 1e3:.3g} ms of each step, {exposed / step:.0%} of the job's time, is "
            "exposed communication",
            "communicate less often (no_sync, a larger batch) or send fewer bytes; to see what a "
            'hook gains: ddpbench ab --a "--comm-hook none" --b "--comm-hook fp16" ddp',
            {"seconds": exposed, "share": exposed / step},
        )


CHECKS = {  # code → severity, least share, sentence, next step
    "gc-pauses": (
        "note",
        0.03,
        "Python's garbage collector stops the ranks for {share:.0%} of the time",
        "after the set-up: gc.freeze(), gc.disable(); then gc.collect() in all ranks now and then",
    ),
    "recompilations": (
        "warning",
        0.03,
        "torch.compile still compiles for {share:.0%} of the time",
        "to see why, start the job again after: export TORCH_LOGS=recompiles",
    ),
    "busy-host": (
        "note",
        BUSY_SHARE,
        "other programs use {share:.0%} of the cores",
        "run top there to see them; stop them, or run the job elsewhere",
    ),
}


def _find_shares(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each of CHECKS. ranks: the facts of a host's ranks, at least one."""

    def mean(name: str) -> float:
        return sum(facts.get(name, 0.0) for facts in ranks) / len(ranks)

    seconds, own = mean("seconds"), len(ranks) * (mean("cpu_seconds") + mean("worker_seconds"))
    return {
        "gc-pauses": mean("gc_seconds") / seconds,
        "recompilations": mean("compile_seconds") / seconds,
        "busy-host": (mean("host_busy_seconds") - own) / mean("cores") / seconds,
    }


def _judge_hosts(context: Context) -> Iterator[Finding]:
    """Report what takes time on hosts, by CHECKS. The first round has the start of the job."""
    history, shares = context.history, dict[str, list[dict[str, float]]]()
    is_first = history.rounds == len(history.facts)
    for facts in [*history.facts][int(is_first) :]:
        for host, ranks in history.hosts.items():
            if reads := [facts[rank] for rank in ranks if facts.get(rank, {}).get("seconds")]:
                shares.setdefault(host, []).append(_find_shares(reads))
    known = {host: reads for host, reads in shares.items() if len(reads) >= ROUNDS}
    for code, (severity, least, sentence, next_step) in CHECKS.items():
        medians = {h: float(np.median([one[code] for one in known[h]])) for h in known}
        named = {host: share for host, share in medians.items() if share > least}
        if named:
            most = max(named.values())
            sentence = f"{list_all(named)}: {sentence.format(share=most)}"
            yield Finding(severity, code, sentence, next_step, {"hosts": [*named], "share": most})


# All judges: those of any job, of one with steps, with steps of all ranks, and without steps.
Judges = tuple[Callable[[Context], Iterator[Finding]], ...]
JUDGES: Judges = (_judge_links, _judge_missing, _judge_pauses)
JUDGES_OF_STEPS: Judges = (_judge_stragglers, _judge_hosts)
JUDGES_OF_ALL_RANKS: Judges = (_judge_speed, _judge_input, _judge_communication)
JUDGES_OF_CALLS: Judges = (_judge_arrivals,)
