"""Which rank is slow: each rank's computing alone, then with the others, then how long the others
wait for it in a small all_reduce after equal work.

Alone: the ranks of a machine in turn, while the others of it rest; all machines at once. What is
suspected is measured again, until PASSES agree, before it is told.

figures: {"loads": {name: {"amount", "unit"}}, "work_seconds": of equal work, "passes": how many,
"ranks": [{"host", "seconds": {when: {load: of a repetition, in the best round}}, and, of
the last pass, "kept": {when: {why: share of the time}}, "wait_seconds", "hertz" of its cores,
"neighbours": processes on these}, …]}. When is "alone" or "together", why as in
causes.py; None is what is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from ddpbench.analysis.setup import Setup, crowded
from ddpbench.doctor.context import Context, Outcome
from ddpbench.doctor.stragglers import judge, turns
from ddpbench.doctor.stragglers.causes import ALONE, TOGETHER, Load, Pass, Shown
from ddpbench.doctor.stragglers.loads import COPY, COPY_NBYTES, prepared
from ddpbench.runtime import control, environment

SLICE_SECONDS = 0.02, 0.1  # of a turn at one load: at least, and at most
PERIOD_SECONDS = 0.12  # at least where a quota may stop a rank: beyond the kernel's period of 0.1 s
ALONE_SHARE = 0.25  # of the time that the examination may take, for the first pass
WORK_SECONDS = 5e-3  # before each all_reduce
WORDS = {ALONE: "alone", TOGETHER: "all at once"}
MEMORY_SHARE = 1 / 16  # of what is free, for one of two buffers of all ranks of a machine


def examine(context: Context) -> Outcome:
    """All ranks call it."""
    group, kind = context.ranks, context.device.type
    full = _full_machines(context)
    efforts = prepared(context.device, _copy_nbytes(context))
    loads = {name: each.load for name, each in efforts.items()}
    passes, work_seconds = _passes(context, efforts, company=group.world_size > 1 and not full)
    setup = Setup(
        context.launch.ranks, list(group.hosts.values()), context.backend.name, kind,
        context.launch.launcher,
    )  # fmt: skip
    return Outcome(
        told=tuple(_told(passes, loads, work_seconds)),
        unchecked=tuple(_unchecked(passes, full, loads, kind)),
        findings=judge.findings(passes, loads, setup, work_seconds),
        figures={
            "loads": {n: {"amount": its.amount, "unit": its.unit} for n, its in loads.items()},
            "work_seconds": work_seconds,
            "passes": len(passes),
            "ranks": list(_ranks(passes, setup)),
        },
    )


def _passes(context: Context, efforts: turns.Efforts, company: bool) -> tuple[list[Pass], float]:
    """What all ranks showed, in all of them; and the seconds of a usual rank's equal work."""
    group = context.ranks
    least, most = SLICE_SECONDS
    mates = max(map(len, group.machines.values()))
    share = ALONE_SHARE * context.seconds / (turns.ROUNDS * mates * len(efforts))
    limited = any(its.get("cgroup_cpu_quota_cores") for its in context.launch.ranks)
    slice_seconds = PERIOD_SECONDS if limited else min(max(share, least), most)
    work = next(e for e in efforts.values() if e.load.device == context.device.type)
    passes: list[Pass] = []
    times, work_seconds = 0, 0.0
    while len(passes) < judge.PASSES:
        context.tell("each rank alone" + (", again to be sure" if passes else ""))
        alone = turns.alone(group, efforts, slice_seconds, look_around=bool(passes))
        done, waited = {ALONE: alone}, []
        gpu = turns.gpu_at_work(context.device, work)
        if not passes:
            each = control.gather_values(group, alone.seconds[work.load.name])
            times, work_seconds = turns.often(each, WORK_SECONDS)
        if company:
            context.tell("all ranks at once")
            done[TOGETHER] = turns.together(group, efforts, slice_seconds)
            waited = turns.waits(group, context.tested, context.device, work, times)
        mine = Shown(
            {when: its.seconds for when, its in done.items()},
            {when: its.kept.shares for when, its in done.items()},
            waited, alone.hertz, alone.thermal, gpu, alone.neighbours,
        )  # fmt: skip
        passes.append([Shown(**its) for its in control.gather_values(group, asdict(mine))])
        if not control.broadcast_decision(group, int(judge.suspected(passes, work_seconds))):
            break
    return passes, work_seconds


def _full_machines(context: Context) -> list[str]:
    """Those with more threads than cores, by the name of one of their hosts: containers of one
    machine share its cores."""
    found = []
    for members in context.ranks.machines.values():
        ranks = [context.launch.ranks[rank] for rank in members]
        name = ranks[0].get("hostname")
        found += [crowd.host for crowd in crowded([{**its, "hostname": name} for its in ranks])]
    return found


def _copy_nbytes(context: Context) -> int:
    """What every rank has room to copy, the same in all."""
    share = MEMORY_SHARE * (environment.free_memory_nbytes() or 0) / len(context.ranks.neighbours)
    return min(COPY_NBYTES["cpu"], *map(int, control.gather_values(context.ranks, share)))


def _told(passes: Sequence[Pass], loads: Mapping[str, Load], work_seconds: float) -> Iterator[str]:
    for when in passes[0][0].seconds:
        each = [
            f"{name} {judge.span(judge.rates(passes, load, when))} {load.unit}"
            for name, load in loads.items()
        ]
        yield f"each rank {WORDS[when]}, at best: {', '.join(each)}"
    known = [wait for one in passes for wait in judge.wait_seconds(one) if wait is not None]
    if known:
        yield (
            f"after {work_seconds * 1e3:.3g} ms of equal work the ranks wait for the last "
            f"{judge.span([wait * 1e3 for wait in known])} ms in an all_reduce, the median"
        )


def _unchecked(
    passes: Sequence[Pass], full: Sequence[str], loads: Mapping[str, Load], device: str
) -> Iterator[str]:
    if len(passes[0]) == 1:
        yield "who is slower than the others: there is one rank"
    elif full:
        yield (
            f"all ranks at once, and who is late: on {', '.join(full[:4])} they have more threads "
            "than cores, and would show who got a core"
        )
    for when, share in judge.unjudged(passes).items():
        yield (
            f"who is slow {WORDS[when]}: the host is busy, and ranks wait for a core for "
            f"{min(share, 1.0) * 100:.0f} % of the time"
        )
    if COPY not in loads:
        yield "memory copy: too little memory is free"
    if passes[0][0].kept[ALONE].get("queued") is None:
        yield "waiting for a core: this kernel does not tell"
    if device == "cuda" and find_spec("pynvml") is None:
        yield "why a GPU is slow: pip install nvidia-ml-py"


def _ranks(passes: Sequence[Pass], setup: Setup) -> Iterator[dict[str, Any]]:
    waits = judge.wait_seconds(passes[-1])
    for rank, last in enumerate(passes[-1]):
        yield {
            "host": setup.host(rank),
            "seconds": {
                when: {load: judge.best(passes, rank, when, load) for load in those}
                for when, those in last.seconds.items()
            },
            "kept": last.kept,
            "wait_seconds": waits[rank],
            "hertz": last.hertz,
            "neighbours": last.neighbours,
        }
