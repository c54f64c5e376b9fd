"""Why a rank is slow: one function of CAUSES adds a cause.

What the kernel, NVML or the hypervisor counted is evidence. A rank without any is slow by nature.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpbench.analysis.rank_setup import Setup, folded
from ddpbench.doctor.stragglers.readings import ALONE, Pass, Shown

# A reason explains a slow rank if it took at least this share of the time, and if that makes the
# rank slower than the others by at least this ratio.
EVIDENT_SHARE, EVIDENT_RATIO = 0.1, 1.2
MOST_SHARE = 0.99
CLOCK_SHARE = 0.85  # of the others' clock, below which a core or GPU runs slowly


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
        """Return the share of the time that this reason took, if that makes the rank slow."""
        share = self.own.kept.get(self.when, {}).get(reason)
        others = [shown.kept.get(self.when, {}).get(reason) or 0.0 for shown in self.others]
        if share is None or share < EVIDENT_SHARE:
            return None
        share, usual = min(share, MOST_SHARE), min(statistics.median(others), MOST_SHARE)
        return share if (1 - usual) / (1 - share) >= EVIDENT_RATIO else None


def find_cause(suspect: Suspect) -> Cause:
    """Return the first of CAUSES that has evidence; the last one needs none."""
    return next(cause for find in CAUSES if (cause := find(suspect)) is not None)


def _throttled(suspect: Suspect) -> Cause | None:
    share = suspect.kept("throttled") if suspect.memory == "host" else None
    if share is None:
        return None
    return Cause(
        "throttled",
        f"its control group was throttled for {share * 100:.0f} % of the time",
        "raise its CPU quota (docker --cpus, Kubernetes limits.cpu, systemd CPUQuota), or use "
        "fewer threads",
    )


def _stolen(suspect: Suspect) -> Cause | None:
    share = suspect.kept("stolen") if suspect.memory == "host" else None
    if share is None:
        return None
    return Cause(
        "stolen",
        f"the hypervisor gave its cores to others for {share * 100:.0f} % of the time",
        "ask for a dedicated host, or another one",
    )


def _queued(suspect: Suspect) -> Cause | None:
    share = suspect.kept("queued") if suspect.memory == "host" else None
    if share is None:
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
    reasons = set(_reasons(suspect.own))
    common = [set(_reasons(other)) for other in suspect.others]
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


def _reasons(shown: Shown) -> list[str]:
    reasons: Any = (shown.gpu or {}).get("throttle_reasons")
    return list(reasons or ())


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


def _crowd(suspect: Suspect) -> Cause | None:
    if suspect.when == ALONE:
        return None
    return Cause(
        "neighbour",
        "alone it is as fast as they are: it shares cores, caches or memory with other ranks",
        "bind each rank to cores of its own (mpirun --bind-to core, srun --cpu-bind=cores)",
    )


def _nature(suspect: Suspect) -> Cause | None:
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
    _throttled,
    _stolen,
    _queued,
    _gpu_slowed,
    _hardware,
    _clock,
    _crowd,
    _nature,
)
