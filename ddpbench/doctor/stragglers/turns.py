"""What each rank shows alone, in turn, then all at once, then after equal work in an all_reduce.

All ranks call a function whose name begins with barrier_. It returns what this rank showed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpbench.doctor.stragglers.loads import Effort, mean_seconds
from ddpbench.measure import start
from ddpbench.runtime import control, cpu, devices, gpu_facts
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ROUNDS = 5  # each rank has one turn in each, at changing places
REPETITIONS = 40  # of the all_reduce
NEIGHBOUR_SHARE = 0.1  # of a core, from which on another process is reported
GPU_CALLS = 10  # some ms each, until the clocks of a GPU are those under load
Efforts = Mapping[str, Effort]


@dataclass
class Turns:
    """What this rank showed alone, or with the others."""

    busy_threads: int  # on this machine at once
    seconds: dict[str, list[float]]  # load → of a repetition, one value a round
    wall_seconds: float = 0.0
    lost: dict[str, list[float | None]] = field(default_factory=dict)  # reason → time of a slice
    hertz: float | None = None
    thermal: int | None = None
    neighbours: list[str] = field(default_factory=list)

    def carry(self, efforts: Efforts, slice_seconds: float) -> None:
        """Do a slice of each load; add what it shows and how long the rank did not run."""
        queued, meter = cpu.queued_seconds(), cpu.CpuMeter()
        for name, effort in efforts.items():
            self.seconds[name].append(mean_seconds(effort, slice_seconds))
        used, after = meter.stop(), cpu.queued_seconds()
        self.wall_seconds += used.wall_seconds
        stolen = used.steal_seconds
        spent = {
            "throttled": used.throttled_seconds,
            "stolen": None if stolen is None else stolen / self.busy_threads,
            "queued": None if queued is None or after is None else max(0.0, after - queued),
        }
        for reason, seconds in spent.items():
            self.lost.setdefault(reason, []).append(seconds)

    @property
    def kept(self) -> dict[str, float | None]:
        """Return the share of the time in which the rank did not run, by reason; None: unknown."""
        shares: dict[str, float | None] = {}
        for reason, lost in self.lost.items():
            known = [seconds for seconds in lost if seconds is not None]
            complete = len(known) == len(lost)
            shares[reason] = sum(known) / max(self.wall_seconds, 1e-9) if complete else None
        return shares


def barrier_turns_alone(
    world: World, efforts: Efforts, slice_seconds: float, look_around: bool
) -> Turns:
    """Let each rank of a machine compute in turn, while the other ranks of the machine rest.

    look_around: whether to look for other processes that use the cores of this rank meanwhile.
    """
    import torch

    cores = os.sched_getaffinity(0)
    turns = Turns(torch.get_num_threads(), {name: [] for name in efforts})
    ranks_of_machine = max(map(len, world.machines.values()))
    own = world.neighbours.index(world.rank)
    before, heat = cpu.process_seconds(cores) if look_around else {}, cpu.thermal_events(cores)
    for number in range(ROUNDS):
        for turn in range(ranks_of_machine):
            world.watchdog.rearm()
            control.barrier_all()
            if (own + number) % ranks_of_machine == turn:
                turns.carry(efforts, slice_seconds)
                turns.hertz = cpu.core_hertz(cores)
    control.barrier_all()
    hotter = cpu.thermal_events(cores)
    turns.thermal = None if heat is None or hotter is None else hotter - heat
    if look_around:
        wall = ROUNDS * ranks_of_machine * slice_seconds * len(efforts)
        turns.neighbours = _neighbours(world, before, cpu.process_seconds(cores), wall)
    return turns


def barrier_turns_together(world: World, efforts: Efforts, slice_seconds: float) -> Turns:
    """Let all ranks compute at once."""
    import torch

    busy_threads = torch.get_num_threads() * len(world.neighbours)
    turns = Turns(busy_threads, {name: [] for name in efforts})
    for _ in range(ROUNDS):
        world.watchdog.rearm()
        for name, effort in efforts.items():
            control.barrier_all()
            turns.carry({name: effort}, slice_seconds)
    control.barrier_all()
    return turns


def _neighbours(
    world: World, before: Mapping[str, float], after: Mapping[str, float], wall_seconds: float
) -> list[str]:
    """Return the processes, except these ranks, that used the cores, the busiest first."""
    own = world.members[world.rank]
    ranks = tuple(f"(pid {member.pid})" for member in world.members if own.sees(member))
    used = {
        name: seconds - before.get(name, seconds)
        for name, seconds in after.items()
        if not name.endswith(ranks)
    }
    busiest = sorted(used, key=lambda name: -used[name])
    return [name for name in busiest if used[name] > NEIGHBOUR_SHARE * wall_seconds]


def barrier_waits_ns(
    world: World, group: dist.ProcessGroup, device: torch.device, work: Effort, repetitions: int
) -> list[int]:
    """Return how long this rank spends in each of some small all_reduces, in ns.

    Before each, all ranks start together and do the same work, so many repetitions of it.
    """
    import torch
    import torch.distributed as dist

    from ddpbench.measure import loop

    kind = devices.of(device)
    meet = start.STARTS["barrier"](group, device)
    cell = torch.zeros(1, device=device)

    def prepare() -> None:
        meet()
        for _ in range(repetitions):
            work.once()

    def call() -> None:
        dist.all_reduce(cell, group=group)
        kind.synchronize(device)

    world.watchdog.rearm()
    entry, exits = loop.stamped(REPETITIONS, prepare, call)
    return [end - begin for begin, end in zip(entry, exits, strict=True)]


def equal_work(seconds_of_ranks: Sequence[Sequence[float]], seconds: float) -> tuple[int, float]:
    """Return how often a usual rank repeats a load in about so many seconds, and the exact time.

    seconds_of_ranks: of one repetition, some values for each rank.
    """
    usual = statistics.median(map(statistics.median, seconds_of_ranks))
    repetitions = max(1, round(seconds / usual))
    return repetitions, repetitions * usual


def gpu_at_work(device: torch.device, work: Effort) -> dict[str, object] | None:
    """Return the state of this rank's GPU while it computes; None without a GPU or NVML."""
    kind = devices.of(device)
    if kind.memory == "host":
        return None
    for _ in range(GPU_CALLS):
        work.call()
    state = gpu_facts.gpu_state()
    kind.synchronize(device)
    return state
