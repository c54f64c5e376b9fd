"""Late ranks as findings: where, how much, since when, why, and what to do. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpbench.records.schema import Finding
from ddpbench.watch.judging import speed
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
    "other": "look for what only rank {rank} does between its steps: making batches without a "
    "DataLoader, logging, checkpoints, evaluation",
}
EXPLAINS = 0.4  # of the lateness, that a cause must explain
PAGES = 10.0  # read from a disk in a second, that name a lack of memory
GPU = "gpu_slowed_by_"
MORE_OFTEN = 0.5  # of the reads: by which a late rank's GPU is slowed more often than others


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


@dataclass(frozen=True)
class Cause:
    """Why a rank is late, and what to do about it."""

    name: str
    sentence: str
    next_step: str


# Of a rank's seconds, more than its host's ranks usually have: name of the fact → cause.
SECONDS = {
    "throttled_seconds": Cause(
        "throttled",
        "the CPU quota of its control group stops it",
        "raise the CPU quota of rank {rank}'s container, or use fewer threads",
    ),
    "queued_seconds": Cause(
        "host busy",
        "its main thread waits for a core",
        "find what shares the cores of rank {rank} (top, taskset -cp PID), or use fewer threads",
    ),
    "gc_seconds": Cause(
        "gc",
        "Python's garbage collector stops it",
        "after the set-up, call gc.freeze() and gc.disable(); then call gc.collect() on all ranks "
        "in the same step",
    ),
    "compile_seconds": Cause(
        "compile",
        "torch.compile spends the time compiling",
        "to see why rank {rank} recompiles, start the job again after: export "
        "TORCH_LOGS=recompiles",
    ),
}
SWAP = Cause(
    "swap",
    "it reads pages of its memory from a disk",
    "see on rank {rank}'s host whether its memory is full: free -h; then use less of it",
)


def find_cause(history: History, late: Late) -> Cause | None:
    """Return what explains most of a rank's lateness; None if no fact does."""
    host = next((host for host, ranks in history.hosts.items() if late.rank in ranks), "")
    shares: dict[str, list[float]] = {}
    for ranks, hosts in zip(history.facts, history.host_facts, strict=True):
        facts, usual = ranks.get(late.rank, {}), hosts.get(host, {})
        if not facts.get("seconds"):
            continue
        for name in (*SECONDS, "major_faults"):
            if name in facts:
                rate = facts[name] / facts["seconds"]
                common = usual.get(name, 0.0) / (usual.get("seconds") or 1.0)
                shares.setdefault(name, []).append(rate - common)
    explained = {
        name: float(np.mean(values)) * late.step_seconds / late.cost
        for name, values in shares.items()
        if name in SECONDS
    }
    most = max(explained, key=explained.__getitem__, default="")
    if most and explained[most] >= EXPLAINS:
        return SECONDS[most]
    if reasons := ", ".join(_why_slowed(history, late.rank)):
        return Cause(
            "gpu clock",
            f"its GPU lowers its clock ({reasons})",
            "run on rank {rank}'s host: nvidia-smi -q -d PERFORMANCE",
        )
    if np.mean(shares.get("major_faults", [0.0])) >= PAGES:
        return SWAP
    return None


def _why_slowed(history: History, rank: int) -> list[str]:
    """Return the reasons that the rank's GPU gives for a lower clock, and other ranks' do not."""
    own = [ranks[rank] for ranks in history.facts if rank in ranks]
    others = [facts for ranks in history.facts for r, facts in ranks.items() if r != rank]
    names = {name for facts in own for name in facts if name.startswith(GPU)}

    def share(reads: Sequence[Mapping[str, float]], name: str) -> float:
        return sum(name in facts for facts in reads) / max(1, len(reads))

    more = [name for name in names if share(own, name) - share(others, name) >= MORE_OFTEN]
    return sorted(name.removeprefix(GPU) for name in more)
