"""What every collective costs: a sweep of operations × sizes × dtypes on one or more backends.

python -m ddpbench collectives --backend gloo,mpi -n 2      starts the ranks itself
torchrun --nproc-per-node 4 -m ddpbench.collectives --op all_reduce --sizes 4:64M:x4
mpirun -n 4 python -m ddpbench.collectives --backend mpi
srun -n 4 python -m ddpbench.collectives
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ddpbench import options
from ddpbench.catalog import backends
from ddpbench.catalog.backends import Backend
from ddpbench.catalog.dtypes import DTYPES, REDUCE_OPS
from ddpbench.catalog.operations import OPERATIONS, Operation
from ddpbench.catalog.sizes import SYNTAX, parse, readable, whole
from ddpbench.records import store
from ddpbench.records.schema import Case, Launch, Limit, Plan, Result, Run
from ddpbench.runtime import agree, cpu, environment, group
from ddpbench.runtime.group import Group, Rendezvous
from ddpbench.runtime.launch import Placement, Refused

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ddpbench.measure.calibrate import Rates

HELP = "what every collective costs, over backends, sizes and dtypes"
DEFAULT_SIZES = {"cpu": "4:64M:x4", "cuda": "8:1G:x4"}


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked; None: the default depends on device or launcher."""

    op: tuple[str, ...]
    sizes: tuple[int, ...] | None
    dtype: tuple[str, ...]
    reduce_op: tuple[str, ...]
    form: tuple[str, ...]
    place: tuple[str, ...]
    root: int
    async_op: bool
    backend: tuple[str, ...]
    device: str
    nproc: int | None
    modules: tuple[str, ...]
    share_gpu: bool
    init_method: str | None
    master_addr: str | None
    master_port: int | None
    timeout: float
    issue: str
    depth: int
    start: str
    launches: int
    precision: float
    slice: float
    no_check: bool
    limit: float | None
    seed: int | None
    format: str
    columns: tuple[str, ...] | None
    quiet: bool
    output: str | None
    join: str | None
    launch: int
    progress: bool

    def plan(self, seed: int) -> Plan:
        """The protocol as it is stored with the run."""
        return Plan(
            issue=self.issue,
            start="none" if self.issue == "pipelined" else self.start,
            depth=self.depth,
            precision=self.precision / 100,
            slice_seconds=self.slice,
            check=not self.no_check,
            timeout_seconds=self.timeout,
            seed=seed,
        )

    def rendezvous(self) -> Rendezvous:
        """How the ranks meet; a file serves one launch only."""
        method = self.init_method
        if method and method.startswith("file://") and self.join is not None:
            method = f"{method}.{self.launch}"
        return Rendezvous(method, self.master_addr, self.master_port, self.timeout)

    def named(self) -> dict[str, object]:
        """What must be the same in all ranks, by the names of the options."""
        names = {"async_op": "async", "modules": "import"}
        return {names.get(k, k.replace("_", "-")): v for k, v in asdict(self).items()}


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
    add("--root", type=options.whole(0), default=0, help="rank of rooted operations; default 0")
    add("--async", dest="async_op", action="store_true", help="call with async_op=True, then wait")
    options.add_where(parser)
    options.add_how(parser)
    options.add_shown(parser)
    options.add_stored(parser)


def run(asked: Options, place: Placement) -> int:
    """One rank's part of a sweep: meet, agree, measure each backend; the exit code."""
    from ddpbench import book

    if place.rank == 0:
        for name in ("scipy.stats", "pyarrow.parquet"):  # slow: not while the others wait
            import_module(name)
    with group.opened(place, asked.rendezvous(), asked.share_gpu) as ranks:
        agree.require_same_options(ranks, asked.named())
        folder, plan = _folder(ranks, asked)
        ranks.watchdog.on_end = lambda *end: book.mark(folder, *end)
        end = None
        for number, name in enumerate(asked.backend):
            failure = sweep(ranks, backends.get(name), asked, plan, folder, asked.launch + number)
            if failure is not None:
                end = book.End("failed", failure, 5)
            elif agree.first_objection(ranks, ranks.interrupted) is not None:
                end = book.INTERRUPTED
            if end is not None:
                break
    if place.rank == 0 and asked.join is None:
        return book.finish(folder, asked.format, asked.columns, asked.quiet, end)
    if place.rank == 0 and end is not None:
        book.mark(folder, end.state, end.reason or "", end.code)
        if end.code == 5:
            sys.stderr.write(f"ddpbench: {end.reason}\n")
    return end.code if end else 0


def sweep(
    ranks: Group, backend: Backend, asked: Options, plan: Plan, folder: Path, index: int
) -> str | None:
    """Measure all cases on one backend, in shuffled order, each stored as soon as it is there.

    Returns, in every rank, why the results can no longer be stored; None when all went well.
    """
    from ddpbench import book
    from ddpbench.measure import calibrate, clock, loop, pace

    device = ranks.device(asked.device)
    with ranks.tested(_torch_name(ranks, backend)) as tested:
        _connect(ranks, backend, tested)
        began, whole = time.monotonic(), cpu.CpuMeter()
        loop.settle()
        wanted = list(cases(asked, backend, plan, ranks))
        random.Random(f"{plan.seed}/{index}").shuffle(wanted)
        times = agree.from_rank_0(ranks, clock.properties())
        ranks.watchdog.phase("the calibration of limits")
        on_cpu = device.type == "cpu" and asked.limit is None
        sizes = {case.nbytes for case, _ in wanted} if on_cpu else set()
        rates = calibrate.rates(ranks, sizes, streams=on_cpu)
        launch = _launch(ranks, backend, asked.device, index, times, rates, len(wanted))
        record = book.Book(ranks, folder, launch)
        if not asked.quiet and (asked.progress or sys.stderr.isatty()):
            record.expect(len(wanted))
        failure = share = None
        meter = cpu.CpuMeter()
        for number, (case, requested) in enumerate(wanted):
            if agree.first_objection(ranks, ranks.interrupted) is not None:
                break
            operation = OPERATIONS[case.operation]
            ranks.watchdog.phase(
                f"case {number + 1} of {len(wanted)}: {case.operation} "
                f"{readable(case.nbytes)} on {backend.name}"
            )
            started = time.monotonic()
            objection = _objection(case, operation, plan, ranks, device)
            samples = pace.measure(
                case, operation, plan, ranks, tested, device,
                clock.shortest_seconds(times), objection,
            )  # fmt: skip
            resolved = _others_share(ranks, meter)
            if resolved is not None:  # else the case is too short to tell, and the next adds to it
                meter, share = cpu.CpuMeter(), resolved
            result = Result(
                case=case,
                launch=index,
                bus_factor=operation.bus_factor(case.world_size),
                least_nbytes=operation.least_nbytes(case),
                requested_nbytes=requested,
                reason=samples.objection,
                wrong=tuple(pace.everyones_wrong(ranks, samples)),
                others_share=share,
                limit=_limit(asked, backend, case, rates, ranks),
                hard_limit=_hard_limit(asked, rates, ranks),
                wall_seconds=time.monotonic() - started,
            )
            record.add(result, samples)
            failure = agree.from_rank_0(ranks, record.failure)
            if failure is not None or samples.stop_reason == "interrupted":
                break
        used = {"cpu": asdict(whole.stop()), "gpu_after": environment.gpu_state()}
        record.close(time.monotonic() - began, agree.everyones(ranks, used))
    return failure


def cases(asked: Options, backend: Backend, plan: Plan, ranks: Group) -> Iterator[tuple[Case, int]]:
    """All cases of a sweep on one backend, each with the size that was asked for."""
    from ddpbench.measure import loop

    n = ranks.world_size
    sizes = asked.sizes or parse(DEFAULT_SIZES[asked.device])
    for name in asked.op:
        operation = OPERATIONS[name]
        seen = set()
        for form, place, dtype, reduce_op, nbytes in itertools.product(
            [form for form in asked.form if form in operation.forms] or operation.forms[:1],
            [place for place in asked.place if place in operation.places] or operation.places[:1],
            asked.dtype if operation.sized else ("uint8",),
            asked.reduce_op if operation.reduces else (None,),
            sizes if operation.sized else (0,),
        ):
            blocks = n if operation.blocks else 1
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
                world_size=n,
                ranks_per_host=tuple(len(host) for host in ranks.hosts.values()),
                clock="device" if asked.device == "cuda" else "host",
            )
            if case not in seen:
                seen.add(case)
                yield case, nbytes


def _folder(ranks: Group, asked: Options) -> tuple[Path, Plan]:
    """The run's folder, made by rank 0 unless it exists already, and its plan."""
    found: dict[str, object] = {}
    if ranks.rank == 0:
        try:
            folder = (
                Path(asked.join) if asked.join else new_run(asked, len(ranks.who), sys.argv[1:])
            )
            found = {"folder": str(folder.resolve()), "seed": store.read(folder).plan.seed}
        except (OSError, store.InvalidRun) as error:
            found = {"error": cannot_write(error)}
    found = agree.from_rank_0(ranks, found)
    if "error" in found:
        raise Refused(str(found["error"]))
    return Path(str(found["folder"])), asked.plan(int(str(found["seed"])))


def new_run(asked: Options, world_size: int, words: Sequence[str]) -> Path:
    """Make the folder of a new run that `words` asked for. Raises OSError when it cannot."""
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    record = Run(
        id="",
        command="collectives",
        command_line=("ddpbench", "collectives", *words),
        plan=asked.plan(seed),
        started=store.now(),
        operations=asked.op,
        backends=asked.backend,
    )
    label = f"collectives-{'+'.join(asked.backend)}-w{world_size}"
    return store.create(Path(asked.output) if asked.output else None, record, label)


def cannot_write(error: Exception) -> str:
    """The sentence for a results folder that cannot be made."""
    if isinstance(error, OSError) and error.strerror:
        return (
            f"results cannot be written to {error.filename} ({error.strerror}): "
            "name a folder that can with --output"
        )
    return str(error)


def _torch_name(ranks: Group, backend: Backend) -> str:
    """The name by which torch knows the backend. Refused in all ranks together where the
    backend's own launcher did not start them."""
    name = backend.register() if backend.register else backend.name
    size, objection = backend.size(), None
    if size is not None and size != ranks.world_size:
        objection = (
            f"{backend.name} sees a world of {size}, not of {ranks.world_size} ranks: start them "
            f"with the mpirun of {backend.library()}, or with srun and the --mpi that it knows "
            "(pmix for Open MPI, pmi2 for MPICH)"
        )
    if (sentence := agree.first_objection(ranks, objection)) is not None:
        raise Refused(sentence)
    return name


def _connect(ranks: Group, backend: Backend, tested: dist.ProcessGroup) -> None:
    """One barrier, so that connections made at the first call are no part of the first case."""
    import torch.distributed as dist

    objection = None
    try:
        dist.barrier(group=tested)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no text"]
        objection = f"{backend.name} cannot connect its ranks: {lines[0]} {lines[-1]}"
    if (sentence := agree.first_objection(ranks, objection)) is not None:
        raise Refused(sentence)


def _launch(
    ranks: Group,
    backend: Backend,
    device: str,
    index: int,
    times: dict[str, float],
    rates: Rates,
    cases: int,
) -> Launch:
    """Who runs where, for the record; every rank tells its own part."""
    mine = {
        **environment.rank_facts(),
        "interface": environment.interface_of(ranks.address),
        "gpu_before": environment.gpu_state(),
    }
    everyone = agree.everyones(ranks, mine)
    facts = {**environment.run_facts(), "rates": asdict(rates)} if ranks.rank == 0 else {}
    return Launch(
        index=index,
        backend=backend.name,
        provider=backend.provider(device),
        library=backend.library(),
        launcher=ranks.place.launcher,
        world_size=ranks.world_size,
        facts=facts,
        ranks=tuple(everyone),
        clock=times,
        started=store.now(),
        cases=cases,
    )


def _objection(
    case: Case, operation: Operation, plan: Plan, ranks: Group, device: torch.device
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
    free, sharers, where = environment.free_memory_nbytes(), len(ranks.neighbours), "host"
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # what earlier cases left is free
        free, sharers, where = torch.cuda.mem_get_info(device)[0], len(ranks.gpu_mates), "GPU"
    needed = loop.needed_nbytes(case, operation, element) * sharers
    if free is not None and needed > 0.9 * free:
        where = f"the {sharers} rank{'s' if sharers > 1 else ''} on this {where}"
        return f"{where} would need {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB is free"
    return None


def _others_share(ranks: Group, meter: cpu.CpuMeter) -> float | None:
    """The largest share of a host's cores that other processes used, over the hosts."""
    used = meter.stop()
    mine = [used.own_seconds, used.host_busy_seconds, used.wall_seconds]
    everyone = agree.everyones(ranks, mine)
    shares = []
    for members in ranks.machines.values():
        _, busy, wall = everyone[members[0]]
        own = [everyone[rank][0] for rank in members]
        shares.append(cpu.others_share(busy, own, wall, psutil.cpu_count() or 1))
    return max((share for share in shares if share is not None), default=None)


def _limit(
    asked: Options, backend: Backend, case: Case, rates: Rates, ranks: Group
) -> Limit | None:
    """What bounds this case's bus bandwidth: the user's figure, else what was measured."""
    if asked.limit is not None:
        return Limit(asked.limit * 1e9, "--limit")
    one_way = OPERATIONS[case.operation].one_way(case.world_size)
    return rates.limit(backend.transport, case.nbytes, one_way, len(ranks.hosts) == 1)


def _hard_limit(asked: Options, rates: Rates, ranks: Group) -> Limit | None:
    """What no operation can pass: the nominal rate if the user gave it, else the fastest copy."""
    if asked.limit is not None:
        return Limit(asked.limit * 1e9, "--limit")
    return rates.hard_limit(len(ranks.hosts) == 1)


if __name__ == "__main__":
    # This module a second time, under its own name: what it defines exists once there.
    from ddpbench.cli import main

    sys.exit(main(["collectives", *sys.argv[1:]]))
