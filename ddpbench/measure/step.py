"""The training step in one rank: a replica that trains, and the stamps of its steps.

A step is: zero_grad, forward and backward of each micro-batch, optimizer. Stamps are taken between
these phases only. rounds.py decides how often each arm steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddpbench.catalog.task import Task
from ddpbench.records.wording import list_choices
from ddpbench.runtime import devices
from ddpbench.runtime.devices import Event, elapsed_ns

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ddpbench.records.schema import StepCase
    from ddpbench.runtime.world import World


class Marks:
    """Stamps in one rank: events of its kind of device."""

    def __init__(self, device: torch.device) -> None:
        self._kind, self._device = devices.of(device), device
        self._marks: list[Event] = []

    def mark(self) -> Event:
        """Stamp now, on the current stream. Return the mark."""
        mark = self._kind.event(self._device)
        mark.record()
        self._marks.append(mark)
        return mark

    def ns(self) -> list[int]:
        """Return all marks in ns since the first, once the device has been synchronised."""
        return [elapsed_ns(self._marks[0], mark) for mark in self._marks]


def stamp(device: torch.device) -> Event:
    """Record an event on the device's current stream, in any thread.

    Some backends end a reduction in their own thread, where another device may be current.
    """
    kind = devices.of(device)
    event = kind.event(device)
    with kind.current(device):
        event.record()
    return event


@dataclass(kw_only=True, eq=False)
class Replica:
    """A task's model with its optimizer, in one way of parallel training.

    Faults may change the attributes. A subclass defines how the ranks communicate.
    """

    task: Task
    case: StepCase
    wrapped: torch.nn.Module  # what a forward calls
    optimizer: torch.optim.Optimizer
    device: torch.device
    group: dist.ProcessGroup  # of all ranks, on the measured backend
    arms: tuple[str, ...] = ("ddp",)  # that can be measured: the real step, and variants
    notes: tuple[str, ...] = ()  # why other arms cannot be measured
    mesh: DeviceMesh | None = None
    steps: int = 0  # taken so far
    sync_last: bool = True  # whether the last micro-batch's backward reduces
    delay_seconds: float = 0.0  # a planted delay of the forward
    link_seconds: float = 0.0  # least time of the last bucket: a planted slow link
    loss: torch.Tensor | None = None  # of the latest step
    backward_mark: Event | None = None  # begin of the latest backward

    def __post_init__(self) -> None:
        self.through = self.wrapped  # the forward calls this module

    @property
    def module(self) -> torch.nn.Module:
        """Return the bare model."""
        return self.task.model

    def choose_arm(self, arm: str) -> None:
        """Take the next steps in this arm."""
        raise NotImplementedError

    def without_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which a backward accumulates gradients and does not reduce them."""
        raise NotImplementedError

    def communicating(self) -> AbstractContextManager[Any]:
        """Return the context of one step, in which the ranks communicate as the arm defines."""
        return contextlib.nullcontext()

    def read_timed_step(self) -> Any:
        """Return the record of the latest step of the arm "timed"; synchronise the device first."""
        raise NotImplementedError

    def gather_timed_steps(self, world: World, steps: Sequence[Any]) -> dict[str, Any]:
        """Gather the records of the timed steps, as fields of Samples in rank 0; else {}."""
        raise NotImplementedError

    def batches(self, ahead: int = 0) -> list[Any]:
        """Return the micro-batches of the next step, or of the step `ahead` steps after it."""
        first = (self.steps + ahead) * self.case.accumulate
        return [self.task.batch(first + i) for i in range(self.case.accumulate)]

    def step(self, batches: Sequence[Any], mark: Callable[[], Event]) -> None:
        """Take one step with 2 + 2 marks per micro-batch: begin, (forward, backward ends)…, end."""
        self.steps += 1
        last = len(batches) - 1
        with self.communicating():
            mark()
            self.optimizer.zero_grad()
            for i, batch in enumerate(batches):
                reduces = i == last and self.sync_last
                with contextlib.nullcontext() if reduces else self.without_sync():
                    with autocast(self.case, self.device):
                        if self.delay_seconds:
                            devices.of(self.device).sleep(self.device, self.delay_seconds)
                        loss = self.task.loss(self.through, batch)
                    self.backward_mark = mark()
                    (loss / len(batches) if last else loss).backward()
                mark()
            self.optimizer.step()
            mark()
        self.loss = loss.detach()


def autocast(case: StepCase, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward, as the case defines."""
    if case.amp is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def advise_smaller(case: StepCase) -> str:
    """Return which options make a case fit in memory."""
    if ":" in case.workload:
        return "use a smaller batch or a smaller model"
    names = ["batch", *(setting.partition("=")[0] for setting in case.settings)]
    return f"use a smaller {list_choices(f'--{name}' for name in names)}"


def sum_phases(ns: list[int], steps: int) -> list[list[int]]:
    """Convert the marks of some steps to [begin, ends of forward, backward and optimizer] each.

    With several micro-batches, the forwards are added up, and so are the backwards.
    """
    marks_per_step = len(ns) // steps
    ends = []
    for first in range(0, steps * marks_per_step, marks_per_step):
        begin, *inner, end = ns[first : first + marks_per_step]
        spans = [b - a for a, b in itertools.pairwise([begin, *inner])]
        forward, backward = sum(spans[0::2]), sum(spans[1::2])
        ends.append([begin, begin + forward, begin + forward + backward, end])
    return ends
