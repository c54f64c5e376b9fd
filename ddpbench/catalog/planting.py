"""The record of a fault, and how ddpbench plants it in a rank.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from ddpbench.launch.placement import Placement, Refused

Settings = Mapping[str, float]
# Settings of every fault: the step at which, or after which, it acts (steps count from 1 and
# include the warm-up), and the rank in which it acts (-1: the last). A fault of all ranks has none.
STEP, RANK = 5, -1
IN_STEP, IN_SET_UP = "step", "set-up"


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    act        its name and the first sentence of its docstring are those of the fault;
               in a step: (replica, settings) → None, changes the measure.step.Replica of the chosen
               rank; in a set-up: (placement, settings) → the context in which that rank runs
    before     True: act before the chosen step and every later one; False: once after that step
    others     called in the other ranks when the chosen rank acts
    in_all_arms  act in each arm of the breakdown too, because it changes times and not replicas
    settings   name → default, in addition to step and rank
    needs      replica → None, or why the fault cannot be planted there, in one sentence
    """

    act: Callable[[Any, Mapping[str, float]], Any]
    settings: Mapping[str, float] = field(default_factory=dict)
    kind: str = IN_STEP
    before: bool = False
    others: Callable[[Any, Mapping[str, float]], None] | None = None
    all_ranks: bool = False
    in_all_arms: bool = False
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
