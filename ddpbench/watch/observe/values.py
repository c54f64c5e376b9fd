"""Values that the script computes: the training loss, and what it records itself.

The loss is that of one step in each round: the tensor of one element that is passed to backward, of
the first backward in a step. So it is scaled where the script scales it: by a GradScaler, or by 1/n
to accumulate gradients. The thread of the watch reads it, and alone waits for a GPU.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, SupportsFloat

from torch import Tensor

from ddpbench.hang.flight_recorder import relaxed_capture
from ddpbench.records import redact
from ddpbench.records.watched import LOSS, MOST_VALUES
from ddpbench.watch.observe.steps import Marks
from ddpbench.watch.window import Values

WAITING = 256  # records that wait to be taken; of more, the oldest are lost
LONGEST_NAME = 64  # characters


class ScriptValues:
    """The newest value of each name, for the thread of the watch to take.

    due: the number of the first step whose loss is to be kept.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._recorded = deque[tuple[str, int, float]](maxlen=WAITING)
        self.due: float = 1
        self._loss: tuple[int, Tensor] | None = None

    def record(self, name: str, value: SupportsFloat) -> None:
        """Record a value of now; one that is not finite is left out. For any thread."""
        number = float(value)
        if math.isfinite(number):
            self._recorded.append((name, max(self._marks.step, 0), number))

    def keep_loss(self, tensors: Any) -> None:
        """Keep what is passed to a backward if it is a loss. For the training thread."""
        loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if type(loss) is Tensor and loss.numel() == 1 and loss.is_floating_point():
            self._loss = self._marks.step + 1, loss.detach()
        self.due = math.inf

    def take(self) -> Values:
        """Return the newest value of each name since the last time, and its step.

        What ends in files and metrics holds no secret: the names are redacted here.
        """
        values: Values = {}
        if self.due == math.inf:
            loss, self._loss, self.due = self._loss, None, self._marks.step + 2
            with relaxed_capture():
                number = math.nan if loss is None else float(loss[1])
            if loss is not None and math.isfinite(number):
                values[LOSS] = loss[0], number
        owner = redact.owner() if self._recorded else redact.Owner()
        for _ in range(len(self._recorded)):
            name, step, number = self._recorded.popleft()
            values[redact.text(name, owner)[:LONGEST_NAME]] = step, number
        return dict([*values.items()][: MOST_VALUES + 1])
