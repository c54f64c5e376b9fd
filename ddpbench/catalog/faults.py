"""Faults that ddpbench can plant to show that it finds them. To add one, add a line to `_FAULTS`.

    ddp --inject bit-flip:step=7,rank=1        in a DDP step
    doctor --inject wrong-interface:rank=0     in the set-up of a rank

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ddpbench.catalog import step_faults
from ddpbench.launch.placement import Placement, Refused
from ddpbench.records.wording import explain_unknown
from ddpbench.runtime import environment, network

# Settings of every fault: the step at which, or after which, it acts (steps count from 1 and
# include the warm-up), and the rank in which it acts (-1: the last). A fault of all ranks has none.
STEP, RANK = 5, -1
IN_STEP, IN_SET_UP = "step", "set-up"
COMMANDS = {IN_STEP: "ddp", IN_SET_UP: "doctor"}


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    act        its name and the first sentence of its docstring are those of the fault;
               in a step: (replica, settings) → None, changes the measure.step.Replica of the chosen
               rank; in a set-up: (placement, settings) → the context in which that rank runs
    before     True: act before the chosen step and every later one; False: once after that step
    others     called in the other ranks when the chosen rank acts
    settings   name → default, in addition to step and rank
    needs      replica → None, or why the fault cannot be planted there, in one sentence
    """

    act: Callable[[Any, Mapping[str, float]], Any]
    settings: Mapping[str, float] = field(default_factory=dict)
    kind: str = IN_STEP
    before: bool = False
    others: Callable[[Any, Mapping[str, float]], None] | None = None
    all_ranks: bool = False
    needs: Callable[[Any], str | None] = lambda _: None

    @property
    def name(self) -> str:
        return self.act.__name__.strip("_").replace("_", "-")

    @property
    def help(self) -> str:
        sentence = (self.act.__doc__ or "").partition(".")[0]
        return sentence[:1].lower() + sentence[1:]

    @property
    def defaults(self) -> dict[str, float]:
        step = {"step": float(STEP)} if self.kind == IN_STEP else {}
        rank = {} if self.all_ranks else {"rank": float(RANK)}
        return {**step, **rank, **self.settings}


@dataclass(frozen=True)
class Planted:
    """A fault with chosen settings."""

    fault: Fault
    settings: Mapping[str, float]

    def objection(self, replica: Any, world_size: int) -> str | None:
        """Return why the fault cannot be planted in a step here; None if it can."""
        return self._no_such_rank(world_size) or self.fault.needs(replica)

    def act(self, replica: Any, rank: int, world_size: int, before: bool) -> None:
        """Act before, or after, the replica's step number `replica.steps`, if the fault is due."""
        step, chosen = self.settings["step"], self._chosen(rank, world_size)
        due = replica.steps >= step if self.fault.before else replica.steps == step
        if before != self.fault.before or not due:
            return
        if chosen:
            self.fault.act(replica, self.settings)
        elif self.fault.others is not None:
            self.fault.others(replica, self.settings)

    def around(self, placement: Placement) -> AbstractContextManager[Any]:
        """Return the context in which a rank runs, for a fault of a set-up.

        Raises Refused if the launch has no such rank.
        """
        if (sentence := self._no_such_rank(placement.world_size)) is not None:
            raise Refused(sentence)
        if not self._chosen(placement.rank, placement.world_size):
            return nullcontext()
        return cast("AbstractContextManager[Any]", self.fault.act(placement, self.settings))

    def _chosen(self, rank: int, world_size: int) -> bool:
        return rank == self.settings.get("rank", rank) % world_size

    def _no_such_rank(self, world_size: int) -> str | None:
        rank = int(self.settings.get("rank", 0))
        if -world_size <= rank < world_size:
            return None
        return f"the fault {self.fault.name} is for rank {rank}, but there are {world_size} ranks"


def parse(text: str, kind: str = IN_STEP) -> Planted:
    """Parse a fault of this kind from "name" or "name:setting=value,…".

    Raises ValueError with one sentence.
    """
    name, _, rest = text.partition(":")
    fault = FAULTS[kind].get(name)
    if fault is None:
        for other, command in COMMANDS.items():
            if name in FAULTS[other]:
                raise ValueError(f"{name} is a fault of a {other}: use {command} --inject {name}")
        raise ValueError(explain_unknown("fault", name, FAULTS[kind]))
    settings = fault.defaults
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        try:
            if key not in settings:
                raise ValueError
            settings[key] = float(value)
        except ValueError:
            shown = ",".join(f"{k}={v:g}" for k, v in fault.defaults.items())
            raise ValueError(
                f"{name} has no setting {word!r}: choose from these settings (defaults): {shown}"
            ) from None
    return Planted(fault, settings)


def listed(kind: str) -> str:
    """List all faults of a kind, for a help text."""
    return "; ".join(f"{fault.name}: {fault.help}" for fault in FAULTS[kind].values())


# --- faults of a rank's set-up --------------------------------------------------------------------

# Each function is a context in which the rank runs. It takes the rank's placement and the fault's
# settings, and undoes its change at the end.

# This program ends once the rank that started it has ended, for any reason.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
NO_INTERFACE, NO_VERSION = "nonesuch0", "1.0.0"
Settings = Mapping[str, float]


@contextlib.contextmanager
def slow_rank(placement: Any, settings: Settings) -> Iterator[None]:
    """Let one rank share a core with busy processes."""
    before = os.sched_getaffinity(0)
    _pin({max(before)})
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    processes = [subprocess.Popen(command) for _ in range(int(settings["busy"]))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        _pin(before)


def _pin(cores: set[int]) -> None:
    """Pin all threads of this process; later threads inherit it."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(task.name), cores)


def wrong_interface(placement: Any, settings: Settings) -> AbstractContextManager[Any]:
    """Set GLOO_SOCKET_IFNAME to an unknown interface in one rank."""
    return _variable(network.GLOO, NO_INTERFACE)


def oversubscribed(placement: Any, settings: Settings) -> AbstractContextManager[Any]:
    """Set OMP_NUM_THREADS to a multiple of the cores."""
    threads = int(settings["per_core"]) * len(os.sched_getaffinity(0))
    return _variable("OMP_NUM_THREADS", str(threads))


def _variable(name: str, value: str) -> AbstractContextManager[Any]:
    from unittest import mock  # loads asyncio

    return mock.patch.dict(os.environ, {name: value})


def mixed_versions(placement: Any, settings: Settings) -> AbstractContextManager[Any]:
    """Let one rank report another version of torch. A second torch is not installed here."""
    from unittest import mock

    versions = {**environment._versions(), "torch": NO_VERSION}
    return mock.patch.object(environment, "_versions", return_value=versions)


@contextlib.contextmanager
def full_disk(placement: Any, settings: Settings) -> Iterator[None]:
    """Limit the size of every file. Writing more fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(settings["nbytes"]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


_FAULTS = (
    Fault(step_faults.bit_flip, {"bit": 12}),
    Fault(step_faults.permute),
    Fault(step_faults.nan),
    Fault(step_faults.optimizer_state, needs=step_faults.require_state),
    Fault(step_faults.buffer, needs=step_faults.require_buffer),
    Fault(step_faults.learning_rate, {"lr": 0.05}, before=True),
    Fault(step_faults.corrupted_result, {"bit": 20}, before=True),
    Fault(step_faults.bypass, before=True, all_ranks=True, needs=step_faults.require_ddp),
    Fault(step_faults.no_sync, before=True, all_ranks=True, needs=step_faults.require_ddp),
    Fault(step_faults.slow_rank, {"ms": 30}, before=True),
    Fault(
        step_faults.slow_link,
        {"ms": 30},
        before=True,
        all_ranks=True,
        needs=step_faults.require_ddp,
    ),
    Fault(step_faults.raise_, before=True),
    Fault(step_faults.hang, {"seconds": 3600}, before=True),
    Fault(step_faults.stop, before=True),
    Fault(step_faults.kill, before=True),
    Fault(step_faults.out_of_memory, {"mb": 1024}, before=True),
    Fault(step_faults.wrong_shape, before=True, others=step_faults.sum_metric),
    Fault(step_faults.wrong_dtype, before=True, others=step_faults.sum_metric),
    Fault(step_faults.wrong_order, before=True, others=step_faults.sum_then_gather),
    Fault(step_faults.skipped, before=True, others=step_faults.gather_metric),
    Fault(
        step_faults.other_seed,
        {"step": 1, "seed": 1},
        before=True,
        others=step_faults.other_seed,
        needs=step_faults.require_replicas,
    ),
    Fault(
        step_faults.missed_sync,
        before=True,
        others=step_faults.missed_sync,
        needs=step_faults.require_replicas,
    ),
    Fault(
        step_faults.one_rank_update,
        before=True,
        others=step_faults.skip_update,
        needs=step_faults.require_whole,
    ),
    Fault(step_faults.flipped_shard, {"bit": 12}, needs=step_faults.require_replicas),
    Fault(slow_rank, {"busy": 3}, kind=IN_SET_UP),
    Fault(wrong_interface, kind=IN_SET_UP),
    Fault(mixed_versions, kind=IN_SET_UP),
    Fault(oversubscribed, {"per_core": 2}, kind=IN_SET_UP, all_ranks=True),
    Fault(full_disk, {"nbytes": 4096}, kind=IN_SET_UP, all_ranks=True),
)
FAULTS: dict[str, dict[str, Fault]] = {
    kind: {fault.name: fault for fault in _FAULTS if fault.kind == kind} for kind in COMMANDS
}
