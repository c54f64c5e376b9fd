"""Late ranks as findings: where, how much, since when, why, and what to do. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpbench.records.schema import Finding
from ddpbench.records.watched import COLUMNS, WatchedPause
from ddpbench.watch.judging import shares
from ddpbench.watch.judging.history import History
from ddpbench.watch.judging.stragglers import Late
from ddpbench.watch.window import ALL, BLOCKED

MOST = 8  # findings on ranks
LASTING = 0.2  # of the steps: a rank that was late for less is worth a note
NEXT_STEPS = {
    "input": "give rank {rank}'s DataLoader more workers, or check the disk that holds its files",
    "forward": "compare the shapes of rank {rank}'s batches with those of other ranks; to "
    "compare the ranks' devices: ddpbench doctor --only stragglers",
    "backward": "compare the shapes of rank {rank}'s batches with those of other ranks; to "
    "compare the ranks' devices: ddpbench doctor --only stragglers",
    "optimizer": "check whether rank {rank} holds more parameters or optimizer state than the "
    "others; to compare the ranks' devices: ddpbench doctor --only stragglers",
    "other": "look for what only rank {rank} does between its steps: making batches without a "
    "DataLoader, logging, checkpoints, evaluation",
}
LINE_SHARE = 0.25  # of the lateness, that a line must explain
MOST_PAUSES = 4  # findings
NOTABLE_PAUSE, CLEAR_PAUSE, LARGE_PAUSE = 0.01, 0.03, 0.05  # of the job's time
FEWEST_PAUSES = 3
LONG_SECONDS, LONG_STEPS = 1.0, 10.0  # a pause that counts even if it is the only one
UNUSUAL = 0.1  # of a step: a line at which ranks are for less
LATE_PERIODS = 2  # from the begin of the job to the first pause, which then began later
PAUSE_STEPS = {
    "input": "at the start of an epoch, keep the workers: DataLoader(persistent_workers=True), "
    "with num_workers above 0; otherwise raise prefetch_factor, or check the storage",
    "blocked": "look for what else uses the network at these times; to measure each link: python "
    "-m ddpbench doctor --only links",
}
EXPLAINS = 0.4  # of the lateness, that a cause must explain
PAGES = 10.0  # read from a disk in a second, that name a lack of memory
GPU = "gpu_slowed_by_"
MORE_OFTEN = 0.5  # of the reads: by which a late rank's GPU is slowed more often than others


def describe_late(history: History, late: Sequence[Late]) -> Iterator[Finding]:
    """Yield a finding for each host whose ranks are all late, and for each other late rank."""
    host_of = history.host_of
    hosts = _slow_hosts(history, late)
    for host, ranks in hosts.items():
        yield _describe_host(host, ranks, history.mean_seconds)
    rest = [one for one in late if host_of.get(one.rank) not in hosts]
    for one in rest[:MOST]:
        yield _describe_rank(history, one, host_of.get(one.rank, ""))
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


def _describe_host(host: str, ranks: Sequence[Late], mean_seconds: float) -> Finding:
    seconds = float(np.median([one.seconds for one in ranks]))
    phase = next(iter(ranks[0].phases))
    return Finding(
        "warning",
        "slow-host",
        f"{host} is slow: {phase} takes its ranks {seconds * 1e3:.3g} ms longer than those of "
        f"other hosts: {describe_cost(seconds, mean_seconds)}",
        f"compare cores, memory and clocks: run on {host}, and on another host: python -m ddpbench "
        "doctor --only stragglers",
        {
            "host": host,
            "ranks": [one.rank for one in ranks],
            "phase": phase,
            "seconds": seconds,
            "share": seconds / mean_seconds,
        },
    )


def describe_cost(seconds: float, mean_seconds: float) -> str:
    """Return what a delay costs, per step and of all steps. mean_seconds: of a step."""
    share = seconds / mean_seconds
    return f"{seconds * 1e3:.3g} ms per step on average, {share:.1%} of the job's time"


def _describe_rank(history: History, late: Late, host: str) -> Finding:
    mean_seconds = history.mean_seconds
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
    line, cost = find_line(history, late), _find_cost(history, late)
    sentence = (
        f"rank {late.rank} on {host} {verb} late{_which_steps(late)}{_when(history, late)}: "
        f"its {phases} {takes} {size} longer than the other ranks'{_growth(late)}"
        f"{f', at {line}' if line else ''}: {describe_cost(cost, mean_seconds)}"
    )
    phase = next(iter(late.phases))
    next_step = cause.next_step if cause else NEXT_STEPS[phase]
    return Finding(
        _severity(history, late),
        "straggler" if late.every == 1 else "intermittent-straggler",
        f"{sentence}; {cause.sentence}" if cause else sentence,
        next_step.format(rank=late.rank),
        _place(history, late, host, cost / mean_seconds)
        | ({"cause": cause.name} if cause else {})
        | ({"line": line} if line else {}),
    )


def _severity(history: History, late: Late) -> str:
    if late.until is None:
        return "warning"
    lasted = late.until - (late.since or int(history.job.number[0]))
    return "warning" if lasted >= LASTING * (history.last_step + 1) else "note"


def _which_steps(late: Late) -> str:
    if late.every == 1:
        return ""
    return f" in one of {late.every} steps ({late.first}, {late.first + late.every}, …)"


def _find_cost(history: History, late: Late) -> float:
    """Return what a late rank costs per step, the average over all steps of the job."""
    last = history.last_step if late.until is None else late.until
    level = late.cost if late.grew_from is None else (late.seconds + late.grew_from) / 2
    return level * (last + 1 - (late.since or 0)) / (history.last_step + 1)


def _growth(late: Late) -> str:
    if late.grew_from is None:
        return ""
    verb = "grown" if late.grew_from < late.seconds else "shrunk"
    return f", {verb} from {late.grew_from * 1e3:.3g} ms"


def _when(history: History, late: Late) -> str:
    parts = [
        f" {word} step {step} ({shares.clock_time(history, step)})"
        for word, step in (("since", late.since), ("until", late.until))
        if step is not None
    ]
    return "".join(parts).replace("since", "from") if late.until is not None else "".join(parts)


def _place(history: History, late: Late, host: str, share: float) -> dict[str, Any]:
    interval, since, until = late.interval, late.since, late.until
    place = {
        "rank": late.rank,
        "host": host,
        "phase": next(iter(late.phases)),
        "seconds": late.seconds,
        "share": share,
        "every": late.every,
        "low_seconds": None if interval is None else interval.low,
        "high_seconds": None if interval is None else interval.high,
        "first_step": late.first if late.every > 1 else None,
        "first_seconds": late.grew_from,
        "since_step": since,
        "since": None if since is None else shares.ended(history, since),
        "until_step": until,
        "until": None if until is None else shares.ended(history, until),
    }
    return _without_unknown(place)


def _without_unknown(place: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in place.items() if value is not None}


def find_line(history: History, late: Late) -> str:
    """Return the line of the program where a late rank spends more time than others; "" unknown.

    Lines are those of now, so that of a rank that is no longer late is unknown.
    """
    own, usual = history.lines.get(late.rank, {}), history.lines.get(ALL, {})
    if late.until is not None:
        return ""
    longer = {line: seconds - usual.get(line, 0.0) for line, seconds in own.items()}
    line = max(longer, key=longer.__getitem__, default="")
    # The means over all ranks contain the late one.
    least = LINE_SHARE * late.cost * (1 - 1 / history.world_size)
    return line if line and longer[line] >= least else ""


def describe_pauses(history: History, missing: Sequence[int]) -> Iterator[Finding]:
    """Yield a finding for each kind of pause that costs much; of all ranks if none is missing."""
    worst = [one for one in history.pauses if not (missing and one.rank is None)]
    for pause in worst[:MOST_PAUSES]:
        share = pause.mean_seconds / history.mean_seconds
        is_clear = _is_clear(history, pause)
        if share >= (NOTABLE_PAUSE if is_clear else LARGE_PAUSE):
            severity = "warning" if is_clear and share >= CLEAR_PAUSE else "note"
            yield _describe_pause(history, pause, severity, share)


def _is_clear(history: History, pause: WatchedPause) -> bool:
    """Whether a pause is the script's: it comes regularly, or at a line where steps usually are not
    found, or it is very long. Others are more likely the host's."""
    at_line = history.lines.get(ALL, {}).get(pause.line, 0.0)
    unusual = bool(pause.line) and at_line < UNUSUAL * history.mean_seconds
    if pause.phase == COLUMNS[BLOCKED]:  # a busy host delays transfers, too
        return False
    if pause.every:
        return unusual or pause.count > FEWEST_PAUSES
    very_long = max(LONG_SECONDS, LONG_STEPS * history.mean_seconds)
    return (unusual and pause.count >= FEWEST_PAUSES) or pause.longest_seconds >= very_long


def _describe_pause(history: History, pause: WatchedPause, severity: str, share: float) -> Finding:
    first, every, when = pause.first_step, pause.every, shares.format_time(pause.first_ended)
    who = "all ranks pause"
    if pause.rank is not None:
        who = f"rank {pause.rank} on {history.host_of.get(pause.rank, '')} pauses"
    where = f" at {pause.line}" if pause.line else f" in {pause.phase}"
    if pause.phase == COLUMNS[BLOCKED]:
        who = "all ranks are blocked for longer than usual"
        where = where if pause.line else ""
    size = f"{pause.seconds:.3g} s" if pause.seconds >= 1 else f"{pause.seconds * 1e3:.3g} ms"
    often = f"{pause.count} times (steps {first} to {pause.last_step})"
    if pause.count == 1:
        often = f"once, in step {first} ({when})"
    elif every:
        often = f"every {every} steps, {often}"
        often += f", since {when}" if first > LATE_PERIODS * every else ""
    else:
        often = f"without a fixed period, {often}"
    waits = f", while others wait at {pause.waits_at}" if pause.waits_at else ""
    place = {
        "rank": pause.rank,
        "phase": pause.phase,
        "line": pause.line,
        "seconds": pause.seconds,
        "every": every,
        "count": pause.count,
        "first_step": first,
        "share": share,
    }
    return Finding(
        severity,
        "pauses",
        f"{who}{where}: {size} {often}{waits}; "
        f"{describe_cost(pause.mean_seconds, history.mean_seconds)}",
        _find_next_step(pause, severity),
        _without_unknown(place),
    )


def _find_next_step(pause: WatchedPause, severity: str) -> str:
    if pause.phase in PAUSE_STEPS:
        return PAUSE_STEPS[pause.phase]
    if pause.count == 1:
        return (
            "find what happened then: recompilation, storage, other programs on the host; ignore "
            "it if it does not come back"
        )
    if severity == "note" and not pause.every:
        return "usual steps are at this line, too, so suspect the host: run top there at such times"
    if pause.line.endswith("save"):
        return (
            "save less often, or in the background: call torch.distributed.checkpoint.async_save "
            "on all ranks (it needs a CPU backend, such as cpu:gloo,cuda:nccl)"
        )
    return "do this less often, or in a background thread"


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
    host = history.host_of.get(late.rank, "")
    more: dict[str, list[float]] = {}
    for ranks, hosts in zip(history.facts, history.host_facts, strict=True):
        facts, usual = ranks.get(late.rank, {}), hosts.get(host, {})
        if not facts.get("seconds"):
            continue
        for name in (*SECONDS, "major_faults"):
            if name in facts:
                rate = facts[name] / facts["seconds"]
                common = usual.get(name, 0.0) / (usual.get("seconds") or 1.0)
                more.setdefault(name, []).append(rate - common)
    explained = {
        name: float(np.mean(values)) * late.step_seconds / late.cost
        for name, values in more.items()
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
    if np.mean(more.get("major_faults", [0.0])) >= PAGES:
        return SWAP
    return None


def _why_slowed(history: History, rank: int) -> list[str]:
    """Return the reasons that the rank's GPU gives for a lower clock, and other ranks' do not."""
    own = [ranks[rank] for ranks in history.facts if rank in ranks]
    others = [facts for ranks in history.facts for r, facts in ranks.items() if r != rank]
    names = {name for facts in own for name in facts if name.startswith(GPU)}

    def share(reads: Sequence[Mapping[str, float]], name: str) -> float:
        return sum(name in facts for facts in reads) / max(1, len(reads))

    slowed = [name for name in names if share(own, name) - share(others, name) >= MORE_OFTEN]
    return sorted(name.removeprefix(GPU) for name in slowed)
