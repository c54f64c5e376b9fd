"""The launch loop of every measuring command: meet, agree, then measure the cases on each backend.

Each case is stored at once. A command supplies its cases and a function that measures one.
"""

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
from ddpbench.present.writers import page_file
from ddpbench.records.schema import Plan
from ddpbench.records.store import End
from ddpbench.records.terminal_text import tell
from ddpbench.runtime import control, cpu, devices, network
from ddpbench.runtime.world import Turns, World, describe_failed_connection, join_world
from ddpbench.session import launch_facts, run_folder
from ddpbench.session.recorder import Outcome
from ddpbench.session.run_options import RunOptions

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ddpbench.session.progress import Progress
    from ddpbench.session.recorder import Recorder

T = TypeVar("T", bound=RunOptions)
C = TypeVar("C")  # a command's case
Measure = Callable[[C], tuple[Outcome, dict[str, Any] | None]]  # → outcome, columns of its samples


@dataclass(frozen=True)
class LaunchContext(Generic[T]):
    """One launch on one backend, as one rank sees it."""

    world: World
    backend: Backend
    name: str  # of the backend in torch
    tested: dist.ProcessGroup  # all ranks, on the backend that is measured
    options: T
    plan: Plan
    device: torch.device
    index: int  # number of the launch in the run
    turns: Turns
    closing: ExitStack  # contexts that end with the launch


@dataclass(frozen=True)
class Work(Generic[C]):
    """The measurements of one launch."""

    cases: Sequence[C]
    phase: Callable[[C], str]  # describes a case, for the message if it hangs
    # Called once the launch is recorded. Returns a function that measures one case on all ranks.
    begin: Callable[[Recorder, Progress], Measure[C]]
    facts: dict[str, object] = field(default_factory=dict)  # of the launch, from the command


Prepare = Callable[[LaunchContext[T]], Work[Any]]


def run(options: T, placement: Placement, prepare: Prepare[T]) -> int:
    """Run one rank's part: meet, agree, measure on each backend. Return the exit code."""
    from ddpbench.session import run_end

    if placement.rank == 0:
        for name in ("scipy.special", "pyarrow.parquet"):  # slow imports, before the others wait
            import_module(name)
    with join_world(placement, options.rendezvous(), options.share_gpu) as world:
        options_of_ranks = control.gather_values(world, options.named())
        if (sentence := control.find_differing_option(options_of_ranks)) is not None:
            raise Refused(sentence)
        if options.report and options.join is None:  # else who started the ranks has checked it
            own = page_file.explain_missing("--report") if world.rank == 0 else None
            if (sentence := control.agree_objection(world, own)) is not None:
                raise Refused(sentence)
        folder, plan = run_folder.broadcast_run_folder(world, options)
        world.watchdog.on_end = lambda *end: run_end.mark(folder, *end)
        end = None
        for index, name in enumerate(options.backend, options.launch):
            try:
                backend = backends.get(name)
                failure = _measure(world, backend, options, plan, prepare, index=index, run=folder)
            except Refused as error:
                if placement.rank == 0 and options.join is None and not run_end.discard(folder):
                    # Mark it first: the launcher may end this rank once another one has left.
                    run_end.mark(folder, "failed", str(error), 2)
                    run_end.finish(folder, options)
                raise
            if failure is not None:
                end = End("failed", failure, 5)
            elif (signal := control.agree_objection(world, world.interrupted)) is not None:
                end = run_end.interrupted(signal)
                world.watchdog.expect_signal()
            if end is not None:
                break
        code = None
        if end is not None and (options.join is not None or end.code != 130):
            # A launcher may end all ranks once one has failed. So rank 0 reports a failure before
            # any rank leaves.
            world.watchdog.begin_phase("the report of the failure")
            code = _report(options, folder, end) if placement.rank == 0 else end.code
            control.barrier_all()
    if code is None and placement.rank == 0:
        code = _report(options, folder, end)
    return code if code is not None else end.code if end else 0


def _report(options: RunOptions, folder: Path, end: End | None) -> int:
    """Finish the run in rank 0, or mark a run that this launch has joined. Return the exit code."""
    from ddpbench.session import run_end

    if options.join is None:
        return run_end.finish(folder, options, end)
    if end is None:
        return 0
    run_end.mark(folder, end.state, end.reason or "", end.code)
    if end.code == 5:
        tell(end.reason or "")
    return end.code


def _measure(
    world: World,
    backend: Backend,
    options: T,
    plan: Plan,
    prepare: Prepare[T],
    *,
    index: int,
    run: Path,
) -> str | None:
    """Connect, record the launch in the folder `run`, and measure its cases.

    Returns, in every rank, why results can no longer be stored; None if they can.
    """
    from ddpbench.measure import clock
    from ddpbench.session.progress import Progress
    from ddpbench.session.recorder import Recorder

    device = world.agree_device(options.device)
    with ExitStack() as closing:
        name = agree_torch_name(world, backend)
        tested = closing.enter_context(world.agree_group(name, device=device))
        barrier_to_connect(world, backend, tested, device)
        began, meter = time.monotonic(), cpu.CpuMeter()
        # The memory of a GPU may not hold both sides.
        shared = options.paced is not None and devices.of(device).memory == "host"
        turns = Turns(world, options.open_turn() if shared and world.rank == 0 else None, shared)
        context = LaunchContext(
            world, backend, name, tested, options, plan, device, index, turns, closing
        )
        work = prepare(context)
        used, count = control.broadcast_value(world, clock.properties()), len(work.cases)
        launch = launch_facts.gather_launch_record(
            world, backend, options.device, index=index, clock=used, facts=work.facts, cases=count
        )
        recorder = Recorder(launch, run if world.rank == 0 else None)
        shown = world.rank == 0 and options.shows_progress
        progress = Progress(backend.name, count, shown)
        failure = _measure_cases(world, work, recorder, progress)
        usage = launch_facts.gather_usage(world, meter)
        progress.stop()
        recorder.close(time.monotonic() - began, usage)
    return failure


def _measure_cases(
    world: World, work: Work[C], recorder: Recorder, progress: Progress
) -> str | None:
    """Measure each case and store it at once. Return why results can no longer be stored."""
    measure = work.begin(recorder, progress)
    for case in work.cases:
        if control.agree_objection(world, world.interrupted) is not None:
            return None
        world.watchdog.begin_phase(work.phase(case))
        recorder.add(*measure(case))
        progress.advance(1)
        failure = control.broadcast_value(world, recorder.failure)
        if failure is not None:
            return str(failure)
    return None


def agree_torch_name(world: World, backend: Backend) -> str:
    """Return the backend's name in torch.

    Raises Refused in all ranks together if the backend's own launcher did not start them.
    """
    name = backend.register() if backend.register else backend.name
    size, objection = backend.size(), None
    if backend.interfaces:
        objection = network.check_nccl_interface(backend.interfaces, len(world.hosts) > 1)
    if size is not None and size != world.world_size:
        objection = (
            f"{backend.name} sees a world size of {size}, not {world.world_size}: start the ranks "
            f"with the mpirun of {backend.library()}, or with srun --mpi=pmix (Open MPI) or "
            "--mpi=pmi2 (MPICH)"
        )
    if (sentence := control.agree_objection(world, objection)) is not None:
        raise Refused(sentence)
    return name


def barrier_to_connect(
    world: World, backend: Backend, tested: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Call one barrier, so that the first case does not include the time to connect.

    All ranks call it. `tested` is None in a rank that is not in the group.
    """
    from ddpbench.measure import start

    objection = None
    try:
        if tested is not None:
            start.barrier(tested, device)()
    except RuntimeError as error:
        objection = describe_failed_connection(backend.name, error)
    if (sentence := control.agree_objection(world, objection)) is not None:
        raise Refused(sentence)
