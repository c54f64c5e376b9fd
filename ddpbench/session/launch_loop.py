"""The launch loop, the same for every measuring command: meet, agree, then on each backend record
the launch and measure its cases, each stored at once. A command says what its cases are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpbench.catalog import backends
from ddpbench.catalog.backends import Backend
from ddpbench.launch.placement import Placement, Refused
from ddpbench.records.schema import Plan
from ddpbench.records.visible import tell
from ddpbench.runtime import control, cpu, network
from ddpbench.runtime.world import World, join_world
from ddpbench.session import launch_facts, run_folder
from ddpbench.session.recorder import Outcome
from ddpbench.session.run_options import RunOptions

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ddpbench.session.progress import Progress
    from ddpbench.session.recorder import Recorder
    from ddpbench.session.run_end import End

T = TypeVar("T", bound=RunOptions)
C = TypeVar("C")  # what one case is to a command
Measure = Callable[[C], tuple[Outcome, dict[str, Any] | None]]  # the outcome, its samples' columns


@dataclass(frozen=True)
class LaunchContext(Generic[T]):
    """One launch on one backend, as one rank sees it."""

    world: World
    backend: Backend
    name: str  # by which torch knows the backend
    tested: dist.ProcessGroup  # all ranks, on that backend
    asked: T
    plan: Plan
    device: torch.device
    index: int  # the launch's number
    closing: ExitStack  # what ends with the launch


@dataclass(frozen=True)
class Work(Generic[C]):
    """What a command measures in one launch."""

    cases: Sequence[C]
    phase: Callable[[C], str]  # a case in words, for the message when it hangs
    # Called when the launch is recorded. What it returns measures one case, all ranks together.
    begin: Callable[[Recorder, Progress], Measure[C]]
    facts: dict[str, object] = field(default_factory=dict)  # of the launch, that only it knows


Prepare = Callable[[LaunchContext[T]], Work[Any]]


def run(asked: T, place: Placement, prepare: Prepare[T]) -> int:
    """One rank's part of a launch: meet, agree, measure each backend; the exit code."""
    from ddpbench.session import run_end

    if place.rank == 0:
        for name in ("scipy.special", "pyarrow.parquet"):  # slow: not while the others wait
            import_module(name)
    with join_world(place, asked.rendezvous(), asked.share_gpu) as world:
        control.agree_same_options(world, asked.named())
        folder, plan = run_folder.broadcast_run_folder(world, asked)
        world.watchdog.on_end = lambda *end: run_end.mark(folder, *end)
        end = None
        for number, name in enumerate(asked.backend):
            try:
                backend = backends.get(name)
                failure = _measure(
                    world, backend, asked, plan, asked.launch + number, folder, prepare
                )
            except Refused:
                if place.rank == 0 and asked.join is None:
                    run_end.discard(folder)
                raise
            if failure is not None:
                end = run_end.End("failed", failure, 5)
            elif (by := control.agree_objection(world, world.interrupted)) is not None:
                end = run_end.interrupted(by)
            if end is not None:
                break
        code = None
        if end is not None and (asked.join is not None or end.code != 130):
            # Whoever started the ranks may end them all when the first one fails. So rank 0 reports
            # a failure before any rank leaves.
            world.watchdog.begin_phase("the report of the failure")
            code = _report(asked, folder, end) if place.rank == 0 else end.code
            control.barrier_all()
    if code is None and place.rank == 0:
        code = _report(asked, folder, end)
    return code if code is not None else end.code if end else 0


def _report(asked: RunOptions, folder: Path, end: End | None) -> int:
    """Finish the run, or mark a run that this launch has joined, on rank 0; the exit code."""
    from ddpbench.session import run_end

    if asked.join is None:
        return run_end.finish(folder, asked.format, asked.columns, asked.quiet, end)
    if end is None:
        return 0
    run_end.mark(folder, end.state, end.reason or "", end.code)
    if end.code == 5:
        tell(end.reason or "")
    return end.code


def _measure(
    world: World, backend: Backend, asked: T, plan: Plan, index: int, folder: Path,
    prepare: Prepare[T],
) -> str | None:  # fmt: skip
    """The launch loop: connect, record the launch, measure each case and store it at once.

    Returns, in every rank, why the results can no longer be stored; None when all went well.
    """
    from ddpbench.measure import clock
    from ddpbench.session.progress import Bar, Progress
    from ddpbench.session.recorder import FileRecorder, Recorder

    device = world.agree_device(asked.device)
    with ExitStack() as closing:
        name = agree_torch_name(world, backend)
        tested = closing.enter_context(world.agree_group(name))
        barrier_to_connect(world, backend, tested)
        began, whole = time.monotonic(), cpu.CpuMeter()
        work = prepare(
            LaunchContext(world, backend, name, tested, asked, plan, device, index, closing)
        )
        times = control.broadcast_value(world, clock.properties())
        launch = launch_facts.gather_launch_record(
            world, backend, asked.device, index, times, work.facts, len(work.cases)
        )
        writes = world.rank == 0
        recorder = FileRecorder(folder, launch) if writes else Recorder(launch)
        shown = writes and asked.shows_progress
        progress = Bar(backend.name, len(work.cases)) if shown else Progress()
        measure, failure = work.begin(recorder, progress), None
        for case in work.cases:
            if control.agree_objection(world, world.interrupted) is not None:
                break
            world.watchdog.begin_phase(work.phase(case))
            recorder.add(*measure(case))
            progress.advance(1)
            failure = control.broadcast_value(world, recorder.failure)
            if failure is not None:
                break
        used = launch_facts.gather_usage(world, whole)
        progress.stop()
        recorder.close(time.monotonic() - began, used)
    return failure


def agree_torch_name(world: World, backend: Backend) -> str:
    """The name by which torch knows the backend. Refused in all ranks together where the
    backend's own launcher did not start them."""
    name = backend.register() if backend.register else backend.name
    size, objection = backend.size(), None
    if backend.interfaces:
        objection = network.check_nccl_interface(backend.interfaces, len(world.hosts) > 1)
    if size is not None and size != world.world_size:
        objection = (
            f"{backend.name} sees a world of {size}, not of {world.world_size} ranks: start them "
            f"with the mpirun of {backend.library()}, or with srun and the --mpi that it knows "
            "(pmix for Open MPI, pmi2 for MPICH)"
        )
    if (sentence := control.agree_objection(world, objection)) is not None:
        raise Refused(sentence)
    return name


def barrier_to_connect(world: World, backend: Backend, tested: dist.ProcessGroup | None) -> None:
    """One barrier, so that connections made at the first call are no part of the first case.

    All ranks call it; None: this one is not in the group.
    """
    import torch.distributed as dist

    objection = None
    try:
        if tested is not None:
            dist.barrier(group=tested)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no text"]
        objection = f"{backend.name} cannot connect its ranks: {lines[0]} {lines[-1]}"
    if (sentence := control.agree_objection(world, objection)) is not None:
        raise Refused(sentence)
