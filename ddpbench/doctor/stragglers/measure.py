"""Stragglers: measure each rank alone, then all at once, then who waits for whom.

Alone means that the ranks of a machine compute in turn while its other ranks rest; all machines do
so at the same time. After that, every rank does equal work and then waits in a small all_reduce. A
suspect is measured again until PASSES passes agree. One entry of LOADS adds a load.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ddpbench.analysis.rank_setup import Setup, crowded
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.stragglers import judge
from ddpbench.doctor.stragglers.judge import ALONE, TOGETHER, Load, Measured, Pass, RankPass
from ddpbench.measure import clock, start
from ddpbench.records.table import Table, TableColumn
from ddpbench.runtime import control, cpu, devices, gpu_facts
from ddpbench.runtime.world import World

if TYPE_CHECKING:
    import torch

SLICE_SECONDS = 0.02, 0.1  # least and most time of a turn at one load
PERIOD_SECONDS = 0.12  # of a turn with a CPU quota: longer than the kernel's period of 0.1 s
ALONE_SHARE = 0.25  # of the time of the examination, for the first pass
WORK_SECONDS = 5e-3  # of equal work before each all_reduce
ROUNDS = 5  # each rank has one turn in each, at changing places
REPETITIONS = 40  # of the all_reduce
NEIGHBOUR_SHARE = 0.1  # of a core; a process that uses more is reported
GPU_CALLS = 10  # some ms each, until the clocks of a GPU are those under load


def examine(context: Context) -> Outcome:
    """Measure and judge all ranks. All ranks call it."""
    world = context.world
    full_hosts = [crowd.host for crowd in crowded(context.launch.ranks)]
    efforts = prepare_efforts(context.device)
    together = world.world_size > 1 and not full_hosts
    passes, work_seconds = _gather_passes(context, efforts, together)
    setup = Setup(context.launch.ranks, list(world.hosts.values()))
    measured = Measured(passes, efforts, setup, work_seconds)
    return Outcome(
        lines=tuple(summarise(measured)),
        unchecked=tuple(_unchecked(measured, full_hosts)),
        findings=judge.find_all(measured),
        tables=build_tables(measured),
    )


def _unchecked(measured: Measured, full_hosts: Sequence[str]) -> Iterator[str]:
    passes = measured.passes
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
    on_gpu = any(load.memory != "host" for load in measured.loads.values())
    if on_gpu and any(rank.gpu is None for rank in passes[0]):
        yield f"why a GPU is slow: {gpu_facts.explain_unknown_gpu()}"


# --- passes ---------------------------------------------------------------------------------------


def _gather_passes(context: Context, efforts: Efforts, together: bool) -> tuple[list[Pass], float]:
    """Return the measurements of each pass, and the seconds of a usual rank's equal work.

    together: whether to measure all ranks at once as well.
    """
    world, memory = context.world, devices.of(context.device).memory
    seconds = _slice_seconds(context, len(efforts))
    work = next(effort for effort in efforts.values() if effort.memory == memory)
    passes: list[Pass] = []
    repetitions, work_seconds = 1, 0.0
    while len(passes) < judge.PASSES:
        context.report_progress("each rank alone" + (", again to be sure" if passes else ""))
        own = _barrier_alone(world, efforts, seconds, work)
        if not passes:
            everyone = control.gather_values(world, own.seconds[ALONE][work.name])
            usual = statistics.median(map(statistics.median, everyone))
            repetitions = max(1, round(WORK_SECONDS / usual))
            work_seconds = repetitions * usual
        if together:
            context.report_progress("all ranks at once")
            own.seconds[TOGETHER], own.lost[TOGETHER] = barrier_turns(
                world, efforts, seconds, alone=False
            )
            own.waited_ns.extend(barrier_waits_ns(context, work, repetitions))
        passes.append([RankPass(**rank) for rank in control.gather_values(world, asdict(own))])
        late_rank = judge.find_late(passes, work_seconds)
        is_suspected = bool(judge.find_slow(passes)) or late_rank is not None
        if not control.broadcast_decision(world, int(is_suspected)):
            break
    return passes, work_seconds


def _slice_seconds(context: Context, loads: int) -> float:
    """Return the time of one turn at one load."""
    if any(facts.get("cgroup_cpu_quota_cores") for facts in context.launch.ranks):
        return PERIOD_SECONDS
    ranks_of_machine = max(map(len, context.world.machines.values()))
    least, most = SLICE_SECONDS
    share = ALONE_SHARE * context.seconds / (ROUNDS * ranks_of_machine * loads)
    return min(max(share, least), most)


def _barrier_alone(world: World, efforts: Efforts, seconds: float, work: Effort) -> RankPass:
    """Measure this rank alone, and what else its cores, or its GPU, do meanwhile."""
    cores, began_ns = os.sched_getaffinity(0), clock.now_ns()
    before = cpu.process_seconds(cores)
    repetition_seconds, lost = barrier_turns(world, efforts, seconds, alone=True)
    after = cpu.process_seconds(cores)
    own = world.members[world.rank]
    ranks = tuple(f"(pid {member.pid})" for member in world.members if own.sees(member))
    least = NEIGHBOUR_SHARE * (clock.now_ns() - began_ns) * 1e-9
    used = {
        name: spent
        for name, total in after.items()
        if (spent := total - before.get(name, total)) > least and not name.endswith(ranks)
    }
    return RankPass(
        seconds={ALONE: repetition_seconds},
        lost={ALONE: lost},
        gpu=read_gpu_at_work(work),
        neighbours=sorted(used, key=lambda name: -used[name]),
    )


def barrier_turns(
    world: World, efforts: Efforts, seconds: float, alone: bool
) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Let all ranks compute at once or, alone, the ranks of a machine in turn. All ranks call it.

    seconds: of each turn. Returns, of this rank: load → seconds of a repetition, one value per
    round; reason → share of the time in which it did not run.
    """
    import torch

    places = max(map(len, world.machines.values())) if alone else 1
    own, threads = world.neighbours.index(world.rank), torch.get_num_threads()
    busy_threads = threads if alone else threads * len(world.neighbours)
    spent: dict[str, list[float]] = {name: [] for name in efforts}
    uses = []
    for number, effort, place in itertools.product(range(ROUNDS), efforts.values(), range(places)):
        world.watchdog.rearm()
        control.barrier_all()
        if (own + number) % places == place:
            repetition_seconds, use = take_turn(effort, seconds)
            spent[effort.name].append(repetition_seconds)
            uses.append(use)
    control.barrier_all()
    wall, throttled, stolen, queued = (_add_up(column) for column in zip(*uses, strict=True))
    stolen = None if stolen is None else stolen / busy_threads
    lost = {"throttled": throttled, "stolen": stolen, "queued": queued}
    shares = {name: None if s is None else s / (wall or 1) for name, s in lost.items()}
    return spent, shares


def take_turn(effort: Effort, seconds: float) -> tuple[float, tuple[float | None, ...]]:
    """Repeat a load for about so many seconds after a warm-up.

    Returns the seconds of a repetition; and of the turn as a whole: its length, and the seconds
    throttled (None: no quota), stolen from all threads, and waited for a core (None: unknown).
    """
    queued, meter = cpu.queued_seconds(), cpu.CpuMeter()
    effort.time()
    spent, until = list[float](), clock.now_ns() + round(seconds * 1e9)
    while len(spent) < LEAST_REPETITIONS or clock.now_ns() < until:
        spent.append(effort.time())
    used, after = meter.stop(), cpu.queued_seconds()
    waited = None if queued is None or after is None else max(0.0, after - queued)
    use = (used.wall_seconds, used.throttled_seconds, used.steal_seconds, waited)
    return statistics.fmean(spent), use


def _add_up(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


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


def read_gpu_at_work(work: Effort) -> dict[str, object] | None:
    """Return the state of this rank's GPU while it computes; None without a GPU or NVML."""
    kind = devices.of(work.device)
    if kind.memory == "host":
        return None
    for _ in range(GPU_CALLS):
        work.call()
    state = gpu_facts.gpu_state()
    kind.synchronize(work.device)
    return state


# --- loads ----------------------------------------------------------------------------------------

# By `defaults` of the kind of device:
SIDE = {"cpu": 512, "cuda": 4096}  # of the square matrices: some ms on a core, or on a GPU
COPY_NBYTES = {"cpu": 2**26, "cuda": 2**28}  # beyond all caches that one rank can use
COPIES = {"cpu": 1, "cuda": 4}  # in a repetition
LEAST_REPETITIONS = 2  # of a turn
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Effort(Load):
    """A load with its buffers."""

    device: torch.device
    call: Call  # one repetition; on a GPU it may return before the end

    def time(self) -> float:
        """Return the seconds of one repetition to its end."""
        return devices.time_call(self.device, self.call)


Efforts = Mapping[str, Effort]


def _matmul(device: torch.device) -> tuple[float, Call]:
    """Return the FLOP of a repetition, and the call."""
    import torch

    side = SIDE[devices.of(device).defaults]
    one, other = (torch.rand(side, side, device=device) for _ in range(2))
    out = torch.empty(side, side, device=device)
    return 2.0 * side**3, lambda: torch.mm(one, other, out=out)


def _copy(device: torch.device) -> tuple[float, Call]:
    """Return the bytes that a repetition copies, and the call."""
    import torch

    kind = devices.of(device)
    size, count = COPY_NBYTES[kind.defaults], COPIES[kind.defaults]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return float(size * count), lambda: [target.copy_(source) for _ in range(count)]


LOADS: tuple[tuple[str, str, str, Callable[[torch.device], tuple[float, Call]]], ...] = (
    ("matmul", "GFLOP/s", "host", _matmul),  # name, unit, memory, how to prepare it
    ("memory copy", "GB/s", "host", _copy),
    ("GPU matmul", "GFLOP/s", "GPU", _matmul),
    ("GPU memory copy", "GB/s", "GPU", _copy),
)


def prepare_efforts(device: torch.device) -> dict[str, Effort]:
    """Return the loads of this rank's CPU and, if it has one, of its GPU."""
    import torch

    efforts, own = {}, devices.of(device).memory
    for name, unit, memory, prepare in LOADS:
        if memory in ("host", own):
            where = device if memory == own else torch.device("cpu")
            amount, call = prepare(where)
            efforts[name] = Effort(name, amount, unit, memory, device=where, call=call)
    return efforts


# --- output ---------------------------------------------------------------------------------------

MOST_ROWS = 16
WORDS = {ALONE: "alone", TOGETHER: "all at once"}
# why a rank did not run → heading of the share of its time
LOST = {"queued": "waiting for core %", "throttled": "throttled %", "stolen": "stolen %"}
LEGEND = (
    "rates: of the best round, while the host's other ranks rest; at once: while all ranks "
    "compute; wait: how long the rank waits for the latest one in an all_reduce after equal work; "
    "waiting for core, throttled, stolen: share of the time in which the rank computes alone"
)


def summarise(measured: Measured) -> Iterator[str]:
    """Yield a line on the rates for each `when`."""
    passes, ranks = measured.passes, range(len(measured.passes[0]))
    for when in passes[0][0].seconds:
        rates = [
            f"{name} {measured.format_rates(when, name, ranks)} {load.unit}"
            for name, load in measured.loads.items()
        ]
        yield f"best rate of each rank, {WORDS[when]}: {', '.join(rates)}"


def build_tables(measured: Measured) -> tuple[Table, ...]:
    """Return the table of the ranks, the slowest if they are many; none of a single rank."""
    world = range(len(measured.passes[0]))
    if len(world) < 2:
        return ()
    title, first = "speed of each rank", next(iter(measured.loads))
    ranks = list(world)
    if len(ranks) > MOST_ROWS:
        title += f", the {MOST_ROWS} of {len(ranks)} that are slowest in {first} alone"
        ranks.sort(key=lambda rank: -measured.best_seconds(rank, ALONE, first))
    rows = [_row(measured, rank) for rank in ranks[:MOST_ROWS]]
    columns = [column for column in rows[0] if any(row[column] is not None for row in rows)]
    cells = tuple(tuple(row[column] for column in columns) for row in rows)
    return (Table(title, tuple(columns), cells, (LEGEND,)),)


def _row(measured: Measured, rank: int) -> dict[TableColumn, object]:
    last = measured.passes[-1]
    waits = judge.median_wait_seconds(last)
    row: dict[TableColumn, object] = {
        TableColumn("rank"): rank,
        TableColumn("host"): measured.setup.host(rank),
    }
    for name, load in measured.loads.items():
        for when in last[rank].seconds:
            heading = f"{name} {load.unit if when == ALONE else 'at once'}"
            row[TableColumn(heading)] = load.amount / measured.best_seconds(rank, when, name) / 1e9
    row[TableColumn("wait ms", decimals=2)] = waits[rank] * 1e3 if waits else None
    for reason, heading in LOST.items():
        share = last[rank].lost[ALONE][reason]
        row[TableColumn(heading, decimals=0)] = None if share is None else min(share, 1.0) * 100.0
    return row
