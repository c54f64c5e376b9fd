"""What a rank shows of its speed, and why it is slow: one function of CAUSES adds a cause.

What the kernel, NVML or the hypervisor counted is evidence; without any it is the rank's nature.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpbench.analysis.setup import Setup, folded

# A share of its time explains a rank's slowness when it is that, and makes it slower by that ratio
# than the others' share makes them.
EVIDENT_SHARE, EVIDENT_RATIO = 0.1, 1.2
MOST_SHARE = 0.99
CLOCK_SHARE = 0.85  # of the others' clock: a core or GPU that runs slower than that

ALONE, TOGETHER = "alone", "together"


@dataclass(frozen=True)
class Load:
    """What each rank does, again and again."""

    name: str
    amount: float  # of one repetition, in FLOP or bytes
    unit: str  # of the rate, in 10⁹ a second: "GFLOP/s", "GB/s"
    device: str = "cpu"

    def rate(self, seconds: float) -> float:
        """What a repetition of so many seconds comes to, in its unit."""
        return self.amount / seconds / 1e9


@dataclass(frozen=True)
class Shown:
    """What one rank showed in one pass. "when" is ALONE, the other ranks of its machine resting,
    or TOGETHER with all; that is left out where it would mean nothing."""

    seconds: dict[str, dict[str, list[float]]]  # when → load → of a repetition, a value a round
    # when → "throttled", "stolen", "queued" → the share of the time in which it did not run for
    # that reason; None: not known
    kept: dict[str, dict[str, float | None]]
    waited_ns: list[int] = field(default_factory=list)  # in each all_reduce after equal work
    hertz: float | None = None  # of its cores
    thermal: int | None = None  # how often these were slowed for their heat
    gpu: dict[str, object] | None = None  # its state while it worked
    neighbours: list[str] = field(default_factory=list)  # processes on its cores, busiest first


Pass = Sequence[Shown]  # one a rank


@dataclass(frozen=True)
class Cause:
    """Why a rank is slow: by name, how it shows, and what to do."""

    name: str
    told: str
    next_step: str


@dataclass(frozen=True)
class Suspect:
    """A slow rank among all that showed something."""

    rank: int
    when: str
    device: str
    shown: Pass
    setup: Setup

    @property
    def own(self) -> Shown:
        return self.shown[self.rank]

    @property
    def others(self) -> list[Shown]:
        return [its for rank, its in enumerate(self.shown) if rank != self.rank]

    def kept(self, kind: str) -> float | None:
        """The share of its time for which it was kept from running so, where that is evident."""
        share = self.own.kept.get(self.when, {}).get(kind)
        others = [its.kept.get(self.when, {}).get(kind) or 0.0 for its in self.others]
        if share is None or share < EVIDENT_SHARE:
            return None
        share, usual = min(share, MOST_SHARE), min(statistics.median(others), MOST_SHARE)
        return share if (1 - usual) / (1 - share) >= EVIDENT_RATIO else None


def cause(rank: int, when: str, device: str, shown: Pass, setup: Setup) -> Cause:
    """The first of CAUSES that has evidence, else the rank's nature."""
    suspect = Suspect(rank, when, device, shown, setup)
    return next(found for ask in CAUSES if (found := ask(suspect)) is not None)


def _throttled(its: Suspect) -> Cause | None:
    share = its.kept("throttled") if its.device == "cpu" else None
    if share is None:
        return None
    return Cause(
        "throttled",
        f"its control group was throttled for {share * 100:.0f} % of the time",
        "raise its CPU quota (docker --cpus, Kubernetes limits.cpu, systemd CPUQuota), or use "
        "fewer threads",
    )


def _stolen(its: Suspect) -> Cause | None:
    share = its.kept("stolen") if its.device == "cpu" else None
    if share is None:
        return None
    return Cause(
        "stolen",
        f"the hypervisor gave its cores to others for {share * 100:.0f} % of the time",
        "ask for a machine of its own, or another one",
    )


def _queued(its: Suspect) -> Cause | None:
    share = its.kept("queued") if its.device == "cpu" else None
    if share is None:
        return None
    seen = ", ".join(its.own.neighbours[:3])
    cpuset = its.setup.ranks[its.rank].get("cpuset")
    return Cause(
        "neighbour",
        f"it waited for a core for {share * 100:.0f} % of the time: others use its cores {cpuset}"
        + (f", most of all {seen}" if seen else ""),
        "end what runs there, or give the rank cores of its own",
    )


def _gpu_slowed(its: Suspect) -> Cause | None:
    reasons = set(_reasons(its.own))
    common = [set(_reasons(other)) for other in its.others]
    usual = {each for each in reasons if 2 * sum(each in theirs for theirs in common) > len(common)}
    own = sorted(reasons - usual - {"GpuIdle", "ApplicationsClocksSetting", "None"})
    if its.device == "cpu" or not own:
        return None
    state: Any = its.own.gpu
    clock, celsius = state.get("sm_clock_hertz"), state.get("temperature_celsius")
    return Cause(
        "throttled",
        f"its GPU slows down ({', '.join(own)})"
        + (f" to {clock / 1e6:.0f} MHz" if clock else "")
        + (f" at {celsius} °C" if celsius is not None else ""),
        "see its cooling and power (nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE)",
    )


def _reasons(shown: Shown) -> list[str]:
    found: Any = (shown.gpu or {}).get("throttle_reasons")
    return list(found or ())


def _hardware(its: Suspect) -> Cause | None:
    fact = "cpu_model" if its.device == "cpu" else "gpu_name"
    values = its.setup.values(fact)
    own = values[its.rank]
    others = [value for rank, value in enumerate(values) if rank != its.rank]
    commonest = max(folded(others), key=lambda group: len(group[1]))[0]
    if own in (None, commonest) or commonest is None:
        return None
    return Cause(
        "hardware",
        f"it runs on another {'CPU' if its.device == 'cpu' else 'GPU'}, {own}, the others on "
        f"{commonest}",
        "give all ranks like hardware, or this one less work",
    )


def _clock(its: Suspect) -> Cause | None:
    known = [other.hertz for other in its.others if other.hertz]
    hot = (its.own.thermal or 0) > 0
    low = bool(its.own.hertz and known) and (
        (its.own.hertz or 0.0) < CLOCK_SHARE * statistics.median(known)
    )
    if its.device != "cpu" or not (low or hot):
        return None
    clocks = f"its cores run at {(its.own.hertz or 0.0) / 1e9:.2g} GHz" if low else ""
    theirs = f", the others' at {statistics.median(known) / 1e9:.2g} GHz" if low else ""
    heat = f"its cores were slowed {its.own.thermal} times for their heat" if hot else ""
    return Cause(
        "throttled" if hot else "frequency",
        "; ".join(filter(None, (clocks + theirs, heat))),
        "see its cooling, its power limit and its governor (cpupower frequency-info)",
    )


def _crowd(its: Suspect) -> Cause | None:
    if its.when == ALONE:
        return None
    return Cause(
        "neighbour",
        "alone it is as fast as they are: it shares cores, caches or memory with other ranks",
        "bind each rank to cores of its own (mpirun --bind-to core, srun --cpu-bind=cores)",
    )


def _nature(its: Suspect) -> Cause | None:
    return Cause(
        "nature",
        "it is slow by nature: no quota, no hypervisor and no neighbour kept it from running, as "
        "far as the kernel tells"
        if its.device == "cpu"
        else "it is slow by nature: its GPU gives no reason that the others do not give",
        "compare its machine with the others' (memory channels, power and BIOS settings), or leave "
        "it out",
    )


CAUSES: Sequence[Callable[[Suspect], Cause | None]] = (
    _throttled,
    _stolen,
    _queued,
    _gpu_slowed,
    _hardware,
    _clock,
    _crowd,
    _nature,
)
