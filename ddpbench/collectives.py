"""Measure what every collective costs: a sweep of operations × sizes × dtypes × backends.

ddpbench collectives --backend gloo,mpi -n 2      starts the ranks itself
torchrun --nproc-per-node 4 -m ddpbench.collectives --op all_reduce --sizes 4:64M:x4
mpirun -n 4 python -m ddpbench.collectives --backend mpi
srun -n 4 python -m ddpbench.collectives
srun -N 2 -n 8 python -m ddpbench.collectives --groups host,cross,world
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddpbench.catalog import sizes
from ddpbench.catalog.backends import Backend
from ddpbench.catalog.dtypes import DTYPES
from ddpbench.catalog.operations import OPERATIONS, Operation
from ddpbench.records.schema import (
    EVENTS,
    EXIT_ENTRY,
    HIDDEN_LAUNCH,
    TWO_STREAMS,
    Case,
    Limit,
    Plan,
    Result,
)
from ddpbench.runtime import control, cpu, devices
from ddpbench.runtime.subgroups import Partition
from ddpbench.runtime.world import World
from ddpbench.session import launches
from ddpbench.session.launches import LaunchContext
from ddpbench.session.recorder import Recorder
from ddpbench.session.sweep_options import Options as Options
from ddpbench.session.sweep_options import add_arguments as add_arguments

if TYPE_CHECKING:
    import torch

    from ddpbench.measure import repetitions
    from ddpbench.measure.host_limits import Rates
    from ddpbench.runtime.subgroups import Subgroup

GROUP = "measure"
HELP = "measure what every collective costs, over backends, sizes and dtypes"
IMPORTS = True
Requested = tuple[Case, int]  # a case, and the bytes that the user requested
Links = dict[tuple[str, str], "Limit | None"]  # (partition, operation) → limit of the GPUs' links


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure all launches, or this rank's part of one; return the exit code. Raises Refused."""
    return launches.run(Options, measure_launch, namespace, words)


def measure_launch(context: LaunchContext[Options]) -> Recorder:
    """Measure the cases of one launch in random order, in all ranks together."""
    from ddpbench.measure import host_limits, loop, start

    world, options, plan = context.world, context.options, context.plan
    subgroups = context.closing.enter_context(
        world.agree_subgroups(context.name, context.tested, options.groups, context.device)
    )
    for subgroup in subgroups.values():
        start.barrier_to_connect(world, context.backend, subgroup.group, context.device)
    loop.settle()
    partitions = [subgroup.partition for subgroup in subgroups.values()]
    cases = list_cases(options, context.backend, plan, partitions)
    random.Random(f"{plan.seed}/{context.index}").shuffle(cases)
    world.watchdog.begin_phase("the calibration of limits")
    rates = host_limits.Rates()
    if options.peak_bandwidth is None:
        copied = {case.nbytes for case, _ in cases}
        rates = host_limits.measure_rates(world, context.device, copied, partitions)
    recorder = context.gather_recorder(len(cases), rates=asdict(rates))
    sweep = Sweep(context, subgroups, rates, recorder)

    def describe(numbered: tuple[int, Requested]) -> str:
        number, (case, _) = numbered
        size = sizes.readable(case.nbytes)
        return f"case {number} of {len(cases)}: {case.called} {size} on {case.backend}"

    for _, requested in recorder.agree_cases([*enumerate(cases, 1)], describe):
        recorder.add(*sweep.measure(*requested))
    return recorder


class Sweep:
    """The cases of one launch, measured one by one in all ranks together."""

    def __init__(
        self,
        context: LaunchContext[Options],
        subgroups: Mapping[str, Subgroup],
        rates: Rates,
        recorder: Recorder,
    ) -> None:
        from ddpbench.measure import clock, offsets
        from ddpbench.measure.host_limits import agree_handoff
        from ddpbench.measure.link_limits import derive_limit

        self.context, self.subgroups, self.recorder = context, subgroups, recorder
        hosts, ranks = list(context.world.hosts.values()), recorder.launch.ranks
        self.rates = rates
        # Limits of the GPUs' links, by partition and operation.
        self.links: Links = {}
        used = [rank["gpu_uuid"] for rank in ranks if rank.get("gpu_uuid")]
        if context.backend.transport == "links" and len(set(used)) == len(used):
            self.links = {
                (name, op): derive_limit(ranks, hosts, subgroup.partition, OPERATIONS[op])
                for name, subgroup in subgroups.items()
                for op in context.options.op
            }
        self.clocks = context.closing.enter_context(
            offsets.open_clocks(context.world, recorder.launch.ranks)
        )
        kind = devices.of(context.device)
        self.measure_handoff = agree_handoff(context.world) if kind.memory == "host" else None
        self.shortest_seconds = max(
            clock.shortest_seconds(recorder.launch.clock), clock.STEPS * kind.event_step_seconds
        )
        self.meter = cpu.CpuMeter()
        self.others_share: float | None = None  # of the cores, used by other processes

    def measure(self, case: Case, requested_nbytes: int) -> tuple[Result, dict[str, Any] | None]:
        """Measure one case. Return its result and, in rank 0, the columns of its samples."""
        from ddpbench.measure import repetitions

        context, started = self.context, time.monotonic()
        world, options, plan = context.world, context.options, context.plan
        operation, subgroup = OPERATIONS[case.operation], self.subgroups[case.group]
        objection = subgroup.partition.objection or _objection(case, world, context.device)
        samples = repetitions.measure(
            case,
            plan,
            world,
            subgroup,
            context.device,
            shortest_seconds=self.shortest_seconds,
            objection=objection,
            ahead_ns=self.clocks.ahead_ns,
        )
        clock_off_seconds = self.clocks.compare_again(subgroup.partition.subgroups)
        facts = self._gather_facts(samples)
        limit, hard_limit = _limits(options, context.backend, case, self.rates, self.links)
        result = Result(
            case=case,
            launch=context.index,
            bus_factor=operation.bus_factor(case.world_size),
            least_nbytes=operation.least_nbytes(case),
            requested_nbytes=requested_nbytes,
            reason=samples.objection,
            wrong=tuple(repetitions.gather_wrong(world, samples)),
            **facts,
            limit=limit,
            hard_limit=hard_limit,
            wall_seconds=time.monotonic() - started,
        )
        self.recorder.add_clocks(self.clocks)
        return repetitions.summarise_result(result, samples, clock_off_seconds)

    def _gather_facts(self, samples: repetitions.Samples) -> dict[str, Any]:
        """Gather the greatest of each rank's facts on a case."""
        world = self.context.world
        others_share = world.agree_others_share(self.meter)
        if others_share is not None:  # else the case was too short: go on measuring in the next one
            self.meter, self.others_share = cpu.CpuMeter(), others_share
        own = {
            "page_faults": samples.page_faults,
            "handoff_seconds": self.measure_handoff() if self.measure_handoff else None,
            "unhidden_share": samples.unhidden_share,
        }
        ranks = control.gather_values(world, own)
        known = {name: [rank[name] for rank in ranks if rank[name] is not None] for name in own}
        facts = {name: max(values, default=None) for name, values in known.items()}
        return {**facts, "others_share": self.others_share}


def list_cases(
    options: Options, backend: Backend, plan: Plan, partitions: Sequence[Partition]
) -> list[Requested]:
    """List the cases of a sweep on one backend, each once, with the size that was requested."""
    requested = options.sizes or sizes.default_sizes(
        backend.name, devices.get(options.device).defaults
    )
    cases: dict[Case, int] = {}
    for name in options.op:
        operation = OPERATIONS[name]
        variants = itertools.product(
            partitions,
            [form for form in options.form if form in operation.forms] or operation.forms[:1],
            [place for place in options.place if place in operation.places] or operation.places[:1],
            (options.dtype or ("float32",)) if operation.sized else ("uint8",),
            (options.reduce_op or ("sum",)) if operation.reduces else (None,),
            requested if operation.sized else (0,),
        )
        for variant in variants:
            cases.setdefault(_case(options, backend, plan, operation, variant), variant[-1])
    return list(cases.items())


def _case(
    options: Options,
    backend: Backend,
    plan: Plan,
    operation: Operation,
    variant: tuple[Partition, str, str, str, str | None, int],
) -> Case:
    from ddpbench.measure import loop

    partition, form, place, dtype, reduce_op, nbytes = variant
    blocks = partition.size if operation.blocks else 1
    total, count = sizes.round_to_blocks(nbytes, DTYPES[dtype].nbytes, blocks) if nbytes else (0, 0)
    pipelined = plan.issue == "pipelined"
    return Case(
        operation=operation.name,
        form=form,
        backend=backend.name,
        provider=backend.provider(options.device),
        device=options.device,
        dtype=dtype,
        reduce_op=reduce_op,
        root=0 if operation.rooted else None,
        nbytes=total,
        count=count,
        in_place=place == "in",
        async_op=(options.async_op or pipelined) and not operation.paired,
        issue=plan.issue,
        start=plan.start,
        depth=loop.pipeline_depth(total, plan) if pipelined else 1,
        world_size=partition.size,
        ranks_per_host=partition.ranks_per_host,
        time_definition=_time_definition(options, backend, operation),
        clock=devices.get(options.device).clock,
        group=partition.name,
        groups=len(partition.subgroups),
    )


def _time_definition(options: Options, backend: Backend, operation: Operation) -> str:
    """Return the definition of the operation's time.

    A kernel launch can be hidden only if the call returns before the device has begun. In some
    versions of torch, a barrier does not. Sends and receives run on a stream of their own.
    """
    kind = devices.get(options.device)
    if kind.clock == "host":
        return EXIT_ENTRY
    alone = options.mode == "isolated" and not options.async_op
    hides = backend.in_stream and operation.sized
    if not (alone and hides):
        return EVENTS
    return TWO_STREAMS if operation.paired else HIDDEN_LAUNCH


def _objection(case: Case, world: World, device: torch.device) -> str | None:
    """Return why this rank cannot measure the case, before it allocates anything."""
    from ddpbench.measure import loop, memory

    operation = OPERATIONS[case.operation]
    if operation.paired and case.world_size < 2:
        return f"{case.operation} needs two ranks"
    if operation.paired and case.issue == "pipelined":
        return f"{case.operation} can only be measured with --mode isolated"
    kind = devices.of(device)
    if operation.paired and case.backend == "gloo" and kind.memory != "host":
        return "gloo sends and receives CPU tensors only"
    kind.release_memory()  # of earlier cases
    needed = loop.needed_nbytes(case, operation, DTYPES[case.dtype].nbytes)
    return memory.explain_too_large(world, device, needed)


def _limits(
    options: Options, backend: Backend, case: Case, rates: Rates, links: Links
) -> tuple[Limit | None, Limit | None]:
    """Return the limit of this case's bus bandwidth, and the limit of any operation.

    --peak-bandwidth sets both, but not inside a host if cases between hosts are measured, too.
    """
    if options.peak_bandwidth is not None:
        applies = case.group != "host" or options.groups == ("host",)
        limit = Limit(options.peak_bandwidth * 1e9, "--peak-bandwidth") if applies else None
        return limit, limit
    one_host = len(case.ranks_per_host) == 1
    fastest_copy = rates.hard_limit(one_host)
    if backend.transport == "links":
        return links.get((case.group, case.operation)), fastest_copy
    one_way = OPERATIONS[case.operation].one_way(case.world_size)
    limit = rates.limit(backend.transport, case.nbytes, one_way, one_host, case.group)
    return limit, fastest_copy


if __name__ == "__main__":
    # `-m` loads this module as `__main__`. Import it by name so that its classes exist only once.
    from ddpbench.cli import main

    sys.exit(main(["collectives", *sys.argv[1:]]))
