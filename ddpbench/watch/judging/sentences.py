"""Late ranks as findings: where, how much, since when, why, and what to do. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ddpbench.records.schema import Finding
from ddpbench.watch.judging import speed
from ddpbench.watch.judging.causes import find_cause
from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.stragglers import Late

MOST = 8  # findings on ranks
LASTING = 0.2  # of the steps: a rank that was late for less is worth a note
NEXT_STEPS = {
    "input": "give rank {rank}'s DataLoader more workers, or check the disk that holds its files",
    "forward": "compare the shapes of rank {rank}'s batches with those of other ranks; to "
    "compare the ranks' devices: python -m ddpbench doctor --only stragglers",
    "backward": "compare the shapes of rank {rank}'s batches with those of other ranks; to "
    "compare the ranks' devices: python -m ddpbench doctor --only stragglers",
    "optimizer": "check whether rank {rank} holds more parameters or optimizer state than the "
    "others; to compare the ranks' devices: python -m ddpbench doctor --only stragglers",
    "other": "look for what only rank {rank} does between its steps: logging, checkpoints, "
    "evaluation",
}


def describe_late(history: History, late: Sequence[Late], step_seconds: float) -> Iterator[Finding]:
    """Yield a finding for each host whose ranks are all late, and for each other late rank."""
    host_of = {rank: host for host, ranks in history.hosts.items() for rank in ranks}
    hosts = _slow_hosts(history, late)
    for host, ranks in hosts.items():
        yield _describe_host(host, ranks, step_seconds)
    rest = [one for one in late if host_of.get(one.rank) not in hosts]
    for one in rest[:MOST]:
        yield _describe_rank(history, one, host_of.get(one.rank, ""), step_seconds)
    if len(rest) > MOST:
        others = [one.rank for one in rest[MOST:]]
        yield Finding(
            "note",
            "straggler",
            f"{len(others)} more ranks are late, each by less: {', '.join(map(str, others[:16]))}"
            + (" …" if len(others) > 16 else ""),
            "first help the ranks that the other findings name",
            {"ranks": others},
        )


def _slow_hosts(history: History, late: Sequence[Late]) -> dict[str, list[Late]]:
    """Return the hosts of which all known ranks, at least two, are always late in one phase."""
    always = {one.rank: one for one in late if one.every == 1 and one.until is None}
    found: dict[str, list[Late]] = {}
    for host, ranks in history.hosts.items():
        known = [rank for rank in ranks if rank in history.ranks]
        members = [always[rank] for rank in known if rank in always]
        phases = {next(iter(one.phases)) for one in members}
        if len(members) > 1 and len(members) == len(known) and len(phases) == 1:
            found[host] = members
    return found if len(found) < len(history.hosts) else {}


def _describe_host(host: str, ranks: Sequence[Late], step_seconds: float) -> Finding:
    seconds = float(np.median([one.seconds for one in ranks]))
    phase = next(iter(ranks[0].phases))
    return Finding(
        "warning",
        "slow-host",
        f"{host} is slow: {phase} takes its ranks {seconds * 1e3:.3g} ms longer than those of "
        f"other hosts, {seconds / step_seconds:.1%} of each step",
        f"compare cores, memory and clocks: run on {host}, and on another host: python -m ddpbench "
        "doctor --only stragglers",
        {
            "host": host,
            "ranks": [one.rank for one in ranks],
            "phase": phase,
            "seconds": seconds,
            "share": seconds / step_seconds,
        },
    )


def _describe_rank(history: History, late: Late, host: str, step_seconds: float) -> Finding:
    phases = " and ".join(
        f"{phase} ({seconds * 1e3:.3g} ms)" if len(late.phases) > 1 else phase
        for phase, seconds in late.phases.items()
    )
    size = f"{late.seconds * 1e3:.3g} ms"
    if late.interval is not None:
        size += f" [{late.interval.low * 1e3:.3g}, {late.interval.high * 1e3:.3g}]"
    takes = "take" if len(late.phases) > 1 else "takes"
    # Facts are only kept of the latest rounds, when a rank that was late no longer is.
    cause = find_cause(history, late) if late.until is None else None
    verb = "was" if late.until is not None else "is"
    sentence = (
        f"rank {late.rank} on {host} {verb} late{_which_steps(late)}{_when(history, late)}: "
        f"its {phases} {takes} {size} longer than the other ranks', "
        f"{late.cost / step_seconds:.1%} of the time of a step"
    )
    phase = next(iter(late.phases))
    next_step = cause.next_step if cause else NEXT_STEPS[phase]
    return Finding(
        _severity(history, late),
        "straggler" if late.every == 1 else "intermittent-straggler",
        f"{sentence}; {cause.sentence}" if cause else sentence,
        next_step.format(rank=late.rank),
        _place(history, late, host, step_seconds) | ({"cause": cause.name} if cause else {}),
    )


def _severity(history: History, late: Late) -> str:
    if late.until is None:
        return "warning"
    lasted = late.until - (late.since or int(history.job.number[0]))
    return "warning" if lasted >= LASTING * (history.last_step + 1) else "note"


def _which_steps(late: Late) -> str:
    if late.every == 1:
        return ""
    if late.every == 0:
        return f" in {late.share:.0%} of its steps"
    return f" in one of {late.every} steps ({late.first}, {late.first + late.every}, …)"


def _when(history: History, late: Late) -> str:
    parts = [
        f" {word} step {step} ({speed.clock_time(history, step)})"
        for word, step in (("since", late.since), ("until", late.until))
        if step is not None
    ]
    return "".join(parts).replace("since", "from") if late.until is not None else "".join(parts)


def _place(history: History, late: Late, host: str, step_seconds: float) -> dict[str, Any]:
    place: dict[str, Any] = {
        "rank": late.rank,
        "host": host,
        "phase": next(iter(late.phases)),
        "seconds": late.seconds,
        "share": late.cost / step_seconds,
        "every": late.every,
        "steps_share": late.share,
    }
    if late.interval is not None:
        place |= {"low_seconds": late.interval.low, "high_seconds": late.interval.high}
    if late.every > 1:
        place["first_step"] = late.first
    for name, step in (("since", late.since), ("until", late.until)):
        if step is not None:
            place |= {f"{name}_step": step, name: speed.ended(history, step)}
    return place
