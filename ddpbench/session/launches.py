"""A measuring command from start to end: its launches in order, and the ranks of each launch.

`run` starts the ranks of each launch, which then call `run_rank`: meet, agree, measure the cases on
each backend. A command supplies one function: it takes a LaunchContext, prepares the cases of a
launch, opens a Recorder and measures each case. The recorder stores each case at once.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Generic

from ddpbench.catalog import backends
from ddpbench.catalog.backends import Backend
from ddpbench.launch import starters
from ddpbench.launch.placement import Placement, Refused, read_placement, require_world_size
from ddpbench.launch.supervise import Deadline
from ddpbench.measure.start import barrier_to_connect
from ddpbench.records import store
from ddpbench.records.launched import Launch
from ddpbench.records.schema import Plan
from ddpbench.records.store import End
from ddpbench.records.terminal_text import divert_libraries, tell
from ddpbench.runtime import control, devices, environment, gpu_facts
from ddpbench.runtime.world import World, join_world
from ddpbench.session import recorder
from ddpbench.session.errors import report_errors
from ddpbench.session.options import RunOptions, T, resolve
from ddpbench.session.recorder import Recorder

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


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

        world, backend, addresses = self.world, self.backend, self.world.addresses
        own = {
            **environment.rank_facts(),
            "interface": environment.interface_of(next(iter(addresses), world.address)),
            "addresses": addresses,
            "gpu_before": gpu_facts.gpu_state(),
        }
        launch = Launch(
            index=self.index,
            backend=backend.name,
            provider=backend.provider(self.options.device),
            library=backend.library(),
            launcher=world.placement.launcher,
            world_size=world.world_size,
            clock=control.broadcast_value(world, clock.measure_clock()),
            ranks=tuple(control.gather_values(world, own)),
            facts={**environment.run_facts(), **facts} if world.rank == 0 else {},
            started=store.format_now(),
            cases=cases,
        )
        return Recorder(world, self.folder, launch, self.options.quiet)


Measure = Callable[[LaunchContext[T]], Recorder]  # measures a launch and returns its recorder


def run(
    kind: type[T], measure: Measure[T], namespace: argparse.Namespace, words: Sequence[str]
) -> int:
    """Run this rank's part of a measuring command, or all launches; return the exit code.

    kind: the command's options. namespace: these, parsed. words: these, as typed. Raises Refused.
    """
    options = kind.of(namespace)
    placement = read_placement()
    require_world_size(options.ranks, placement)
    if placement is not None:
        divert_libraries()
        return run_rank(options, placement, measure)
    options = resolve(options, None)
    folder, plan = recorder.create(options, words)
    options = replace(options, join=str(folder), seed=plan.seed)
    end = _run_launches(options, measure, words)
    return recorder.finish(folder, options, end)


def _run_launches(options: T, measure: Measure[T], words: Sequence[str]) -> End | None:
    """Run the launches, each backend's ranks by its launcher; return an early end."""
    end = None
    failed = set[str]()  # backends; what ends or refuses one launch does so to the next
    for number, name in _order_launches(options):
        if name in failed:
            continue
        if options.paced and not sys.stdin.readline():  # no other launch is wanted
            break
        code, verdict = _start_ranks(
            replace(options, backend=(name,), launch=number), measure, words
        )
        if options.paced:
            sys.stdout.write(f"{code}\n")
            sys.stdout.flush()
        if code == 130:
            return recorder.interrupted("a signal")  # unless the ranks have reported which
        if code != 0:
            failed.add(name)
            result = "were refused" if code == 2 else f"ended with exit code {code}"
            if end is None or (end.code == 2 and code != 2):  # a rank died: worse than a refusal
                reason = verdict or f"the ranks on {name} {result}"
                end = End("failed", reason, 2 if code == 2 else 5)
    return end


def _order_launches(options: RunOptions) -> Iterator[tuple[int, str]]:
    """Yield number and backend of each launch, in randomised blocks of one launch per backend.

    The backends share whatever drifts on the machine.
    """
    order, launches = random.Random(options.seed), options.launches or 1
    for block in range(launches):
        names = list(options.backend)
        if launches > 1:
            order.shuffle(names)
        for name in names:
            yield block * len(names) + options.backend.index(name), name


def _start_ranks(options: T, measure: Measure[T], words: Sequence[str]) -> tuple[int, str]:
    """Start the ranks of one launch, on one backend, and wait for them.

    Returns the exit code, and the message about a rank that was killed or stopped, "" if none was.
    """
    messages: list[str] = []

    def report(message: str) -> None:
        tell(message)
        messages.append(message)

    def main() -> int:
        placement = read_placement()
        assert placement is not None
        return report_errors(lambda: run_rank(options, placement, measure))

    settings = ("device", "launches", "seed", "join", "launch")
    line = ["-m", f"ddpbench.{options.command}", *words, "--backend", options.backend[0]]
    line += [word for name in settings for word in (f"--{name}", str(getattr(options, name)))]
    code = starters.start(
        backends.get(options.backend[0]).launcher,
        line,
        main if devices.get(options.device).forks else None,
        options.ranks or 1,
        Deadline(options.timeout, options.watchdog == "end", report),
    )
    return code, next(iter(messages), "")


def run_rank(options: T, placement: Placement, measure: Measure[T]) -> int:
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
        world.watchdog.on_end = lambda *end: recorder.mark(folder, End(*end))
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
                folder, plan = recorder.create(options, sys.argv[1:])
            else:
                folder, plan = Path(options.join), options.plan(options.seed or 0)
            value = str(folder.resolve()), asdict(plan)
    path, protocol = control.broadcast_value(world, value)
    return Path(path), Plan(**protocol)


def _report(options: RunOptions, folder: Path, end: End | None) -> int:
    """Finish the run in rank 0, or mark a run that this launch has joined. Return the exit code."""
    if options.join is None:
        return recorder.finish(folder, options, end)
    if end is None:
        return 0
    if end.code != 2:  # else another backend may still be measured
        recorder.mark(folder, end)
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
    return recorder.interrupted(signal)


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
