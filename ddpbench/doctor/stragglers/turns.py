"""What each rank shows alone, in turn, then all at once, then after equal work in an all_reduce.

One entry of LOADS adds a load. All ranks call a function whose name begins with barrier_. It
returns what this rank showed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpbench.measure import clock, start
from ddpbench.runtime import control, cpu, devices, gpu_facts
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# When a rank is measured: while the other ranks of its machine rest, or with all ranks.
ALONE, TOGETHER = "alone", "together"


@dataclass(frozen=True)
class Load:
    """Work that a rank repeats."""

    name: str
    amount: float  # of one repetition, in FLOP or bytes
    unit: str  # of the rate, in 10⁹ a second: "GFLOP/s", "GB/s"
    memory: str = "host"  # of its device: whose memory that uses

    def rate(self, seconds: float) -> float:
        """Return the rate, in the unit of the load, of a repetition that takes so many seconds."""
        return self.amount / seconds / 1e9


@dataclass(frozen=True)
class Shown:
    """What one rank showed in one pass. `when` is ALONE or, unless it would mean nothing, TOGETHER.

    kept: share of the time in which the rank did not run, by reason: "throttled", "stolen" or
    "queued"; None is unknown.
    """

    seconds: dict[str, dict[str, list[float]]]  # when → load → of a repetition, a value a round
    kept: dict[str, dict[str, float | None]]  # when → reason → share
    waited_ns: list[int] = field(default_factory=list)  # in each all_reduce after equal work
    hertz: float | None = None  # of its cores
    thermal: int | None = None  # how often heat slowed its cores down
    gpu: dict[str, object] | None = None  # state of its GPU at work
    neighbours: list[str] = field(default_factory=list)  # processes on its cores, busiest first


Pass = Sequence[Shown]  # one a rank


# By `defaults` of the kind of device:
SIDE = {"cpu": 512, "cuda": 4096}  # of the square matrices: some ms on a core, or on a GPU
COPY_NBYTES = {"cpu": 2**26, "cuda": 2**28}  # beyond all caches that one rank can use
COPIES = {"cpu": 1, "cuda": 4}  # in a repetition
LEAST_COPY_NBYTES = 2**23
LEAST_REPETITIONS = 2  # of a slice


@dataclass(frozen=True)
class Effort:
    """A load with its buffers, ready to be carried."""

    load: Load
    call: Callable[[], object]  # one repetition; on a GPU it may return before the end
    once: Callable[[], float]  # one repetition to its end; returns its seconds


def _matmul(device: torch.device, nbytes: int) -> tuple[float, Callable[[], object]]:
    """Return the FLOP of a repetition, and the call."""
    import torch

    side = SIDE[devices.of(device).defaults]
    one, other = (torch.rand(side, side, device=device) for _ in range(2))
    out = torch.empty(side, side, device=device)
    return 2.0 * side**3, lambda: torch.mm(one, other, out=out)


def _copy(device: torch.device, nbytes: int) -> tuple[float, Callable[[], object]]:
    """Return the bytes that a repetition copies, and the call."""
    import torch

    kind = devices.of(device)
    size = nbytes if kind.memory == "host" else COPY_NBYTES[kind.defaults]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, count = torch.zeros_like(source), COPIES[kind.defaults]

    def call() -> None:
        for _ in range(count):
            target.copy_(source)

    return float(size * count), call


Prepare = Callable[["torch.device", int], tuple[float, Callable[[], object]]]
COPY = "memory copy"
LOADS: tuple[tuple[str, str, str, Prepare], ...] = (  # name, unit, memory
    ("matmul", "GFLOP/s", "host", _matmul),
    (COPY, "GB/s", "host", _copy),
    ("GPU matmul", "GFLOP/s", "GPU", _matmul),
    ("GPU memory copy", "GB/s", "GPU", _copy),
)


def prepare_efforts(device: torch.device, copy_nbytes: int) -> dict[str, Effort]:
    """Return the loads of this rank's CPU and, if it has one, of its GPU.

    copy_nbytes: how much a repetition copies in the memory of the host; below LEAST_COPY_NBYTES
    that load is left out.
    """
    import torch

    efforts = {}
    own = devices.of(device).memory
    for name, unit, memory, prepare in LOADS:
        if memory not in ("host", own) or (name == COPY and copy_nbytes < LEAST_COPY_NBYTES):
            continue
        where = device if memory == own else torch.device("cpu")
        amount, call = prepare(where, copy_nbytes)
        efforts[name] = Effort(Load(name, amount, unit, memory), call, _timed(call, where))
    return efforts


def mean_seconds(effort: Effort, seconds: float) -> float:
    """Repeat a load for about so many seconds after a warm-up; return the mean of a repetition."""
    effort.once()
    spent, count = 0.0, 0
    until = clock.now_ns() + round(seconds * 1e9)
    while count < LEAST_REPETITIONS or clock.now_ns() < until:
        spent += effort.once()
        count += 1
    return spent / count


def _timed(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Time a call on the clock of its device: a GPU's leaves out what the host does meanwhile."""
    from ddpbench.measure import loop

    def once() -> float:
        entry, exits = loop.stamped(1, lambda: None, call)
        return (exits[0] - entry[0]) * 1e-9

    kind = devices.of(device)
    begin, end = kind.event(device), kind.event(device)

    def once_by_events() -> float:
        begin.record()
        call()
        end.record()
        end.synchronize()
        return devices.elapsed_ns(begin, end) * 1e-9

    return once if kind.clock == "host" else once_by_events


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
    lost: dict[str, float | None] = field(default_factory=dict)  # reason → seconds of all slices
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
            before = self.lost.get(reason, 0.0)
            self.lost[reason] = None if seconds is None or before is None else before + seconds

    @property
    def kept(self) -> dict[str, float | None]:
        """Return the share of the time in which the rank did not run, by reason; None: unknown."""
        return {
            reason: None if seconds is None else seconds / max(self.wall_seconds, 1e-9)
            for reason, seconds in self.lost.items()
        }


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
