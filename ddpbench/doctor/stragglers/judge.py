"""Which rank is slow or late, and why: from its speed alone and with the others, and its waiting.

A rank is judged by its best round, because noise makes rounds slow and never fast. It is slow if
its best round takes RATIO of the others' best in every pass, that is in many rounds spread over
seconds. If the others wait for cores too, the host is busy, and no rank is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ddpbench.analysis.rank_setup import Setup, folded
from ddpbench.records.schema import Finding

# When a rank is measured: while the other ranks of its machine rest, or with all ranks.
ALONE, TOGETHER = "alone", "together"
RATIO = 1.4
PASSES = 3  # that must agree
LATE_SHARE = 0.75  # of the repetitions in which the others wait for the same rank
BUSY_SHARE = 0.2  # of the time, for which usual ranks may wait for a core
# A reason explains a slow rank if it took at least this share of the time, and if that makes the
# rank slower than the others by at least this ratio.
EVIDENT_SHARE, EVIDENT_RATIO = 0.1, 1.2


@dataclass(frozen=True)
class Load:
    """Work that a rank repeats."""

    name: str
    amount: float  # of one repetition, in FLOP or bytes
    unit: str  # of the rate, in 10⁹ a second: "GFLOP/s", "GB/s"
    memory: str = "host"  # whose memory it uses: as `devices.of(...).memory`


@dataclass(frozen=True)
class RankPass:
    """The measurements of one rank in one pass.

    `when` is ALONE or TOGETHER; TOGETHER is missing where it would mean nothing. lost: share of the
    time in which the rank did not run, by reason: "throttled", "stolen" or "queued"; None is
    unknown.
    """

    seconds: dict[str, dict[str, list[float]]]  # when → load → of a repetition, a value per round
    lost: dict[str, dict[str, float | None]]  # when → reason → share
    waited_ns: list[int] = field(default_factory=list)  # in each all_reduce after equal work
    gpu: dict[str, Any] | None = None  # state of its GPU at work
    neighbours: list[str] = field(default_factory=list)  # processes on its cores, busiest first

    def share(self, when: str, reason: str) -> float:
        """Return the share of the time in which the rank did not run; 0 if unknown."""
        return self.lost.get(when, {}).get(reason) or 0.0


Pass = Sequence[RankPass]  # one per rank


@dataclass(frozen=True)
class Measured:
    """The measurements of all ranks in all passes."""

    passes: Sequence[Pass]
    loads: Mapping[str, Load]
    setup: Setup
    work_seconds: float  # of a usual rank's equal work before an all_reduce

    def best_seconds(self, rank: int, when: str, load: str) -> float:
        """Return the seconds of a repetition in the best of all rounds."""
        return min(s for one in self.passes for s in one[rank].seconds[when][load])

    def format_rates(self, when: str, load: str, ranks: Iterable[int]) -> str:
        """Return the range of the best rates of these ranks: "118 to 121"."""
        amount = self.loads[load].amount
        return format_span([amount / self.best_seconds(r, when, load) / 1e9 for r in ranks])


def find_slow(passes: Sequence[Pass]) -> dict[int, list[tuple[str, str]]]:
    """Return the ranks that were slow in every pass, each with when and at which loads.

    A load at which a rank was slow alone is not listed again for all at once.
    """
    slow: dict[int, list[tuple[str, str]]] = {}
    for rank, own in enumerate(passes[0]):
        at: dict[str, str] = {}  # load → when
        for when, loads in own.seconds.items():
            for load in loads:
                if load not in at and all(_is_slow(one, rank, when, load) for one in passes):
                    at[load] = when
        if at:
            slow[rank] = [(when, load) for load, when in at.items()]
    return slow


def find_late(passes: Sequence[Pass], work_seconds: float) -> int | None:
    """Return the rank for which the others waited in every pass and in most repetitions.

    They must wait longer than a slow rank would need for the equal work. None: there is no such
    rank.
    """
    ranks = {_find_late_in(one, work_seconds) for one in passes}
    return ranks.pop() if len(ranks) == 1 else None


def find_unjudged(passes: Sequence[Pass]) -> dict[str, float]:
    """Return when no rank could be judged, and the share of the time that they wait for a core."""
    last = passes[-1]
    return {
        when: statistics.median(one.share(when, "queued") for one in last)
        for when in last[0].seconds
        if all(_is_busy(last, rank, when) for rank in range(len(last)))
    }


def median_wait_seconds(one_pass: Pass) -> list[float]:
    """Return how long each rank waits for the latest one in an all_reduce, the median.

    That is its time in the all_reduce minus the least of all ranks, which needs no common clock.
    Empty: nothing was measured.
    """
    least = [min(waits) for waits in zip(*(one.waited_ns for one in one_pass), strict=True)]
    return [
        statistics.median(ns - first for ns, first in zip(one.waited_ns, least, strict=True)) * 1e-9
        for one in one_pass
        if least
    ]


def format_span(values: Sequence[float]) -> str:
    """Format a range as "118 to 121", or as one number if both have the same text."""
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _is_slow(one_pass: Pass, rank: int, when: str, load: str) -> bool:
    best = [min(one.seconds[when][load]) for one in one_pass]
    own = best.pop(rank)
    if not best or _is_busy(one_pass, rank, when):
        return False
    return own >= RATIO * statistics.median(best)


def _is_busy(one_pass: Pass, rank: int, when: str) -> bool:
    """Return whether the other ranks usually waited for a core."""
    others = [one.share(when, "queued") for one in one_pass]
    del others[rank]
    return bool(others) and statistics.median(others) > BUSY_SHARE


def _find_late_in(one_pass: Pass, work_seconds: float) -> int | None:
    if len(one_pass) < 2 or not one_pass[0].waited_ns:
        return None
    import numpy as np

    from ddpbench.analysis import steps  # not for a help text

    waits = np.array([one.waited_ns for one in one_pass], dtype=np.float64) * 1e-9
    rank = steps.late_rank(waits, 1 - 0.05 / len(waits), (RATIO - 1) * work_seconds)
    # Waiting is not measured for load, so one busy moment of this pass leaves the rank unjudged.
    if rank is None or any(_is_busy(one_pass, rank, when) for when in one_pass[rank].lost):
        return None
    return rank if float((waits.argmin(axis=0) == rank).mean()) >= LATE_SHARE else None


# --- findings -------------------------------------------------------------------------------------

LATE_NEXT = (
    "find out what else uses its cores, and what else that process runs (a profiler, a tracer, a "
    "busy thread)"
)


def find_all(measured: Measured) -> tuple[Finding, ...]:
    """Return a warning for each host and cause of slowness, or for a rank that is only late."""
    passes, setup, work_seconds = measured.passes, measured.setup, measured.work_seconds
    if len(passes) < PASSES:
        return ()
    slow, late_rank = find_slow(passes), find_late(passes, work_seconds)
    waiting = "" if late_rank is None else _describe_waiting(passes, late_rank)
    groups: dict[tuple[str, str], list[int]] = {}
    causes: dict[int, tuple[Cause, str]] = {}
    for rank, ((when, load), *_) in slow.items():
        suspect = Suspect(rank, when, measured.loads[load].memory, passes[-1], setup)
        causes[rank] = find_cause(suspect)
        groups.setdefault((setup.host(rank), causes[rank][0].name), []).append(rank)
    found = []
    for ranks in groups.values():
        cause, evidence = causes[ranks[0]]
        verb, of = ("is", "") if len(ranks) == 1 else ("are", f"of rank {ranks[0]}: ")
        rates = _describe_rates(measured, ranks, slow)
        sentence = f"{setup.who(ranks)} {verb} slow: {rates}; {of}{evidence}"
        sentence += f"; {waiting}" if late_rank in ranks else ""
        place = {**setup.place(ranks), "cause": cause.name}
        found.append(Finding("warning", "slow-rank", sentence, cause.next_step, place))
    if late_rank is not None and late_rank not in slow:
        sentence = (
            f"{setup.who([late_rank])} is late: after {work_seconds * 1e3:.3g} ms of equal work "
            f"{waiting}, but alone it computes as fast as they do"
        )
        place = setup.place([late_rank])
        found.append(Finding("warning", "late-rank", sentence, LATE_NEXT, place))
    return tuple(found)


def _describe_rates(
    measured: Measured, ranks: Sequence[int], slow: Mapping[int, Sequence[tuple[str, str]]]
) -> str:
    """Describe the rates of slow ranks beside those of the others, for each load."""
    parts = []
    for when, name in slow[ranks[0]]:
        world, unit = range(len(measured.passes[0])), measured.loads[name].unit
        others = [rank for rank in world if (when, name) not in slow.get(rank, ())]
        own_rate, rate = (measured.format_rates(when, name, group) for group in (ranks, others))
        words = "alone" if when == ALONE else "while all ranks work,"
        parts.append(f"{name} {words} at best {own_rate} {unit}, the others {rate}")
    return "; ".join(parts)


def _describe_waiting(passes: Sequence[Pass], late_rank: int) -> str:
    waits = [median_wait_seconds(one) for one in passes]
    others = [seconds for one in waits for rank, seconds in enumerate(one) if rank != late_rank]
    return f"the others wait {statistics.median(others) * 1e3:.3g} ms for it in an all_reduce"


# --- causes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suspect:
    """A slow rank, and the measurements of all ranks."""

    rank: int
    when: str
    memory: str  # "host", or that of its GPU: what is slow
    measured: Pass
    setup: Setup

    @property
    def own(self) -> RankPass:
        return self.measured[self.rank]

    @property
    def others(self) -> list[RankPass]:
        return [one for rank, one in enumerate(self.measured) if rank != self.rank]


def _find_lost(reason: str, words: str, suspect: Suspect) -> str | None:
    """Return how much of the time the rank did not run, if that explains its speed."""
    share = min(suspect.own.share(suspect.when, reason), 0.99)
    usual = statistics.median(other.share(suspect.when, reason) for other in suspect.others)
    if share < EVIDENT_SHARE or (1 - min(usual, 0.99)) / (1 - share) < EVIDENT_RATIO:
        return None
    return f"{words} for {share * 100:.0f} % of the time"


def _find_queued(suspect: Suspect) -> str | None:
    lost = _find_lost("queued", "it waited for a core", suspect)
    cpuset = suspect.setup.ranks[suspect.rank].get("cpuset")
    processes = ", ".join(suspect.own.neighbours[:3])
    most = f", most of all {processes}" if processes else ""
    return lost and f"{lost}: other processes use its cores {cpuset}{most}"


def _find_slow_gpu(suspect: Suspect) -> str | None:
    everyone = [set((one.gpu or {}).get("throttle_reasons") or ()) for one in suspect.measured]
    own, others = everyone.pop(suspect.rank), everyone
    usual = {why for why in own if 2 * sum(why in other for other in others) > len(others)}
    reasons = sorted(own - usual - {"GpuIdle", "ApplicationsClocksSetting", "None"})
    state = suspect.own.gpu or {}
    clock, celsius = state.get("sm_clock_hertz"), state.get("temperature_celsius")
    speed = f" to {clock / 1e6:.0f} MHz" if clock else ""
    heat = f" at {celsius} °C" if celsius is not None else ""
    return f"its GPU slows down ({', '.join(reasons)}){speed}{heat}" if reasons else None


def _find_other_hardware(suspect: Suspect) -> str | None:
    fact, name = ("cpu_model", "CPU") if suspect.memory == "host" else ("gpu_name", "GPU")
    others = suspect.setup.values(fact)
    own = others.pop(suspect.rank)
    commonest = max(folded(others), key=lambda group: len(group[1]))[0]
    if own in (None, commonest) or commonest is None:
        return None
    return f"it runs on another {name}, {own}, the others on {commonest}"


class Cause(NamedTuple):
    """Why a rank is slow. memory: "host", "GPU", or "" for a cause of both."""

    name: str
    memory: str
    find_evidence: Callable[[Suspect], str | None]
    next_step: str


THROTTLED = partial(_find_lost, "throttled", "its control group was throttled")
STOLEN = partial(_find_lost, "stolen", "the hypervisor took its cores away")
BIND = "bind each rank to cores of its own (mpirun --bind-to core, srun --cpu-bind=cores)"
MATES = "alone it is as fast as they are: it shares cores, caches or memory with other ranks"
GPU_COOLING = "check its cooling and power (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE)"
QUOTA = (
    "raise its CPU quota (docker --cpus, Kubernetes limits.cpu, systemd CPUQuota), or use fewer "
    "threads"
)
UNKNOWN = "cause unknown: no quota, steal, contention or limit of a GPU's clock seen"
COMPARE = (
    "compare its host with the others (clocks, cooling, memory channels, power and BIOS settings), "
    "or leave it out"
)
CAUSES = (  # the first that has evidence counts
    Cause("throttled", "host", THROTTLED, QUOTA),
    Cause("stolen", "host", STOLEN, "ask for a dedicated host, or another one"),
    Cause("neighbour", "host", _find_queued, "end these processes, or give the rank its own cores"),
    Cause("throttled", "GPU", _find_slow_gpu, GPU_COOLING),
    Cause("hardware", "", _find_other_hardware, "use the same hardware for all ranks"),
    Cause("neighbour", "", lambda suspect: MATES if suspect.when != ALONE else None, BIND),
    Cause("nature", "", lambda suspect: UNKNOWN, COMPARE),
)


def find_cause(suspect: Suspect) -> tuple[Cause, str]:
    """Return the first cause that has evidence, and the evidence."""
    return next(
        (cause, evidence)
        for cause in CAUSES
        if cause.memory in ("", suspect.memory) and (evidence := cause.find_evidence(suspect))
    )
