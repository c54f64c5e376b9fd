"""Faults that can be planted, to see them found: one entry of `_ALL` adds one.

    ddp --inject bit-flip:step=7,rank=1        in a DDP step
    doctor --inject wrong-interface:rank=0     in the set-up of a rank

Importing this module imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ddpbench.catalog import setup_faults, step_faults
from ddpbench.launch.placement import Placement, Refused

# Of every fault: the step from which on, or after which, it acts (steps count from 1, warm-up
# first), and the rank that it acts in (-1: the last). Faults of all ranks have no rank.
STEP, RANK = 5, -1
IN_STEP, IN_SET_UP = "step", "set-up"
COMMANDS = {IN_STEP: "ddp", IN_SET_UP: "doctor"}  # that plant them


@dataclass(frozen=True)
class Fault:
    """What is planted.

    act      in a step: (replica, settings) → done to a measure.step.Replica of the chosen rank;
             in a set-up: (placement, settings) → the context in which that rank runs
    before   whether it is done before the step, in every step from the chosen one on, or once
             after it
    others   what the other ranks do when the chosen one acts
    settings name → default, besides step and rank
    needs    replica → None, or one sentence: why it cannot be planted there
    """

    name: str
    help: str
    act: Callable[[Any, Mapping[str, float]], Any]
    before: bool = False
    others: Callable[[Any, Mapping[str, float]], None] | None = None
    settings: Mapping[str, float] | None = None
    all_ranks: bool = False
    needs: Callable[[Any], str | None] = lambda _: None
    kind: str = IN_STEP

    @property
    def defaults(self) -> dict[str, float]:
        """All its settings."""
        step = {"step": float(STEP)} if self.kind == IN_STEP else {}
        rank = {} if self.all_ranks else {"rank": float(RANK)}
        return {**step, **rank, **(self.settings or {})}


@dataclass(frozen=True)
class Planted:
    """A fault with its settings decided."""

    fault: Fault
    settings: Mapping[str, float]

    def objection(self, replica: Any, world_size: int) -> str | None:
        """Why this cannot be planted in a step here; None if it can."""
        return self._no_such_rank(world_size) or self.fault.needs(replica)

    def act(self, replica: Any, rank: int, world_size: int, before: bool) -> None:
        """Do what is to be done before, or after, the replica's step number `replica.steps`."""
        step, chosen = self.settings["step"], self._chosen(rank, world_size)
        due = replica.steps >= step if self.fault.before else replica.steps == step
        if before != self.fault.before or not due:
            return
        if chosen:
            self.fault.act(replica, self.settings)
        elif self.fault.others is not None:
            self.fault.others(replica, self.settings)

    def around(self, place: Placement) -> AbstractContextManager[Any]:
        """The context in which a rank runs, where this is a fault of a set-up.

        Raises Refused where there is no such rank.
        """
        if (sentence := self._no_such_rank(place.world_size)) is not None:
            raise Refused(sentence)
        if not self._chosen(place.rank, place.world_size):
            return nullcontext()
        around: AbstractContextManager[Any] = self.fault.act(place, self.settings)
        return around

    def _chosen(self, rank: int, world_size: int) -> bool:
        return rank == self.settings.get("rank", rank) % world_size

    def _no_such_rank(self, world_size: int) -> str | None:
        rank = int(self.settings.get("rank", 0))
        if -world_size <= rank < world_size:
            return None
        return f"the fault {self.fault.name} is for rank {rank}, and there are {world_size}"


def parse(text: str, kind: str = IN_STEP) -> Planted:
    """A fault of this kind from "name" or "name:setting=value,…".

    Raises ValueError with one sentence.
    """
    name, _, rest = text.partition(":")
    fault = FAULTS[kind].get(name)
    if fault is None:
        raise ValueError(_unknown(name, kind))
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
                f"{name} does not take {word!r}: its settings are {shown} (those are the defaults)"
            ) from None
    return Planted(fault, settings)


def _unknown(name: str, kind: str) -> str:
    for other, command in COMMANDS.items():
        if name in FAULTS[other]:
            return f"the fault {name} is one of a {other}: say {command} --inject {name}"
    known = FAULTS[kind]
    close = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {close[0]}?" if close else "."
    return f"unknown fault {name!r}{meant} Known: {', '.join(known)}"


def listed(kind: str) -> str:
    """All of a kind, for a help text."""
    return "; ".join(f"{fault.name}: {fault.help}" for fault in FAULTS[kind].values())


_ALL = (
    Fault("bit-flip", "one bit of one parameter flips", step_faults.bit_flip, settings={"bit": 12}),
    Fault("permute", "one parameter's elements change their order", step_faults.permute),
    Fault("nan", "one element of one parameter becomes NaN", step_faults.nan),
    Fault(
        "optimizer-state", "one element of the optimizer's state changes",
        step_faults.optimizer_state, needs=step_faults.stateless,
    ),
    Fault(
        "buffer", "one element of a buffer changes", step_faults.buffer,
        needs=step_faults.no_buffers,
    ),
    Fault(
        "learning-rate", "another learning rate in one rank", step_faults.learning_rate,
        before=True, settings={"lr": 0.05},
    ),
    Fault(
        "corrupted-result", "one bit of one reduced gradient flips in one rank, in one step",
        step_faults.corrupted_result, before=True, settings={"bit": 20},
    ),
    Fault(
        "bypass", "the forward goes through the module instead of DDP", step_faults.bypass,
        before=True, all_ranks=True,
    ),
    Fault(
        "no-sync", "the last micro-batch runs under no_sync too", step_faults.unsynced,
        before=True, all_ranks=True,
    ),
    Fault(
        "slow-rank", "one rank's forward takes longer", step_faults.slow_rank, before=True,
        settings={"ms": 30},
    ),
    Fault(
        "slow-link", "the last bucket takes at least so long from hand-over to reduction",
        step_faults.slow_link, before=True, settings={"ms": 30}, all_ranks=True,
    ),
    Fault("raise", "one rank raises an error", step_faults.error, before=True),
    Fault(
        "hang", "one rank sleeps instead of stepping", step_faults.hang, before=True,
        settings={"seconds": 3600},
    ),
    Fault("stop", "one rank is stopped (SIGSTOP)", step_faults.stop, before=True),
    Fault("kill", "one rank is killed (SIGKILL)", step_faults.kill, before=True),
    Fault(
        "out-of-memory", "one rank asks for more memory than it can get",
        step_faults.out_of_memory, before=True, settings={"mb": 1024},
    ),
    Fault(
        "wrong-shape", "all ranks sum a metric, one of another shape", step_faults.wrong_shape,
        before=True, others=step_faults.summed,
    ),
    Fault(
        "wrong-dtype", "all ranks sum a metric, one of another dtype", step_faults.wrong_dtype,
        before=True, others=step_faults.summed,
    ),
    Fault(
        "wrong-order", "all ranks sum a metric and gather it, one in the other order",
        step_faults.wrong_order, before=True, others=step_faults.in_order,
    ),
    Fault(
        "skipped", "all ranks gather a metric, one does not", step_faults.skipped, before=True,
        others=step_faults.gathered,
    ),
    Fault(
        "slow-rank", "one rank shares a core with busy processes", setup_faults.slow_rank,
        settings={"busy": 3}, kind=IN_SET_UP,
    ),
    Fault(
        "wrong-interface", "GLOO_SOCKET_IFNAME names no interface in one rank",
        setup_faults.wrong_interface, kind=IN_SET_UP,
    ),
    Fault(
        "mixed-versions", "one rank reports another version of torch", setup_faults.mixed_versions,
        kind=IN_SET_UP,
    ),
    Fault(
        "oversubscribed", "OMP_NUM_THREADS is a multiple of the cores",
        setup_faults.oversubscribed, settings={"per_core": 2}, all_ranks=True, kind=IN_SET_UP,
    ),
    Fault(
        "full-disk", "no file may grow beyond a size", setup_faults.full_disk,
        settings={"nbytes": 4096}, all_ranks=True, kind=IN_SET_UP,
    ),
)  # fmt: skip
FAULTS: dict[str, dict[str, Fault]] = {
    kind: {fault.name: fault for fault in _ALL if fault.kind == kind} for kind in COMMANDS
}
