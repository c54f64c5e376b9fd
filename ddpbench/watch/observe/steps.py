"""Marks, time stamps of the training thread, and the steps of a rank that they divide.

A step lies between the ends of two successive steps of the anchor optimizer. All of it is counted,
each moment once, so that a row's sum is the step:

input      in a DataLoader's iter() and next().
forward    in a root module while gradients are enabled, and the gap before backward, in which the
           loss is computed. Where no root module could be found, forward is all between what
           came before it (input, the step's begin, another backward) and backward.
backward   in torch.autograd.backward until this rank's own work is done: until the engine has run
           the graph, before the callbacks in which DDP waits for its reductions.
optimizer  in step() of any optimizer, without what a closure does of the above.
other      the rest: batches that come from elsewhere than a DataLoader, evaluation (forwards
           without gradients), clipping, logging, checkpoints, and what ddpbench does after a step,
           such as verifying replicas.
BLOCKED    in any wait of the training thread for a collective, a send or a receive, with its
           transfer. And from the end of the rank's own backward to the end of backward: the wait
           for the reductions, and what DDP does with the results; not in a backward whose own end
           is unknown, such as one that begins at an edge of the graph. Calls that block in C++
           otherwise, such as monitored_barrier or the collectives of a compiled module, are in
           their phases.

The innermost counts where one is within another: a forward in an optimizer's closure is forward.
Steps that a GradScaler skips end with the next one that is done, and are one step together.

Rows are measured by the clock of the marks: on GPUs the device's. Begin and end of a step are host
times, to find the step in which a rank called a collective; on GPUs the host runs ahead of the
device there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpbench.records.watched import PHASES
from ddpbench.runtime import devices
from ddpbench.watch.window import BLOCKED, COLUMNS

if TYPE_CHECKING:
    import torch

INPUT, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))
# A kind is an index of PHASES, or BLOCKED, where that begins; with END added, where it ends.
END = 8
STEP = 15  # a step ends, and the next one begins
LIMIT = 1 << 16  # marks that wait to be taken: some seconds of steps of 1 ms
PENDING = 4096  # marks whose events the device has not come to

# (kind, ns, clock_ns, step): by the system clock, by the clock that measures the phases, and
# the number of the latest STEP, which begins with 0 (-1: there was none).
Mark = tuple[int, int, int, int]


class Marks:
    """The marks of one thread, for another one to take. Past LIMIT, the oldest are lost.

    perf_counter measures the phases. With a device, a mark records an event there instead, and
    becomes available once the device has passed it. Nothing ever waits for an event. The training
    thread itself queries the events, because a query by another thread could break a CUDA graph
    that is being captured meanwhile.
    """

    def __init__(self) -> None:
        self.step, self.stepped_ns = -1, 0  # the latest STEP, and when it was
        self._ready: deque[Mark] = deque(maxlen=LIMIT)
        self._append = self._ready.append  # found faster
        self._device: torch.device | None = None
        self._kind: devices.Cpu = devices.KINDS["cpu"]
        self._pending: deque[tuple[int, int, Any, int]] = deque()
        self._stream: Any = None  # of the latest STEP
        self._latest: Any = None  # event, the device's time of which is _clock_ns
        self._clock_ns = 0

    def add(self, kind: int) -> None:
        """Mark this moment."""
        ns = time.time_ns()
        if self._device is None:
            self._append((kind, ns, time.perf_counter_ns(), self.step))
        elif not self._kind.capturing() and len(self._pending) < PENDING:
            event = self._kind.event(self._device)
            with self._kind.current(self._device):  # autograd calls from threads of its own
                event.record()
            self._pending.append((kind, ns, event, self.step))

    def add_step(self) -> int:
        """Mark the end of a step, and return its number."""
        self.step += 1
        self.stepped_ns = time.time_ns()
        self.add(STEP)
        if self._device is not None:
            self._stream = self._kind.current_stream(self._device)
            self.resolve()
        return self.step

    def is_in_order(self) -> bool:
        """Return whether this thread's current stream is the one of the latest STEP.

        In another one, the device may come to a mark before earlier ones.
        """
        return self._device is None or self._kind.current_stream(self._device) == self._stream

    def use_device(self, device: torch.device) -> None:
        """Measure phases by the clock of a device, if its kind has one."""
        if self._device is not None or device.type not in devices.KINDS:  # such as xla
            return
        kind = devices.of(device)
        if kind.clock == "device":
            self._device, self._kind, self._clock_ns = device, kind, time.perf_counter_ns()

    def take(self) -> list[Mark]:
        """Return the marks that are available, and forget them. For any thread."""
        return [self._ready.popleft() for _ in range(len(self._ready))]

    def resolve(self) -> None:
        """Make the marks available that the device has passed. For the training thread only."""
        if self._kind.capturing():
            return
        while self._pending and self._pending[0][2].query():
            kind, ns, event, step = self._pending.popleft()
            if self._latest is not None:
                self._clock_ns += devices.elapsed_ns(self._latest, event)
            self._latest = event
            self._ready.append((kind, ns, self._clock_ns, step))


class Step(NamedTuple):
    """A step of this rank.

    began_ns, ended_ns: by the system clock; row: seconds, one for each of COLUMNS.
    """

    number: int
    began_ns: int
    ended_ns: int
    row: tuple[float, ...]


class StepBuilder:
    """Builds steps from marks as they come. Keeps no more than the current step."""

    def __init__(self) -> None:
        self._number = -2  # of the STEP that began the current step
        self._open: list[tuple[int, int]] = []  # phases, the innermost last: phase, step's number
        self._clock_ns = 0
        self._gap = 0  # before a backward, without waits
        self._begin(0)

    def add(self, marks: Iterable[Mark]) -> list[Step]:
        """Return the steps that these marks complete."""
        steps = []
        for kind, ns, clock_ns, number in marks:
            phase = self._open[-1][0] if self._open else OTHER
            passed = max(0, clock_ns - self._clock_ns)  # events of several streams may cross
            self._clock_ns += passed
            self._sums[phase] += passed
            if phase in (OTHER, OPTIMIZER):
                self._gap += passed
                if kind == BACKWARD:
                    self._sums[phase] -= self._gap
                    self._sums[FORWARD] += self._gap
            if kind not in (BLOCKED, BLOCKED + END):
                self._gap = 0
            if kind == STEP:
                # Otherwise marks were lost, and with them the begin of this step.
                if number == self._number + 1:
                    row = tuple(one * 1e-9 for one in self._sums)
                    steps.append(Step(number, self._began_ns, ns, row))
                self._open = [
                    one for one in self._open if one[0] != OPTIMIZER and one[1] == self._number
                ]
                self._number = number
                self._begin(ns)
            elif kind < END:
                self._open.append((kind, self._number))
            else:
                self._close(kind - END)
        return steps

    def _begin(self, ns: int) -> None:
        self._began_ns = ns
        self._sums = [0] * COLUMNS

    def _close(self, phase: int) -> None:
        """End the innermost phase of this kind, and all within it."""
        for index in reversed(range(len(self._open))):
            if self._open[index][0] == phase:
                del self._open[index:]
                return
