"""Measure collectives: the cases of a sweep, and one launch of it in one rank."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpbench.catalog.backends import Backend
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS, Operation
from ddpbench.catalog.sizes import SYNTAX, parse, readable, whole
from ddpbench.launch.placement import Placement, Refused
from ddpbench.measure import memory
from ddpbench.measure.start import STARTS
from ddpbench.records.schema import Case, Limit, Plan, Result
from ddpbench.render.collective_columns import COLUMNS
from ddpbench.runtime import control, cpu, environment
from ddpbench.runtime.subgroups import GROUPS, Partition
from ddpbench.runtime.world import World
from ddpbench.session import launch_facts, launch_loop, options
from ddpbench.session.launch_loop import LaunchContext, Work
from ddpbench.session.run_options import RunOptions

if TYPE_CHECKING:
    import torch

    from ddpbench.measure.calibrate import Rates
    from ddpbench.runtime.subgroups import Subgroup
    from ddpbench.session.recorder import Recorder

# Seconds for a case, in a launch that stands alone and in one of several: what repetitions leave
# open within a launch is little beside what differs between launches.
SLICE, SHORT_SLICE = 2.0, 0.1
DEFAULT_SIZES = {"cpu": "4:64M:x4", "cuda": "8:1G:x4"}


@dataclass(frozen=True)
class Options(RunOptions):
    """What a sweep was asked for."""

    command = "collectives"
    usual_launches = 6

    op: tuple[str, ...]
    sizes: tuple[int, ...] | None
    dtype: tuple[str, ...]
    reduce_op: tuple[str, ...]
    form: tuple[str, ...]
    place: tuple[str, ...]
    groups: tuple[str, ...]
    root: int
    async_op: bool
    issue: str
    depth: int
    start: str
    precision: float
    slice: float | None
    no_check: bool
    buffers: str
    limit: float | None

    @property
    def subjects(self) -> tuple[str, ...]:
        """The operations."""
        return self.op

    def check(self) -> None:
        """Raises Refused where CUDA tensors were asked to lie in the host's huge pages."""
        if self.buffers == "huge" and self.device == "cuda":
            raise Refused(
                "--buffers huge asks for huge pages of the host, where CUDA tensors do not lie: "
                "leave it out, or add --device cpu"
            )

    def plan(self, seed: int) -> Plan:
        """The protocol as it is stored with the run."""
        return Plan(
            issue=self.issue,
            start="none" if self.issue == "pipelined" else self.start,
            depth=self.depth,
            precision=self.precision / 100,
            slice_seconds=self.slice or (SLICE if self.launches == 1 else SHORT_SLICE),
            check=not self.no_check,
            timeout_seconds=self.timeout,
            seed=seed,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    add = parser.add_argument_group("what is measured").add_argument
    add(
        "--op",
        type=options.names("operation", OPERATIONS),
        default=("all_reduce", "all_gather", "broadcast"),
        metavar="OP,…",
        help="default all_reduce,all_gather,broadcast; of: " + ", ".join(OPERATIONS) + ", all",
    )
    add(
        "--sizes",
        type=options.size_list,
        metavar="SIZES",
        help=f"total bytes as nccl-tests counts them: {SYNTAX}; default "
        f"{DEFAULT_SIZES['cpu']}, with CUDA tensors {DEFAULT_SIZES['cuda']}",
    )
    add(
        "--dtype",
        type=options.names("dtype", DTYPES),
        default=("float32",),
        metavar="DTYPE,…",
        help="default float32; of: " + ", ".join(DTYPES) + ", all",
    )
    add(
        "--reduce-op",
        type=options.names("reduce op", REDUCE_OPS),
        default=("sum",),
        metavar="OP,…",
        help="default sum; of: " + ", ".join(REDUCE_OPS) + ", all",
    )
    add(
        "--form",
        type=options.names("form", ("tensor", "list")),
        default=("tensor",),
        metavar="FORM,…",
        help="one tensor (default) or a list of tensors, where the operation has both",
    )
    add(
        "--place",
        type=options.names("place", ("in", "out")),
        default=(),
        metavar="PLACE,…",
        help="in or out of place, where the operation has both; default: its usual one",
    )
    add(
        "--groups",
        type=options.names("group", GROUPS),
        default=("world",),
        metavar="GROUP,…",
        help="who works together: world, all ranks (default); host, those of each host; cross, one "
        "of each host; all hosts or all such groups at once",
    )
    add(
        "--root",
        type=options.whole(0),
        default=0,
        help="rank (in its group) of rooted operations; default 0",
    )
    add("--async", dest="async_op", action="store_true", help="call with async_op=True, then wait")
    options.add_where(parser)
    _add_how(parser)
    options.add_repeats(
        parser, "of the order of cases; default: drawn, and stored", Options.usual_launches
    )
    options.add_shown(
        parser,
        COLUMNS,
        ". osu: what OSU prints, the mean over calls and ranks, each call between barriers. "
        "nccl_tests: what nccl-tests prints, with --issue pipelined only",
    )
    options.add_stored(parser)


def _add_how(parser: argparse.ArgumentParser) -> None:
    """The protocol: how calls are issued, started and repeated."""
    how = parser.add_argument_group("how it is measured")
    add = how.add_argument
    add(
        "--issue",
        choices=("isolated", "pipelined"),
        default="isolated",
        help="isolated: one call at a time, started together (default); pipelined: --depth calls "
        "in flight, what nccl-tests prints",
    )
    add(
        "--depth",
        type=options.whole(2),
        default=20,
        help="calls in flight when pipelined; default 20",
    )
    add(
        "--start",
        choices=tuple(STARTS),
        default="barrier",
        help="how the ranks start a repetition: the backend's barrier (default); p2p_barrier, the "
        "same messages on every backend; none",
    )
    add(
        "--precision",
        type=options.positive,
        default=2.5,
        metavar="PERCENT",
        help="a case ends when its median is known this well (half-width); default 2.5",
    )
    add(
        "--slice",
        type=options.positive,
        metavar="SECONDS",
        help=f"most time for one case in one launch; default {SHORT_SLICE:g}, in a single launch "
        f"{SLICE:g}",
    )
    add("--no-check", action="store_true", help="do not compare results with what they must be")
    add(
        "--buffers",
        choices=memory.KINDS,
        default="torch",
        help="memory of the tensors: torch's own, or huge pages where the kernel grants them "
        "(default: torch)",
    )
    add(
        "--limit",
        type=options.positive,
        metavar="GB/S",
        help="nominal one-way rate of a rank, for %% of limit; default: measured, on CPU",
    )


def run(asked: Options, place: Placement) -> int:
    """One rank's part of a sweep over the backends; the exit code."""
    return launch_loop.run(asked, place, prepare)


def prepare(at: LaunchContext[Options]) -> Work[Numbered]:
    """All cases of one launch, in shuffled order, and what the ranks can move at all."""
    from ddpbench.measure import calibrate, loop

    world, asked = at.world, at.asked
    teams = at.closing.enter_context(world.agree_subgroups(at.name, at.tested, asked.groups))
    for team in teams.values():
        launch_loop.barrier_to_connect(world, at.backend, team.group)
    loop.settle()
    splits = [team.partition for team in teams.values()]
    wanted = list(cases(asked, at.backend, at.plan, splits))
    random.Random(f"{at.plan.seed}/{at.index}").shuffle(wanted)
    world.watchdog.begin_phase("the calibration of limits")
    on_cpu = at.device.type == "cpu" and asked.limit is None
    sizes = {case.nbytes for case, _ in wanted} if on_cpu else set()
    rates = calibrate.rates(world, sizes, splits if on_cpu else ())
    return Work(
        [Numbered(number, *each) for number, each in enumerate(wanted, 1)],
        lambda this: (
            f"case {this.number} of {len(wanted)}: {this.case.called} "
            f"{readable(this.case.nbytes)} on {at.backend.name}"
        ),
        lambda recorder, progress: Sweep(at, teams, rates, recorder).measure,
        {"rates": asdict(rates)},
    )


class Numbered(NamedTuple):
    """A case, its place in the order of measuring, and the size that was asked for."""

    number: int
    case: Case
    requested_nbytes: int


class Sweep:
    """The cases of one launch, measured one by one in all ranks together."""

    def __init__(
        self,
        at: LaunchContext[Options],
        teams: Mapping[str, Subgroup],
        rates: Rates,
        recorder: Recorder,
    ) -> None:
        from ddpbench.measure import clock, offsets
        from ddpbench.measure.handoff import Handoff

        self.at, self.teams, self.rates, self.recorder = at, teams, rates, recorder
        self.together = at.closing.enter_context(offsets.opened(at.world, recorder.launch.ranks))
        self.handoff = Handoff(at.world) if at.device.type == "cpu" else None
        self.shortest_seconds = clock.shortest_seconds(recorder.launch.clock)
        self.meter = cpu.CpuMeter()
        self.share: float | None = None  # of the cores, that other processes used

    def measure(self, this: Numbered) -> tuple[Result, dict[str, Any] | None]:
        """One case; in rank 0 its samples' columns too."""
        from ddpbench.measure import pace
        from ddpbench.session.summary import summarise_result

        at, world, case, started = self.at, self.at.world, this.case, time.monotonic()
        operation, team = OPERATIONS[case.operation], self.teams[case.group]
        objection = team.partition.objection or _objection(
            case, operation, at.plan, world, at.device
        )
        samples = pace.measure(
            case, operation, at.plan, world, team, at.device, self.shortest_seconds, objection,
            self.together.ahead_ns,
        )  # fmt: skip
        off = self.together.again(team.partition.subgroups)
        mine = [
            launch_facts.read_spent_seconds(self.meter), samples.huge_share, samples.page_faults,
            self.handoff and self.handoff.seconds(),
        ]  # fmt: skip
        used, shares, faults, handoffs = zip(*control.gather_values(world, mine), strict=True)
        share = launch_facts.compute_others_share(world, used)
        if share is not None:  # else the case is too short to tell, and the next adds to it
            self.meter, self.share = cpu.CpuMeter(), share
        result = Result(
            case=case,
            launch=at.index,
            bus_factor=operation.bus_factor(case.world_size),
            least_nbytes=operation.least_nbytes(case),
            requested_nbytes=this.requested_nbytes,
            reason=samples.objection,
            wrong=tuple(pace.everyones_wrong(world, samples)),
            others_share=self.share,
            huge_share=min(filter(_known, shares), default=None),
            page_faults=max(filter(_known, faults), default=None),
            handoff_seconds=max(filter(_known, handoffs), default=None),
            limit=_limit(at.asked, at.backend, case, self.rates),
            hard_limit=_hard_limit(at.asked, case, self.rates),
            wall_seconds=time.monotonic() - started,
        )
        self.recorder.add_clocks(self.together)
        return summarise_result(result, samples, off)


def planned(asked: Options, backend: Backend) -> list[Case] | None:
    """All cases of a sweep on one backend, on this host alone; None: not known before it is."""
    if asked.groups != ("world",):
        return None
    size = asked.nproc or 1
    world = Partition("world", (tuple(range(size)),), (size,))
    return [case for case, _ in cases(asked, backend, asked.plan(0), [world])]


def cases(
    asked: Options, backend: Backend, plan: Plan, splits: Sequence[Partition]
) -> Iterator[tuple[Case, int]]:
    """All cases of a sweep on one backend, each with the size that was asked for."""
    from ddpbench.measure import loop

    sizes = asked.sizes or parse(DEFAULT_SIZES[asked.device])
    for name in asked.op:
        operation = OPERATIONS[name]
        seen = set()
        for split, form, place, dtype, reduce_op, nbytes in itertools.product(
            splits,
            [form for form in asked.form if form in operation.forms] or operation.forms[:1],
            [place for place in asked.place if place in operation.places] or operation.places[:1],
            asked.dtype if operation.sized else ("uint8",),
            asked.reduce_op if operation.reduces else (None,),
            sizes if operation.sized else (0,),
        ):
            blocks = split.size if operation.blocks else 1
            total, count = whole(nbytes, DTYPES[dtype].nbytes, blocks) if nbytes else (0, 0)
            case = Case(
                operation=name,
                form=form,
                backend=backend.name,
                provider=backend.provider(asked.device),
                device=asked.device,
                dtype=dtype,
                reduce_op=reduce_op,
                root=asked.root if operation.rooted else None,
                nbytes=total,
                count=count,
                in_place=place == "in",
                async_op=(asked.async_op or plan.issue == "pipelined") and not operation.paired,
                issue=plan.issue,
                start=plan.start,
                depth=loop.pipeline_depth(total, plan) if plan.issue == "pipelined" else 1,
                world_size=split.size,
                ranks_per_host=split.ranks_per_host,
                buffers=asked.buffers,
                clock="device" if asked.device == "cuda" else "host",
                group=split.name,
                groups=len(split.subgroups),
            )
            if case not in seen:
                seen.add(case)
                yield case, nbytes


def _known(value: float | None) -> bool:
    return value is not None


def _objection(
    case: Case, operation: Operation, plan: Plan, world: World, device: torch.device
) -> str | None:
    """Why this rank cannot measure the case, known before anything is allocated."""
    from ddpbench.measure import loop

    if operation.paired and case.world_size < 2:
        return f"{case.operation} needs two ranks"
    if operation.paired and case.issue == "pipelined":
        return f"{case.operation} is measured isolated only"
    if operation.paired and case.backend == "gloo" and case.device == "cuda":
        return "gloo sends and receives CPU tensors only"
    if operation.rooted and (case.root or 0) >= case.world_size:
        return f"root {case.root} is not one of {case.world_size} ranks"
    element = DTYPES[case.dtype].nbytes
    free, sharers, where = environment.free_memory_nbytes(), len(world.neighbours), "host"
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # what earlier cases left is free
        free, sharers, where = torch.cuda.mem_get_info(device)[0], len(world.gpu_mates), "GPU"
    needed = loop.needed_nbytes(case, operation, element) * sharers
    if free is not None and needed > 0.9 * free:
        where = f"the {sharers} rank{'s' if sharers > 1 else ''} on this {where}"
        return f"{where} would need {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB is free"
    return None


def _limit(asked: Options, backend: Backend, case: Case, rates: Rates) -> Limit | None:
    """What bounds this case's bus bandwidth: the user's figure, else what was measured."""
    if asked.limit is not None:
        return _nominal(asked, case)
    one_way = OPERATIONS[case.operation].one_way(case.world_size)
    one_host = len(case.ranks_per_host) == 1
    return rates.limit(backend.transport, case.nbytes, one_way, one_host, case.group)


def _hard_limit(asked: Options, case: Case, rates: Rates) -> Limit | None:
    """What no operation can pass: the nominal rate if the user gave it, else the fastest copy."""
    if asked.limit is not None:
        return _nominal(asked, case)
    return rates.hard_limit(len(case.ranks_per_host) == 1)


def _nominal(asked: Options, case: Case) -> Limit | None:
    """The user's one figure; beside rows between hosts it is not of those inside them."""
    if asked.limit is None or (case.group == "host" and asked.groups != ("host",)):
        return None
    return Limit(asked.limit * 1e9, "--limit")


if __name__ == "__main__":
    # `-m` loads this module as `__main__`. The command imports it by name: its classes exist once.
    from ddpbench.cli import main

    sys.exit(main(["collectives", *sys.argv[1:]]))
