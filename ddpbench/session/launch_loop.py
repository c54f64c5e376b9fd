"""The launch loop of every measuring command: meet, agree, then measure the cases on each backend.

A command supplies one function: it takes a LaunchContext, prepares the cases of a launch, opens a
Recorder and measures each case. The recorder stores each case at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpbench.catalog import backends
from ddpbench.catalog.backends import Backend
from ddpbench.launch.placement import Placement, Refused
from ddpbench.measure.start import barrier_to_connect
from ddpbench.present.progress import Progress
from ddpbench.records import codec, redact, store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Examination, Plan, Result, StepResult
from ddpbench.records.store import End
from ddpbench.records.terminal_text import tell
from ddpbench.runtime import control, environment, gpu_facts
from ddpbench.runtime.world import World, join_world
from ddpbench.session import run_folder
from ddpbench.session.options import RunOptions, T, resolve

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ddpbench.measure.offsets import Clocks

C = TypeVar("C")  # a command's case
Outcome = Result | StepResult | Examination
# The part of a run that holds each kind of outcome.
PARTS = {Result: "results", StepResult: "steps", Examination: "examinations"}


@dataclass(frozen=True)
class LaunchContext(Generic[T]):
    """One launch on one backend, as one rank sees it."""

    world: World
    backend: Backend
    name: str  # of the backend in torch
    tested: dist.ProcessGroup  # all ranks, on the backend that is measured
    options: T
    plan: Plan
    folder: Path  # of the run
    device: torch.device
    index: int  # number of the launch in the run
    closing: ExitStack  # contexts that end with the launch

    def gather_recorder(self, cases: int, **facts: object) -> Recorder:
        """Record the launch of all ranks, and return the recorder of its cases.

        facts: the command's, stored with those of the environment.
        """
        from ddpbench.measure import clock

        world, backend = self.world, self.backend
        launch = Launch(
            index=self.index,
            backend=backend.name,
            provider=backend.provider(self.options.device),
            library=backend.library(),
            launcher=world.placement.launcher,
            world_size=world.world_size,
            clock=control.broadcast_value(world, clock.measure_clock()),
            ranks=tuple(_gather_rank_facts(world)),
            facts={**environment.run_facts(), **facts} if world.rank == 0 else {},
            started=store.format_now(),
            cases=cases,
        )
        return Recorder(self, launch)


def _gather_rank_facts(world: World) -> list[dict[str, Any]]:
    """Gather where each rank runs, once its backend has connected."""
    addresses = world.addresses
    facts = {
        **environment.rank_facts(),
        "interface": environment.interface_of(next(iter(addresses), world.address)),
        "addresses": addresses,
        "gpu_before": gpu_facts.gpu_state(),
    }
    return control.gather_values(world, facts)


Measure = Callable[[LaunchContext[T]], "Recorder"]  # measures a launch and returns its recorder


class Recorder:
    """The record of a launch. Rank 0 stores it after every case; other ranks store nothing."""

    def __init__(self, context: LaunchContext[Any], launch: Launch) -> None:
        self.launch, self._world = launch, context.world
        self.failure: str | None = None  # why nothing more can be stored
        self._folder = context.folder if self._world.rank == 0 else None
        shown = self._world.rank == 0 and not context.options.quiet and sys.stderr.isatty()
        self.progress = Progress(context.backend.name, launch.cases, shown)
        if self._folder is not None:
            grows = (self._folder / store.GROWING).exists()  # earlier launches have stored cases
            self._part = len(store.read(self._folder).everything) if grows else 0
            hosts = {str(rank.get("hostname") or "") for rank in launch.ranks} - {""}
            owner = redact.owner()
            self._owner = replace(owner, hosts=(*owner.hosts, *sorted(hosts)))
            self._add_launch(launch)

    def agree_cases(self, cases: Iterable[C], describe: Callable[[C], str]) -> Iterator[C]:
        """Yield each case in all ranks, until a signal comes or results cannot be stored.

        describe: names what is measured, for the message if it hangs. Measure and `add` the case
        before the next one. At the end, stores when the launch ended.
        """
        for case in cases:
            if control.agree_objection(self._world, self._world.interrupted) is not None:
                break
            self._world.watchdog.begin_phase(describe(case))
            yield case
            self.progress.advance()
            self.failure = control.broadcast_value(self._world, self.failure)
            if self.failure is not None:
                break
        self.progress.close()
        if self._folder is not None and self.failure is None:
            self._add_launch(replace(self.launch, ended=store.format_now()))

    def add(self, outcome: Outcome, columns: dict[str, Any] | None = None) -> None:
        """Store one case, and its raw samples if there are any."""
        if self._folder is None:
            return
        try:
            if columns is not None:
                store.add_samples(self._folder, self._part, columns)
            self._append(PARTS[type(outcome)], outcome, number=self._part)
        except OSError as error:
            self.failure = (
                f"cannot write more results to {self._folder} ({error.strerror}): "
                f"{self._part} cases are kept"
            )
        self._part += 1

    def add_clocks(self, clocks: Clocks) -> None:
        """Store the latest comparison of the clocks."""
        objection = {"clocks": clocks.objection} if clocks.objection else {}
        facts = {**self.launch.facts, **objection}
        launch = replace(self.launch, offsets=clocks.offsets, facts=facts)
        if self._folder is not None and launch != self.launch:
            self._add_launch(launch)

    def _add_launch(self, launch: Launch) -> None:
        self.launch = launch
        with contextlib.suppress(OSError):  # a full disk is reported with the next outcome
            self._append("launches", launch)

    def _append(self, part: str, record: Any, **more: int) -> None:
        assert self._folder is not None
        line = {**more, part: codec.to_plain(record)}
        store.append(self._folder, redact.record(line, self._owner))


def run(options: T, placement: Placement, measure: Measure[T]) -> int:
    """Run one rank's part: meet, agree, measure on each backend. Return the exit code."""
    if placement.rank == 0:
        for name in ("scipy.special", "pyarrow.parquet"):  # slow imports, before the others wait
            import_module(name)
    end, refusal, code = None, None, None
    ends = options.watchdog == "end"
    with (
        options.inject_faults(placement),
        join_world(placement, options.timeout, ends, options.share_gpu) as world,
    ):
        options = _agree_options(world, options)
        folder, plan = _broadcast_run(world, options)
        world.watchdog.on_end = lambda *end: run_folder.mark(folder, End(*end))
        for index, name in enumerate(options.backend, options.launch):
            try:
                end = _measure(
                    world, options, measure, name=name, index=index, plan=plan, folder=folder
                )
            except Refused as error:
                end, refusal = End("failed", str(error), 2), error
            if end is not None:
                break
        if end is not None and (options.join is not None or end.code != 130):
            # A launcher may end all ranks once one has failed. So rank 0 reports a failure before
            # any rank leaves.
            world.watchdog.begin_phase("the report of the failure")
            code = _report(options, folder, end) if placement.rank == 0 else end.code
            control.barrier_all()
    if refusal is not None:
        raise refusal
    if code is None and placement.rank == 0:
        code = _report(options, folder, end)
    return code if code is not None else end.code if end else 0


def _agree_options(world: World, options: T) -> T:
    """Resolve the options in all ranks that a launcher started, and compare them.

    Raises Refused in all ranks, with the ranks that lack a device or a backend, or that differ.
    """
    with control.agree_refusal(world):
        if options.join is None:
            options = resolve(options, world.placement)
    sentence = control.find_differing_option(control.gather_values(world, options.named()))
    if sentence is not None:
        raise Refused(sentence)
    return options


def _broadcast_run(world: World, options: RunOptions) -> tuple[Path, Plan]:
    """Return the run's folder and plan in all ranks. Rank 0 creates the run unless it joins one.

    Raises Refused in all ranks if it cannot be created.
    """
    value = None
    with control.agree_refusal(world):
        if world.rank == 0:
            if options.join is None:
                folder, plan = run_folder.create(options, sys.argv[1:])
            else:
                folder, plan = Path(options.join), options.plan(options.seed or 0)
            value = str(folder.resolve()), asdict(plan)
    path, protocol = control.broadcast_value(world, value)
    return Path(path), Plan(**protocol)


def _report(options: RunOptions, folder: Path, end: End | None) -> int:
    """Finish the run in rank 0, or mark a run that this launch has joined. Return the exit code."""
    if options.join is None:
        return run_folder.finish(folder, options, end)
    if end is None:
        return 0
    if end.code != 2:  # else another backend may still be measured
        run_folder.mark(folder, end)
    if end.code == 5:
        tell(end.reason or "")
    return end.code


def _measure(
    world: World,
    options: T,
    measure: Measure[T],
    *,
    name: str,
    index: int,
    plan: Plan,
    folder: Path,
) -> End | None:
    """Connect the ranks on one backend and measure its cases. Return an early end."""
    backend, device = backends.get(name), world.agree_device(options.device)
    with ExitStack() as closing:
        torch_name = _agree_torch_name(world, backend)
        tested = closing.enter_context(world.agree_group(torch_name, device=device))
        barrier_to_connect(world, backend, tested, device)
        context = LaunchContext(
            world, backend, torch_name, tested, options, plan, folder, device, index, closing
        )
        failure = measure(context).failure
    if failure is not None:
        return End("failed", failure, 5)
    signal = control.agree_objection(world, world.interrupted)
    if signal is None:
        return None
    world.watchdog.expect_signal()
    return run_folder.interrupted(signal)


def _agree_torch_name(world: World, backend: Backend) -> str:
    """Return the backend's name in torch.

    Raises Refused in all ranks together if the backend's own launcher did not start them.
    """
    name = backend.register() if backend.register else backend.name
    with control.agree_refusal(world):
        if (size := backend.size()) not in (None, world.world_size):
            raise Refused(
                f"{backend.name} sees a world size of {size}, not {world.world_size}: start the "
                f"ranks with the mpirun of {backend.library()}, or with srun --mpi=pmix (Open MPI) "
                "or --mpi=pmi2 (MPICH)"
            )
    return name
