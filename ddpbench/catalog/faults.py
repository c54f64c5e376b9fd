"""Faults that can be planted in a DDP step, to see them found: one entry of FAULTS adds one.

    --inject bit-flip:step=7,rank=1

Importing this module imports no torch.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Of every fault: the step from which on, or after which, it acts (steps count from 1, warm-up
# first), and the rank that it acts in (-1: the last). Faults of all ranks have no rank.
STEP, RANK = 5, -1


@dataclass(frozen=True)
class Fault:
    """What is planted.

    act      (replica, settings) → done to a measure.step.Replica of the chosen rank
    before   whether it is done before the step, in every step from the chosen one on, or once
             after it
    settings name → default, besides step and rank
    needs    replica → None, or one sentence: why it cannot be planted there
    """

    name: str
    help: str
    act: Callable[[Any, Mapping[str, float]], None]
    before: bool = False
    settings: Mapping[str, float] | None = None
    all_ranks: bool = False
    needs: Callable[[Any], str | None] = lambda _: None

    @property
    def defaults(self) -> dict[str, float]:
        """All its settings."""
        rank = {} if self.all_ranks else {"rank": float(RANK)}
        return {"step": float(STEP), **rank, **(self.settings or {})}


@dataclass(frozen=True)
class Planted:
    """A fault with its settings decided."""

    fault: Fault
    settings: Mapping[str, float]

    def objection(self, replica: Any, world_size: int) -> str | None:
        """Why this cannot be planted here; None if it can."""
        rank = int(self.settings.get("rank", 0))
        if not -world_size <= rank < world_size:
            return f"the fault {self.fault.name} is for rank {rank}, and there are {world_size}"
        return self.fault.needs(replica)

    def act(self, replica: Any, rank: int, world_size: int, before: bool) -> None:
        """Do what is to be done before, or after, the replica's step number `replica.steps`."""
        step, chosen = self.settings["step"], self.settings.get("rank", rank) % world_size
        due = replica.steps >= step if self.fault.before else replica.steps == step
        if before == self.fault.before and due and rank == chosen:
            self.fault.act(replica, self.settings)


def parse(text: str) -> Planted:
    """A fault from "name" or "name:setting=value,…". Raises ValueError with one sentence."""
    name, _, rest = text.partition(":")
    fault = FAULTS.get(name)
    if fault is None:
        close = difflib.get_close_matches(name, FAULTS, 1)
        meant = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"unknown fault {name!r}{meant} Known: {', '.join(FAULTS)}")
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


def _first(replica: Any) -> Any:
    return next(iter(replica.module.parameters())).data


def _bit_flip(replica: Any, settings: Mapping[str, float]) -> None:
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = _first(replica).view(-1)
    flat.view(bits[flat.element_size()])[flat.numel() // 2] ^= 1 << int(settings["bit"])


def _bypass(replica: Any, settings: Mapping[str, float]) -> None:
    replica.through = replica.module


def _unsynced(replica: Any, settings: Mapping[str, float]) -> None:
    replica.sync_last = False


def _learning_rate(replica: Any, settings: Mapping[str, float]) -> None:
    for group in replica.optimizer.param_groups:
        group["lr"] = settings["lr"]


def _permute(replica: Any, settings: Mapping[str, float]) -> None:
    tensor = _first(replica)
    tensor.copy_(tensor.flatten().flip(0).view_as(tensor))


def _nan(replica: Any, settings: Mapping[str, float]) -> None:
    _first(replica).view(-1)[0] = float("nan")


def _optimizer_state(replica: Any, settings: Mapping[str, float]) -> None:
    import torch

    for state in replica.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.view(-1)[0] += 1
                return


def _stateless(replica: Any) -> str | None:
    if replica.case.optimizer != "sgd":
        return None
    return "optimizer-state needs an optimizer that keeps some: say --optimizer adam"


def _buffer(replica: Any, settings: Mapping[str, float]) -> None:
    import torch

    for buffer in replica.module.buffers():
        if torch.is_floating_point(buffer):
            buffer.view(-1)[0] += 1
            return


def _no_buffers(replica: Any) -> str | None:
    if any(True for _ in replica.module.buffers()):
        return None
    return "the fault buffer needs a workload that has buffers: say --workload convnet"


def _slow_rank(replica: Any, settings: Mapping[str, float]) -> None:
    replica.delay_seconds = settings["ms"] / 1e3


def _slow_link(replica: Any, settings: Mapping[str, float]) -> None:
    replica.link_seconds = settings["ms"] / 1e3


def _raise(replica: Any, settings: Mapping[str, float]) -> None:
    raise RuntimeError("planted error")


def _hang(replica: Any, settings: Mapping[str, float]) -> None:
    time.sleep(settings["seconds"])


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("bit-flip", "one bit of one parameter flips", _bit_flip, settings={"bit": 12}),
        Fault("permute", "one parameter's elements change their order", _permute),
        Fault("nan", "one element of one parameter becomes NaN", _nan),
        Fault(
            "optimizer-state", "one element of the optimizer's state changes", _optimizer_state,
            needs=_stateless,
        ),
        Fault("buffer", "one element of a buffer changes", _buffer, needs=_no_buffers),
        Fault(
            "learning-rate", "another learning rate in one rank", _learning_rate, before=True,
            settings={"lr": 0.05},
        ),
        Fault(
            "bypass", "the forward goes through the module instead of DDP", _bypass, before=True,
            all_ranks=True,
        ),
        Fault(
            "no-sync", "the last micro-batch runs under no_sync too", _unsynced, before=True,
            all_ranks=True,
        ),
        Fault(
            "slow-rank", "one rank's forward takes longer", _slow_rank, before=True,
            settings={"ms": 30},
        ),
        Fault(
            "slow-link", "the last bucket takes at least so long from hand-over to reduction",
            _slow_link, before=True, settings={"ms": 30}, all_ranks=True,
        ),
        Fault("raise", "one rank raises an error", _raise, before=True),
        Fault(
            "hang", "one rank sleeps instead of stepping", _hang, before=True,
            settings={"seconds": 3600},
        ),
    )
}  # fmt: skip
