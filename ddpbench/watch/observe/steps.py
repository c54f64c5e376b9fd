"""Steps of a rank, and where its time went in each of them, from its marks. Pure.

A step lies between the ends of two successive steps of the anchor optimizer. All of it is counted,
each moment once, so that a row's sum is the step:

input      in a DataLoader's iter() and next().
forward    in a root module while gradients are enabled, and the gap before backward, in which the
           loss is computed. So where no root module could be found, forward is all between what
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

from collections.abc import Iterable
from typing import NamedTuple

from ddpbench.records.watched import PHASES
from ddpbench.watch.observe.marks import END, STEP, Mark
from ddpbench.watch.window import BLOCKED, COLUMNS

INPUT, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))


class Step(NamedTuple):
    """A step of this rank.

    began_ns, ended_ns: by the host's perf_counter; row: seconds, one for each of COLUMNS.
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


assert BLOCKED == OTHER + 1  # a mark's kind is a column
