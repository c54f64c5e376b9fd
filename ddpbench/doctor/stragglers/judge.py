"""Which rank is slow or late, from what each rank showed alone, with the others, and in waiting.

A rank is judged by its best round, because noise makes rounds slow and never fast. It is slow if
its best round takes RATIO of the others' best in every pass, that is in many rounds spread over
seconds. If the others wait for cores too, the host is busy, and no rank is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.rank_setup import Setup, folded
from ddpbench.doctor.stragglers.turns import ALONE, Load, Pass, Shown
from ddpbench.records.schema import Finding

RATIO = 1.4
PASSES = 3  # that must agree
LATE_SHARE = 0.75  # of the repetitions in which the others wait for the same rank
BUSY_SHARE = 0.2  # of the time, for which usual ranks may wait for a core
NOTABLE_SHARE = 0.1  # of the time of all ranks, stolen or throttled, that is worth a note
# A reason explains a slow rank if it took at least this share of the time, and if that makes the
# rank slower than the others by at least this ratio.
EVIDENT_SHARE, EVIDENT_RATIO = 0.1, 1.2
MOST_SHARE = 0.99
CLOCK_SHARE = 0.85  # of the others' clock, below which a core or GPU runs slowly


def suspects(passes: Sequence[Pass]) -> dict[int, list[tuple[str, str]]]:
    """Return the ranks that were slow in every pass, each with when and at which loads.

    A load at which a rank was slow alone is not listed again for all at once.
    """
    slow: dict[int, list[tuple[str, str]]] = {}
    for rank in range(len(passes[0])):
        for when, loads in passes[0][rank].seconds.items():
            for load in loads:
                listed = any(known == load for _, known in slow.get(rank, []))
                if not listed and all(_is_slow(one, rank, when, load) for one in passes):
                    slow.setdefault(rank, []).append((when, load))
    return slow


def late(passes: Sequence[Pass], work_seconds: float) -> int | None:
    """Return the rank for which the others waited in every pass and in most repetitions.

    They must wait longer than a slow rank would need for the equal work. None: there is no such
    rank.
    """
    ranks = {_late(one, work_seconds) for one in passes}
    return ranks.pop() if len(ranks) == 1 else None


def suspected(passes: Sequence[Pass], work_seconds: float) -> bool:
    """Tell whether a rank is still suspected, so that all must be measured again."""
    return bool(suspects(passes)) or late(passes, work_seconds) is not None


def unjudged(passes: Sequence[Pass]) -> dict[str, float]:
    """Return when no rank could be judged, and the share of the time that they wait for a core."""
    shown = passes[-1]
    return {
        when: statistics.median(one.kept[when].get("queued") or 0.0 for one in shown)
        for when in shown[0].seconds
        if all(_is_busy(shown, rank, when) for rank in range(len(shown)))
    }


def wait_seconds(shown: Pass) -> list[float | None]:
    """Return how long each rank waits for the latest one in an all_reduce, the median.

    That is its time in the all_reduce minus the least of all ranks, which needs no common clock.
    None: nothing was measured.
    """
    least = [min(waits) for waits in zip(*(one.waited_ns for one in shown), strict=True)]
    if not least:
        return [None] * len(shown)
    return [
        statistics.median(ns - first for ns, first in zip(one.waited_ns, least, strict=True)) * 1e-9
        for one in shown
    ]


def findings(
    passes: Sequence[Pass], loads: Mapping[str, Load], setup: Setup, work_seconds: float
) -> tuple[Finding, ...]:
    """Return a warning for each host and cause of slowness, or for a rank that is only late."""
    if len(passes) < PASSES:
        return tuple(_notes(passes, setup, reported=set()))
    slow, late_rank = suspects(passes), late(passes, work_seconds)
    groups: dict[tuple[str, str], list[tuple[int, Cause]]] = {}
    for rank, ((when, load), *_) in slow.items():
        suspect = Suspect(rank, when, loads[load].memory, passes[-1], setup)
        cause = find_cause(suspect)
        groups.setdefault((setup.host(rank), cause.name), []).append((rank, cause))
    found = []
    for group in groups.values():
        ranks, cause = [rank for rank, _ in group], group[0][1]
        verb, of = ("is", "") if len(ranks) == 1 else ("are", f"of rank {ranks[0]}: ")
        measured = _slow_rates(ranks, slow, passes, loads)
        sentence = f"{setup.who(ranks)} {verb} slow: {measured}; {of}{cause.sentence}"
        if late_rank in ranks and (waiting := _others_wait(passes, late_rank)):
            sentence += f"; the others wait {waiting * 1e3:.3g} ms for it in an all_reduce"
        place = {**setup.place(ranks), "cause": cause.name}
        found.append(Finding("warning", "slow-rank", sentence, cause.next_step, place))
    if late_rank is not None and late_rank not in slow:
        waited = _others_wait(passes, late_rank) * 1e3
        sentence = (
            f"{setup.who([late_rank])} is late: after {work_seconds * 1e3:.3g} ms of equal work "
            f"the others wait {waited:.3g} ms for it in an all_reduce, "
            "though alone it computes as fast as they do"
        )
        next_step = (
            "find out what shares its cores with the backend's threads of that rank, and what its "
            "Python does besides (a profiler, a tracer, a busy thread)"
        )
        place = setup.place([late_rank])
        found.append(Finding("warning", "late-rank", sentence, next_step, place))
    return (*found, *_notes(passes, setup, reported={host for host, _ in groups}))


def span(values: Sequence[float]) -> str:
    """Format a range as "118 to 121", or as one number if both read the same."""
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def rates(passes: Sequence[Pass], load: Load, when: str) -> list[float]:
    """Return the best rate of each rank, in the unit of the load."""
    return [load.rate(best(passes, rank, when, load.name)) for rank in range(len(passes[0]))]


def best(passes: Sequence[Pass], rank: int, when: str, load: str) -> float:
    """Return the seconds of a repetition in the best of all rounds."""
    return min(seconds for one in passes for seconds in one[rank].seconds[when][load])


def _is_slow(shown: Pass, rank: int, when: str, load: str) -> bool:
    rounds = [one.seconds.get(when, {}).get(load) or [] for one in shown]
    others = [min(values) for other, values in enumerate(rounds) if other != rank and values]
    if not others or not rounds[rank] or _is_busy(shown, rank, when):
        return False
    return min(rounds[rank]) >= RATIO * statistics.median(others)


def _is_busy(shown: Pass, rank: int, when: str) -> bool:
    """Tell whether the other ranks usually waited for a core."""
    others = [one.kept.get(when, {}).get("queued") or 0.0 for one in shown]
    del others[rank]
    return bool(others) and statistics.median(others) > BUSY_SHARE


def _late(shown: Pass, work_seconds: float) -> int | None:
    if len(shown) < 2 or not shown[0].waited_ns:
        return None
    import numpy as np

    from ddpbench.analysis import steps  # not for a help text

    waits = np.array([one.waited_ns for one in shown], dtype=np.float64) * 1e-9
    rank = steps.late_rank(waits, 1 - 0.05 / len(waits), (RATIO - 1) * work_seconds)
    # Waiting is not measured for load, so one busy moment of this pass leaves the rank unjudged.
    if rank is None or any(_is_busy(shown, rank, when) for when in shown[rank].kept):
        return None
    return rank if float((waits.argmin(axis=0) == rank).mean()) >= LATE_SHARE else None


def _slow_rates(
    ranks: Sequence[int],
    slow: Mapping[int, Sequence[tuple[str, str]]],
    passes: Sequence[Pass],
    loads: Mapping[str, Load],
) -> str:
    """Describe the rates of slow ranks beside those of the others, for each load."""
    parts = []
    for when, name in slow[ranks[0]]:
        load = loads[name]
        others = [rank for rank in range(len(passes[0])) if (when, name) not in slow.get(rank, ())]
        own_span, others_span = (
            span([load.rate(best(passes, rank, when, name)) for rank in group])
            for group in (ranks, others)
        )
        words = "alone" if when == ALONE else "while all ranks work,"
        parts.append(f"{name} {words} at best {own_span} {load.unit}, the others {others_span}")
    return "; ".join(parts)


def _others_wait(passes: Sequence[Pass], rank: int | None) -> float:
    waits = [
        seconds
        for one in passes
        for other, seconds in enumerate(wait_seconds(one))
        if other != rank and seconds is not None
    ]
    return statistics.median(waits)


def _notes(passes: Sequence[Pass], setup: Setup, reported: Container[str]) -> Iterator[Finding]:
    """Yield what held up all ranks of a host, which makes none of them slow.

    reported: hosts that have a finding already.
    """
    for ranks in setup.hosts:
        host = setup.host(ranks[0])
        if host in reported:
            continue
        for reason, (words, next_step) in NOTES.items():
            shares = [
                share
                for one in passes
                for rank in ranks
                if (share := one[rank].kept.get(ALONE, {}).get(reason)) is not None
            ]
            if shares and statistics.median(shares) > NOTABLE_SHARE:
                percent = f"{statistics.median(shares) * 100:.0f} %"
                yield Finding(
                    "note",
                    f"{reason}-time",
                    f"{host}: {words} {percent} of the time that they computed",
                    next_step,
                    {"host": host},
                )


NOTES = {
    "stolen": (
        "the hypervisor gave the cores of its ranks to others for",
        "expect times to scatter; a dedicated host has none of this",
    ),
    "throttled": (
        "the control group's CPU quota held its ranks back for",
        "raise the quota, or use fewer threads",
    ),
}


@dataclass(frozen=True)
class Cause:
    """Why a rank is slow."""

    name: str
    sentence: str
    next_step: str


@dataclass(frozen=True)
class Suspect:
    """A slow rank, with what all ranks showed."""

    rank: int
    when: str
    memory: str  # "host", or that of its GPU: what is slow
    shown: Pass
    setup: Setup

    @property
    def own(self) -> Shown:
        return self.shown[self.rank]

    @property
    def others(self) -> list[Shown]:
        return [shown for rank, shown in enumerate(self.shown) if rank != self.rank]

    def kept(self, reason: str) -> float | None:
        """Return the share of the time that this reason took, if that makes its cores slow."""
        share = self.own.kept.get(self.when, {}).get(reason)
        others = [shown.kept.get(self.when, {}).get(reason) or 0.0 for shown in self.others]
        if self.memory != "host" or share is None or share < EVIDENT_SHARE:
            return None
        share, usual = min(share, MOST_SHARE), min(statistics.median(others), MOST_SHARE)
        return share if (1 - usual) / (1 - share) >= EVIDENT_RATIO else None


def find_cause(suspect: Suspect) -> Cause:
    """Return the first of CAUSES that has evidence; the last one needs none."""
    return next(cause for find in CAUSES if (cause := find(suspect)) is not None)


def _kept_from_running(suspect: Suspect) -> Cause | None:
    if (share := suspect.kept("throttled")) is not None:
        return Cause(
            "throttled",
            f"its control group was throttled for {share * 100:.0f} % of the time",
            "raise its CPU quota (docker --cpus, Kubernetes limits.cpu, systemd CPUQuota), or use "
            "fewer threads",
        )
    if (share := suspect.kept("stolen")) is not None:
        return Cause(
            "stolen",
            f"the hypervisor gave its cores to others for {share * 100:.0f} % of the time",
            "ask for a dedicated host, or another one",
        )
    if (share := suspect.kept("queued")) is None:
        return None
    processes = ", ".join(suspect.own.neighbours[:3])
    cpuset = suspect.setup.ranks[suspect.rank].get("cpuset")
    return Cause(
        "neighbour",
        f"it waited for a core for {share * 100:.0f} % of the time: other processes use its cores "
        f"{cpuset}" + (f", most of all {processes}" if processes else ""),
        "end what runs there, or give the rank cores of its own",
    )


def _gpu_slowed(suspect: Suspect) -> Cause | None:
    reasons = _reasons(suspect.own)
    common = [_reasons(other) for other in suspect.others]
    usual = {
        reason for reason in reasons if 2 * sum(reason in others for others in common) > len(common)
    }
    own = sorted(reasons - usual - {"GpuIdle", "ApplicationsClocksSetting", "None"})
    if suspect.memory == "host" or not own:
        return None
    state: Any = suspect.own.gpu
    clock, celsius = state.get("sm_clock_hertz"), state.get("temperature_celsius")
    return Cause(
        "throttled",
        f"its GPU slows down ({', '.join(own)})"
        + (f" to {clock / 1e6:.0f} MHz" if clock else "")
        + (f" at {celsius} °C" if celsius is not None else ""),
        "check its cooling and power (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE)",
    )


def _reasons(shown: Shown) -> set[str]:
    reasons: Any = (shown.gpu or {}).get("throttle_reasons")
    return set(reasons or ())


def _hardware(suspect: Suspect) -> Cause | None:
    fact = "cpu_model" if suspect.memory == "host" else "gpu_name"
    values = suspect.setup.values(fact)
    own = values[suspect.rank]
    others = [value for rank, value in enumerate(values) if rank != suspect.rank]
    commonest = max(folded(others), key=lambda group: len(group[1]))[0]
    if own in (None, commonest) or commonest is None:
        return None
    return Cause(
        "hardware",
        f"it runs on another {'CPU' if suspect.memory == 'host' else 'GPU'}, {own}, the others on "
        f"{commonest}",
        "give all ranks the same hardware, or this one less work",
    )


def _clock(suspect: Suspect) -> Cause | None:
    known = [other.hertz for other in suspect.others if other.hertz]
    hot = (suspect.own.thermal or 0) > 0
    low = bool(suspect.own.hertz and known) and (
        (suspect.own.hertz or 0.0) < CLOCK_SHARE * statistics.median(known)
    )
    if suspect.memory != "host" or not (low or hot):
        return None
    clocks = f"its cores run at {(suspect.own.hertz or 0.0) / 1e9:.2g} GHz" if low else ""
    theirs = f", the others' at {statistics.median(known) / 1e9:.2g} GHz" if low else ""
    heat = f"heat slowed its cores down {suspect.own.thermal} times" if hot else ""
    return Cause(
        "throttled" if hot else "frequency",
        "; ".join(filter(None, (clocks + theirs, heat))),
        "check its cooling, its power limit and its governor (cpupower frequency-info)",
    )


def _crowd_or_nature(suspect: Suspect) -> Cause | None:
    if suspect.when != ALONE:
        return Cause(
            "neighbour",
            "alone it is as fast as they are: it shares cores, caches or memory with other ranks",
            "bind each rank to cores of its own (mpirun --bind-to core, srun --cpu-bind=cores)",
        )
    return Cause(
        "nature",
        "it is slow by nature: no quota, no hypervisor and no neighbour kept it from running, as "
        "far as the kernel tells"
        if suspect.memory == "host"
        else "it is slow by nature: its GPU gives no reason that the others do not give",
        "compare its host with the others (memory channels, power and BIOS settings), or leave it "
        "out",
    )


CAUSES: Sequence[Callable[[Suspect], Cause | None]] = (
    _kept_from_running,
    _gpu_slowed,
    _hardware,
    _clock,
    _crowd_or_nature,
)
