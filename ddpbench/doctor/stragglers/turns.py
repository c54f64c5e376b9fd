"""Ranks that compute alone, in turn, then all at once, then equal work before an all_reduce.

All ranks call each function together; what it gives is this rank's own.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ddpbench.doctor.stragglers import loads
from ddpbench.doctor.stragglers.loads import Effort
from ddpbench.measure import start
from ddpbench.runtime import control, cpu, environment
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ROUNDS = 5  # each rank's turn comes once in each, and not always at the same place
REPETITIONS = 40  # of the all_reduce
SEEN_SHARE = 0.1  # of a core that another process must use to be told
Efforts = Mapping[str, Effort]


@dataclass
class Kept:
    """How long this rank was kept from running, added up over spans of work."""

    busy_threads: int  # on this machine at once
    wall_seconds: float = 0.0
    seconds: dict[str, float | None] = field(default_factory=dict)

    def during(self, work: Callable[[], object]) -> None:
        """Do the work, and add what happened meanwhile."""
        queued, meter = cpu.queued_seconds(), cpu.CpuMeter()
        work()
        used, after = meter.stop(), cpu.queued_seconds()
        self.wall_seconds += used.wall_seconds
        unknown = queued is None or after is None
        waited = None if unknown else max(0.0, (after or 0.0) - (queued or 0.0))
        spent = {
            "throttled": used.throttled_seconds,
            "stolen": _part(used.steal_seconds, self.busy_threads),
            "queued": waited,
        }
        for kind, seconds in spent.items():
            before = self.seconds.get(kind, 0.0)
            known = before is not None and seconds is not None
            self.seconds[kind] = (before or 0.0) + (seconds or 0.0) if known else None

    @property
    def shares(self) -> dict[str, float | None]:
        """The same as shares of the time, by reason; None: not known."""
        wall = max(self.wall_seconds, 1e-9)
        return {kind: _part(seconds, wall) for kind, seconds in self.seconds.items()}


def _part(seconds: float | None, of: float) -> float | None:
    return None if seconds is None else seconds / of


@dataclass
class Turns:
    """What this rank did when it was alone, or with the others."""

    kept: Kept
    seconds: dict[str, list[float]] = field(default_factory=dict)  # load → one value a round
    hertz: float | None = None
    thermal: int | None = None
    neighbours: list[str] = field(default_factory=list)


def alone(group: World, efforts: Efforts, slice_seconds: float, look_around: bool) -> Turns:
    """Each rank of a machine in turn, while the others of it rest.

    look_around: whether to see which other processes use this rank's cores meanwhile.
    """
    import torch

    cores = os.sched_getaffinity(0)
    mine = Turns(Kept(torch.get_num_threads()), {name: [] for name in efforts})
    mates = max(map(len, group.machines.values()))
    own = group.neighbours.index(group.rank)
    before, heat = cpu.process_seconds(cores) if look_around else {}, cpu.thermal_events(cores)
    for number in range(ROUNDS):
        for turn in range(mates):
            group.watchdog.rearm()
            control.barrier_all()
            if (own + number) % mates == turn:
                mine.kept.during(partial(_carry, efforts, slice_seconds, mine.seconds))
                mine.hertz = cpu.core_hertz(cores)
    control.barrier_all()
    hotter = cpu.thermal_events(cores)
    mine.thermal = None if heat is None or hotter is None else hotter - heat
    if look_around:
        wall = ROUNDS * mates * slice_seconds * len(efforts)
        mine.neighbours = _neighbours(group, before, cpu.process_seconds(cores), wall)
    return mine


def together(group: World, efforts: Efforts, slice_seconds: float) -> Turns:
    """All ranks at once."""
    import torch

    busy = torch.get_num_threads() * len(group.neighbours)
    mine = Turns(Kept(busy), {name: [] for name in efforts})
    for _ in range(ROUNDS):
        group.watchdog.rearm()
        for name, each in efforts.items():
            control.barrier_all()
            mine.kept.during(partial(_carry, {name: each}, slice_seconds, mine.seconds))
    control.barrier_all()
    return mine


def _carry(efforts: Efforts, slice_seconds: float, into: Mapping[str, list[float]]) -> None:
    for name, each in efforts.items():
        into[name].append(loads.slice_of(each, slice_seconds))


def _neighbours(
    group: World, before: Mapping[str, float], after: Mapping[str, float], wall: float
) -> list[str]:
    """The processes, but these ranks, that used a share of a core meanwhile, the busiest first."""
    ranks = tuple(
        f"(pid {who.pid})" for who in group.members if group.members[group.rank].sees(who)
    )
    used = {
        name: seconds - before.get(name, seconds)
        for name, seconds in after.items()
        if not name.endswith(ranks)
    }
    most = sorted(used, key=lambda name: -used[name])
    return [name for name in most if used[name] > SEEN_SHARE * wall]


def waits(
    group: World, tested: dist.ProcessGroup, device: torch.device, work: Effort, times: int
) -> list[int]:
    """ns that this rank spends in each of some small all_reduces, each after a common start and
    the same work, so often repeated."""
    import torch
    import torch.distributed as dist

    from ddpbench.measure import loop

    meet = start.STARTS["barrier"](tested, device)
    cell = torch.zeros(1, device=device)

    def prepare() -> None:
        meet()
        for _ in range(times):
            work.once()

    def call() -> None:
        dist.all_reduce(cell, group=tested)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    group.watchdog.rearm()
    entry, exits = loop.stamped(REPETITIONS, prepare, call)
    return [end - begin for begin, end in zip(entry, exits, strict=True)]


def equal_work(
    seconds_of_ranks: Sequence[Sequence[float]], wanted_seconds: float
) -> tuple[int, float]:
    """How often a usual rank repeats a load in so many seconds, and what that takes it."""
    each = statistics.median(map(statistics.median, seconds_of_ranks))
    times = max(1, round(wanted_seconds / each))
    return times, times * each


def gpu_at_work(device: torch.device, work: Effort) -> dict[str, object] | None:
    """The state of this rank's GPU while it computes; None where there is none, or no NVML."""
    if device.type != "cuda":
        return None
    import torch

    for _ in range(10):  # some ms each: its clocks are what they are under load
        work.call()
    state = environment.gpu_state()
    torch.cuda.synchronize(device)
    return state
