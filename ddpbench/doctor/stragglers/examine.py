"""Stragglers: measure each rank alone, then all at once, then who waits for whom.

Alone means that the ranks of a machine compute in turn while its other ranks rest; all machines do
so at the same time. After that, every rank does equal work and then waits in a small all_reduce. A
suspect is measured again until PASSES passes agree.

figures: {"loads": {name: {"amount", "unit"}}, "work_seconds": of the equal work, "passes": number,
"ranks": [{"host", "seconds": {when: {load: of a repetition, in the best round}}, and, of
the last pass, "kept": {when: {reason: share of the time}}, "wait_seconds", "hertz" of its cores,
"neighbours": processes on these cores}, …]}. `when` is "alone" or "together"; reasons are as in
`Shown`; None is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ddpbench.analysis.rank_setup import Setup, crowded
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.stragglers import judge, turns
from ddpbench.records.table import Table, TableColumn
from ddpbench.runtime import control, cpu, devices, gpu_facts

SLICE_SECONDS = 0.02, 0.1  # least and most time of a turn at one load
PERIOD_SECONDS = 0.12  # least with a CPU quota: longer than the kernel's period of 0.1 s
ALONE_SHARE = 0.25  # of the time of the examination, for the first pass
WORK_SECONDS = 5e-3  # of equal work before each all_reduce
WORDS = {turns.ALONE: "alone", turns.TOGETHER: "all at once"}
MEMORY_SHARE = 1 / 16  # of the free memory, for one of two buffers of all ranks of a machine


def examine(context: Context) -> Outcome:
    """Measure and judge all ranks. All ranks call it."""
    world, backend, device = context.world, context.backend.name, context.device.type
    full_hosts = _full_hosts(context)
    share = MEMORY_SHARE * (cpu.free_memory_nbytes() or 0) / len(world.neighbours)
    copy_nbytes = min(turns.COPY_NBYTES["cpu"], *map(int, control.gather_values(world, share)))
    efforts = turns.prepare_efforts(context.device, copy_nbytes)
    loads = {name: effort.load for name, effort in efforts.items()}
    together = world.world_size > 1 and not full_hosts
    passes, work_seconds = _gather_passes(context, efforts, together)
    launch = context.launch
    setup = Setup(launch.ranks, list(world.hosts.values()), backend, device, launch.launcher)
    figures = {
        "loads": {name: {"amount": load.amount, "unit": load.unit} for name, load in loads.items()},
        "work_seconds": work_seconds,
        "passes": len(passes),
        "ranks": list(_ranks(passes, setup)),
    }
    return Outcome(
        lines=tuple(_lines(passes, loads, work_seconds)),
        unchecked=tuple(_unchecked(passes, full_hosts, loads)),
        findings=judge.findings(passes, loads, setup, work_seconds),
        figures=figures,
        tables=build_tables(figures, backend),
    )


def _gather_passes(
    context: Context, efforts: Mapping[str, turns.Effort], together: bool
) -> tuple[list[turns.Pass], float]:
    """Return what all ranks showed in each pass, and the seconds of a usual rank's equal work.

    together: whether to measure all ranks at once as well.
    """
    world = context.world
    slice_seconds = _slice_seconds(context, len(efforts))
    memory = devices.of(context.device).memory
    work = next(effort for effort in efforts.values() if effort.load.memory == memory)
    passes: list[turns.Pass] = []
    repetitions, work_seconds = 0, 0.0
    while len(passes) < judge.PASSES:
        context.report_progress("each rank alone" + (", again to be sure" if passes else ""))
        alone = turns.barrier_turns_alone(world, efforts, slice_seconds, look_around=bool(passes))
        measured, waited_ns = {turns.ALONE: alone}, list[int]()
        gpu = turns.gpu_at_work(context.device, work)
        if not passes:
            everyone = control.gather_values(world, alone.seconds[work.load.name])
            repetitions, work_seconds = turns.equal_work(everyone, WORK_SECONDS)
        if together:
            context.report_progress("all ranks at once")
            measured[turns.TOGETHER] = turns.barrier_turns_together(world, efforts, slice_seconds)
            waited_ns = turns.barrier_waits_ns(
                world, context.process_group, context.device, work, repetitions
            )
        own = turns.Shown(
            seconds={when: turn.seconds for when, turn in measured.items()},
            kept={when: turn.kept for when, turn in measured.items()},
            waited_ns=waited_ns,
            hertz=alone.hertz,
            thermal=alone.thermal,
            gpu=gpu,
            neighbours=alone.neighbours,
        )
        passes.append([turns.Shown(**shown) for shown in control.gather_values(world, asdict(own))])
        if not control.broadcast_decision(world, int(judge.suspected(passes, work_seconds))):
            break
    return passes, work_seconds


def _slice_seconds(context: Context, loads: int) -> float:
    """Return the time of one turn at one load."""
    if any(facts.get("cgroup_cpu_quota_cores") for facts in context.launch.ranks):
        return PERIOD_SECONDS
    ranks_of_machine = max(map(len, context.world.machines.values()))
    least, most = SLICE_SECONDS
    share = ALONE_SHARE * context.seconds / (turns.ROUNDS * ranks_of_machine * loads)
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


def _lines(
    passes: Sequence[turns.Pass], loads: Mapping[str, turns.Load], work_seconds: float
) -> Iterator[str]:
    for when in passes[0][0].seconds:
        rates = [
            f"{name} {judge.span(judge.rates(passes, load, when))} {load.unit}"
            for name, load in loads.items()
        ]
        yield f"best rate of each rank, {WORDS[when]}: {', '.join(rates)}"
    waits = [wait for one in passes for wait in judge.wait_seconds(one) if wait is not None]
    if waits:
        yield (
            f"after {work_seconds * 1e3:.3g} ms of equal work the ranks wait for the latest "
            f"{judge.span([wait * 1e3 for wait in waits])} ms in an all_reduce (median)"
        )


def _unchecked(
    passes: Sequence[turns.Pass], full_hosts: Sequence[str], loads: Mapping[str, turns.Load]
) -> Iterator[str]:
    if len(passes[0]) == 1:
        yield "which rank is slower than the others: there is only one rank"
    elif full_hosts:
        yield (
            f"all ranks at once, and which is late: on {', '.join(full_hosts[:4])} the ranks have "
            "more threads than cores, so this would only show which rank got a core"
        )
    for when, share in judge.unjudged(passes).items():
        yield (
            f"which rank is slow ({WORDS[when]}) or late: the host is busy, and ranks waited for a "
            f"core for {min(share, 1.0) * 100:.0f} % of the time"
        )
    if turns.COPY not in loads:
        yield "memory copy: too little memory is free"
    if passes[0][0].kept[turns.ALONE].get("queued") is None:
        yield "waiting for a core: this kernel does not report it"
    on_gpu = any(load.memory != "host" for load in loads.values())
    if on_gpu and any(shown.gpu is None for shown in passes[0]):
        yield f"why a GPU is slow: {gpu_facts.explain_unknown_gpu()}"


def _ranks(passes: Sequence[turns.Pass], setup: Setup) -> Iterator[dict[str, Any]]:
    waits = judge.wait_seconds(passes[-1])
    for rank, last in enumerate(passes[-1]):
        yield {
            "host": setup.host(rank),
            "seconds": {
                when: {load: judge.best(passes, rank, when, load) for load in rounds}
                for when, rounds in last.seconds.items()
            },
            "kept": last.kept,
            "wait_seconds": waits[rank],
            "hertz": last.hertz,
            "neighbours": last.neighbours,
        }


MOST_ROWS = 16
# why a rank did not run → heading of the share of its time
KEPT = {"queued": "waiting for core %", "throttled": "throttled %", "stolen": "stolen %"}
LEGEND = (
    "rates: of the best round, while the host's other ranks rest; at once: while all ranks "
    "compute; wait: how long the rank waits for the latest one in an all_reduce after equal work; "
    "waiting for core, throttled, stolen: share of the time in which the rank computes alone"
)


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    """Return the table of the ranks; none if nothing was measured or there is one rank."""
    ranks = list(enumerate(figures.get("ranks") or []))
    if len(ranks) < 2:
        return ()
    loads, whens = figures["loads"], list(ranks[0][1]["seconds"])
    title = "speed of each rank"
    if len(ranks) > MOST_ROWS:
        first = next(iter(loads))
        title += f", the {MOST_ROWS} of {len(ranks)} that are slowest in {first} alone"
        ranks = sorted(ranks, key=lambda item: -item[1]["seconds"]["alone"][first])[:MOST_ROWS]
    columns = [
        TableColumn("rank"),
        TableColumn("host"),
        *(
            TableColumn(f"{name} {load['unit'] if when == 'alone' else 'at once'}")
            for name, load in loads.items()
            for when in whens
        ),
        TableColumn("wait ms", decimals=2),
        *(TableColumn(heading, decimals=0) for heading in KEPT.values()),
    ]
    rows = [_row(rank, shown, loads, whens) for rank, shown in ranks]
    known = [n for n, _ in enumerate(columns) if any(row[n] is not None for row in rows)]
    return (
        Table(
            title,
            tuple(columns[n] for n in known),
            tuple(tuple(row[n] for n in known) for row in rows),
            (LEGEND,),
        ),
    )


def _row(rank: int, shown: Mapping[str, Any], loads: Mapping[str, Any], whens: list[str]) -> Any:
    wait, shares = shown["wait_seconds"], shown["kept"]["alone"]
    return [
        rank,
        shown["host"],
        *(
            float(load["amount"] / shown["seconds"][when][name] / 1e9)
            for name, load in loads.items()
            for when in whens
        ),
        None if wait is None else wait * 1e3,
        *(None if (s := shares.get(reason)) is None else min(s, 1.0) * 100.0 for reason in KEPT),
    ]
