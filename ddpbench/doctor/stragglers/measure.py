"""Stragglers: measure each rank alone, then all at once, then who waits for whom.

Alone means that the ranks of a machine compute in turn while its other ranks rest; all machines do
so at the same time. After that, every rank does equal work and then waits in a small all_reduce. A
suspect is measured again until PASSES passes agree. One entry of LOADS adds a load.

figures: {"loads": {name: {"amount", "unit"}}, "work_seconds": of the equal work, "passes": number,
"ranks": [{"host", "seconds": {when: {load: of a repetition, in the best round}}, and, of
the last pass, "kept": {when: {reason: share of the time}}, "wait_seconds", "hertz" of its cores,
"neighbours": processes on these cores}, …]}. `when` is "alone" or "together"; reasons are as in
`Shown`; None is unknown.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ddpbench.analysis.rank_setup import Setup, crowded
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.stragglers import judge
from ddpbench.doctor.stragglers.judge import ALONE, TOGETHER, Load, Measured, Pass, Shown
from ddpbench.measure import clock, start
from ddpbench.records.table import Table, TableColumn
from ddpbench.runtime import control, cpu, devices, gpu_facts
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

SLICE_SECONDS = 0.02, 0.1  # least and most time of a turn at one load
PERIOD_SECONDS = 0.12  # least with a CPU quota: longer than the kernel's period of 0.1 s
ALONE_SHARE = 0.25  # of the time of the examination, for the first pass
WORK_SECONDS = 5e-3  # of equal work before each all_reduce
MEMORY_SHARE = 1 / 16  # of the free memory, for one of two buffers of all ranks of a machine
ROUNDS = 5  # each rank has one turn in each, at changing places
REPETITIONS = 40  # of the all_reduce
NEIGHBOUR_SHARE = 0.1  # of a core, from which on another process is reported
GPU_CALLS = 10  # some ms each, until the clocks of a GPU are those under load


def examine(context: Context) -> Outcome:
    """Measure and judge all ranks. All ranks call it."""
    world, launch = context.world, context.launch
    full_hosts = _full_hosts(context)
    share = MEMORY_SHARE * (cpu.free_memory_nbytes() or 0) / len(world.neighbours)
    copy_nbytes = min(COPY_NBYTES["cpu"], *map(int, control.gather_values(world, share)))
    efforts = prepare_efforts(context.device, copy_nbytes)
    loads = {name: effort.load for name, effort in efforts.items()}
    together = world.world_size > 1 and not full_hosts
    passes, work_seconds = _gather_passes(context, efforts, together)
    setup = Setup(launch.ranks, list(world.hosts.values()))
    measured = Measured(passes, loads, setup, work_seconds)
    waits = judge.median_wait_seconds(passes[-1])
    figures = {
        "loads": {name: {"amount": load.amount, "unit": load.unit} for name, load in loads.items()},
        "work_seconds": work_seconds,
        "passes": len(passes),
        "ranks": [
            {
                "host": setup.host(rank),
                "seconds": {
                    when: {load: measured.best_seconds(rank, when, load) for load in rounds}
                    for when, rounds in last.seconds.items()
                },
                "kept": last.kept,
                "wait_seconds": waits[rank],
                "hertz": last.hertz,
                "neighbours": last.neighbours,
            }
            for rank, last in enumerate(passes[-1])
        ],
    }
    return Outcome(
        lines=tuple(summarise(measured)),
        unchecked=tuple(_unchecked(measured, full_hosts)),
        findings=judge.find_all(measured),
        figures=figures,
        tables=build_tables(figures, context.backend.name),
    )


def _gather_passes(context: Context, efforts: Efforts, together: bool) -> tuple[list[Pass], float]:
    """Return what all ranks showed in each pass, and the seconds of a usual rank's equal work.

    together: whether to measure all ranks at once as well.
    """
    world, memory = context.world, devices.of(context.device).memory
    slice_seconds = _slice_seconds(context, len(efforts))
    work = next(effort for effort in efforts.values() if effort.load.memory == memory)
    passes: list[Pass] = []
    repetitions, work_seconds = 0, 0.0
    while len(passes) < judge.PASSES:
        context.report_progress("each rank alone" + (", again to be sure" if passes else ""))
        own = _barrier_alone(world, efforts, slice_seconds, work)
        if not passes:
            everyone = control.gather_values(world, own.seconds[ALONE][work.load.name])
            repetitions, work_seconds = size_equal_work(everyone, WORK_SECONDS)
        if together:
            context.report_progress("all ranks at once")
            turns = barrier_turns(world, efforts, slice_seconds, alone=False)
            own.seconds[TOGETHER], own.kept[TOGETHER] = turns.seconds, turns.kept
            own.waited_ns.extend(barrier_waits_ns(context, work, repetitions))
        passes.append([Shown(**shown) for shown in control.gather_values(world, asdict(own))])
        if not control.broadcast_decision(world, int(judge.is_suspected(passes, work_seconds))):
            break
    return passes, work_seconds


def _barrier_alone(world: World, efforts: Efforts, slice_seconds: float, work: Effort) -> Shown:
    """Return what this rank shows alone, with what else its cores, or its GPU, tell."""
    cores, began_ns = os.sched_getaffinity(0), clock.now_ns()
    before, heat = cpu.process_seconds(cores), cpu.thermal_events(cores)
    turns = barrier_turns(world, efforts, slice_seconds, alone=True)
    after, hotter = cpu.process_seconds(cores), cpu.thermal_events(cores)
    own = world.members[world.rank]
    ranks = tuple(f"(pid {member.pid})" for member in world.members if own.sees(member))
    used = {
        name: seconds - before.get(name, seconds)
        for name, seconds in after.items()
        if not name.endswith(ranks)
    }
    least = NEIGHBOUR_SHARE * (clock.now_ns() - began_ns) * 1e-9
    return Shown(
        seconds={ALONE: turns.seconds},
        kept={ALONE: turns.kept},
        hertz=turns.hertz,
        thermal=None if heat is None or hotter is None else hotter - heat,
        gpu=gpu_at_work(work),
        neighbours=sorted((n for n in used if used[n] > least), key=lambda name: -used[name]),
    )


def _slice_seconds(context: Context, loads: int) -> float:
    """Return the time of one turn at one load."""
    if any(facts.get("cgroup_cpu_quota_cores") for facts in context.launch.ranks):
        return PERIOD_SECONDS
    ranks_of_machine = max(map(len, context.world.machines.values()))
    least, most = SLICE_SECONDS
    share = ALONE_SHARE * context.seconds / (ROUNDS * ranks_of_machine * loads)
    return min(max(share, least), most)


def _full_hosts(context: Context) -> list[str]:
    """Return a host name for each machine with more compute threads than cores.

    Containers of one machine share its cores, so machines count, not host names.
    """
    found = []
    for members in context.world.machines.values():
        ranks = [context.launch.ranks[rank] for rank in members]
        hostname = ranks[0].get("hostname")
        found += [crowd.host for crowd in crowded([{**r, "hostname": hostname} for r in ranks])]
    return found


def _unchecked(measured: Measured, full_hosts: Sequence[str]) -> Iterator[str]:
    passes, loads = measured.passes, measured.loads
    if len(passes[0]) == 1:
        yield "which rank is slower than the others: there is only one rank"
    elif full_hosts:
        yield (
            f"all ranks at once, and which is late: on {', '.join(full_hosts[:4])} the ranks have "
            "more threads than cores, so this would only show which rank got a core"
        )
    for when, share in judge.find_unjudged(passes).items():
        yield (
            f"which rank is slow ({WORDS[when]}) or late: the host is busy, and ranks "
            f"waited for a core for {min(share, 1.0) * 100:.0f} % of the time"
        )
    if COPY not in loads:
        yield "memory copy: too little memory is free"
    if passes[0][0].kept[ALONE].get("queued") is None:
        yield "waiting for a core: this kernel does not report it"
    on_gpu = any(load.memory != "host" for load in loads.values())
    if on_gpu and any(shown.gpu is None for shown in passes[0]):
        yield f"why a GPU is slow: {gpu_facts.explain_unknown_gpu()}"


# --- loads ----------------------------------------------------------------------------------------

# By `defaults` of the kind of device:
SIDE = {"cpu": 512, "cuda": 4096}  # of the square matrices: some ms on a core, or on a GPU
COPY_NBYTES = {"cpu": 2**26, "cuda": 2**28}  # beyond all caches that one rank can use
COPIES = {"cpu": 1, "cuda": 4}  # in a repetition
LEAST_COPY_NBYTES = 2**23
LEAST_REPETITIONS = 2  # of a slice
Call = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """A load with its buffers, ready to be carried."""

    load: Load
    device: torch.device
    call: Call  # one repetition; on a GPU it may return before the end

    def time(self) -> float:
        """Return the seconds of one repetition to its end."""
        return devices.time_call(self.device, self.call)


Efforts = Mapping[str, Effort]


def _matmul(device: torch.device, nbytes: int) -> tuple[float, Call]:
    """Return the FLOP of a repetition, and the call."""
    import torch

    side = SIDE[devices.of(device).defaults]
    one, other = (torch.rand(side, side, device=device) for _ in range(2))
    out = torch.empty(side, side, device=device)
    return 2.0 * side**3, lambda: torch.mm(one, other, out=out)


def _copy(device: torch.device, nbytes: int) -> tuple[float, Call]:
    """Return the bytes that a repetition copies, and the call."""
    import torch

    kind = devices.of(device)
    size = nbytes if kind.memory == "host" else COPY_NBYTES[kind.defaults]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, count = torch.zeros_like(source), COPIES[kind.defaults]
    return float(size * count), lambda: [target.copy_(source) for _ in range(count)]


COPY = "memory copy"
LOADS: tuple[tuple[str, str, str, Callable[[torch.device, int], tuple[float, Call]]], ...] = (
    ("matmul", "GFLOP/s", "host", _matmul),  # name, unit, memory, how to prepare it
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
        efforts[name] = Effort(Load(name, amount, unit, memory), where, call)
    return efforts


def size_equal_work(
    seconds_of_ranks: Sequence[Sequence[float]], seconds: float
) -> tuple[int, float]:
    """Return how often a usual rank repeats a load in about so many seconds, and the exact time.

    seconds_of_ranks: of one repetition, some values for each rank.
    """
    usual = statistics.median(map(statistics.median, seconds_of_ranks))
    repetitions = max(1, round(seconds / usual))
    return repetitions, repetitions * usual


# --- turns ----------------------------------------------------------------------------------------


@dataclass
class Turns:
    """What this rank showed in its turns, and how long it did not run in them."""

    busy_threads: int  # on this machine at once
    seconds: dict[str, list[float]]  # load → of a repetition, one value a round
    wall_seconds: float = 0.0
    lost: dict[str, float | None] = field(default_factory=dict)  # reason → seconds of all turns
    hertz: float | None = None

    def carry(self, effort: Effort, slice_seconds: float) -> None:
        """Repeat a load for about so many seconds after a warm-up; add what it shows."""
        queued, meter = cpu.queued_seconds(), cpu.CpuMeter()
        effort.time()
        spent, until = list[float](), clock.now_ns() + round(slice_seconds * 1e9)
        while len(spent) < LEAST_REPETITIONS or clock.now_ns() < until:
            spent.append(effort.time())
        self.seconds[effort.load.name].append(statistics.fmean(spent))
        used, after = meter.stop(), cpu.queued_seconds()
        self.hertz = cpu.core_hertz(os.sched_getaffinity(0))
        self.wall_seconds += used.wall_seconds
        stolen = used.steal_seconds
        for reason, seconds in {
            "throttled": used.throttled_seconds,
            "stolen": None if stolen is None else stolen / self.busy_threads,
            "queued": None if queued is None or after is None else max(0.0, after - queued),
        }.items():
            before = self.lost.get(reason, 0.0)
            self.lost[reason] = None if seconds is None or before is None else before + seconds

    @property
    def kept(self) -> dict[str, float | None]:
        """Return the share of the time in which the rank did not run, by reason; None: unknown."""
        wall = max(self.wall_seconds, 1e-9)
        return {name: None if lost is None else lost / wall for name, lost in self.lost.items()}


def barrier_turns(world: World, efforts: Efforts, slice_seconds: float, alone: bool) -> Turns:
    """Let all ranks compute at once or, alone, the ranks of a machine in turn. All ranks call it.

    Returns what this rank showed.
    """
    import torch

    places = max(map(len, world.machines.values())) if alone else 1
    own, threads = world.neighbours.index(world.rank), torch.get_num_threads()
    turns = Turns(threads if alone else threads * len(world.neighbours), {n: [] for n in efforts})
    for number, effort, place in itertools.product(range(ROUNDS), efforts.values(), range(places)):
        world.watchdog.rearm()
        control.barrier_all()
        if (own + number) % places == place:
            turns.carry(effort, slice_seconds)
    control.barrier_all()
    return turns


def barrier_waits_ns(context: Context, work: Effort, repetitions: int) -> list[int]:
    """Return how long this rank spends in each of some small all_reduces, in ns.

    Before each, all ranks start together and do the same work, so many repetitions of it. All ranks
    call it.
    """
    import torch
    import torch.distributed as dist

    from ddpbench.measure import loop

    group, device = context.process_group, context.device
    meet = start.STARTS["barrier"](group, device)
    cell = torch.zeros(1, device=device)

    def prepare() -> None:
        meet()
        for _ in range(repetitions):
            work.time()

    def call() -> None:
        dist.all_reduce(cell, group=group)
        devices.of(device).synchronize(device)

    context.world.watchdog.rearm()
    entry, exits = loop.stamped(REPETITIONS, prepare, call)
    return [end - begin for begin, end in zip(entry, exits, strict=True)]


def gpu_at_work(work: Effort) -> dict[str, object] | None:
    """Return the state of this rank's GPU while it computes; None without a GPU or NVML."""
    kind = devices.of(work.device)
    if kind.memory == "host":
        return None
    for _ in range(GPU_CALLS):
        work.call()
    state = gpu_facts.gpu_state()
    kind.synchronize(work.device)
    return state


# --- output ---------------------------------------------------------------------------------------

MOST_ROWS = 16
WORDS = {ALONE: "alone", TOGETHER: "all at once"}
# why a rank did not run → heading of the share of its time
KEPT = {"queued": "waiting for core %", "throttled": "throttled %", "stolen": "stolen %"}
LEGEND = (
    "rates: of the best round, while the host's other ranks rest; at once: while all ranks "
    "compute; wait: how long the rank waits for the latest one in an all_reduce after equal work; "
    "waiting for core, throttled, stolen: share of the time in which the rank computes alone"
)


def summarise(measured: Measured) -> Iterator[str]:
    """Yield a line on the rates for each `when`, and one on the waits."""
    passes, ranks = measured.passes, range(len(measured.passes[0]))
    for when in passes[0][0].seconds:
        rates = [
            f"{name} {measured.format_rates(when, name, ranks)} {load.unit}"
            for name, load in measured.loads.items()
        ]
        yield f"best rate of each rank, {WORDS[when]}: {', '.join(rates)}"
    waits = [
        wait * 1e3 for one in passes for wait in judge.median_wait_seconds(one) if wait is not None
    ]
    if waits:
        yield (
            f"after {measured.work_seconds * 1e3:.3g} ms of equal work the ranks wait for the "
            f"latest {judge.format_span(waits)} ms in an all_reduce (median)"
        )


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the table of the ranks; none if nothing was measured or there is one rank."""
    ranks = list(enumerate(figures.get("ranks") or []))
    if len(ranks) < 2:
        return ()
    title = "speed of each rank"
    if len(ranks) > MOST_ROWS:
        first = next(iter(figures["loads"]))
        title += f", the {MOST_ROWS} of {len(ranks)} that are slowest in {first} alone"
        ranks = sorted(ranks, key=lambda item: -item[1]["seconds"][ALONE][first])[:MOST_ROWS]
    rows = [_row(rank, shown, figures["loads"]) for rank, shown in ranks]
    columns = [column for column in rows[0] if any(row[column] is not None for row in rows)]
    cells = tuple(tuple(row[column] for column in columns) for row in rows)
    return (Table(title, tuple(columns), cells, (LEGEND,)),)


def _row(
    rank: int, shown: Mapping[str, Any], loads: Mapping[str, Any]
) -> dict[TableColumn, object]:
    wait, shares = shown["wait_seconds"], shown["kept"][ALONE]
    row: dict[TableColumn, object] = {TableColumn("rank"): rank, TableColumn("host"): shown["host"]}
    for name, load in loads.items():
        for when, seconds in shown["seconds"].items():
            heading = f"{name} {load['unit'] if when == ALONE else 'at once'}"
            row[TableColumn(heading)] = float(load["amount"] / seconds[name] / 1e9)
    row[TableColumn("wait ms", decimals=2)] = None if wait is None else wait * 1e3
    for reason, heading in KEPT.items():
        share = shares.get(reason)
        row[TableColumn(heading, decimals=0)] = None if share is None else min(share, 1.0) * 100.0
    return row
