"""Values that the script computes: the training loss, and what it records itself."""

from __future__ import annotations

import math
from collections import deque
from typing import SupportsFloat

from ddpbench.records import redact
from ddpbench.records.watched import LOSS, MOST_VALUES
from ddpbench.watch.observe.losses import Losses
from ddpbench.watch.observe.marks import Marks
from ddpbench.watch.window import Values

WAITING = 256  # records that wait to be taken; of more, the oldest are lost
LONGEST_NAME = 64  # characters


class ScriptValues:
    """The newest value of each name, for the thread of the watch to take."""

    def __init__(self, marks: Marks, losses: Losses) -> None:
        self._marks, self._losses = marks, losses
        self._recorded = deque[tuple[str, int, float]](maxlen=WAITING)

    def record(self, name: str, value: SupportsFloat) -> None:
        """Record a value of now; one that is not finite is left out. For any thread."""
        number = float(value)
        if math.isfinite(number):
            self._recorded.append((name, max(self._marks.step, 0), number))

    def take(self) -> Values:
        """Return the newest value of each name since the last time, and its step.

        What ends in files and metrics holds no secret: the names are redacted here.
        """
        loss = self._losses.take(self._marks.step + 1)
        values = {LOSS: loss} if loss is not None else {}
        owner = redact.owner() if self._recorded else redact.Owner()
        for _ in range(len(self._recorded)):
            name, step, number = self._recorded.popleft()
            values[redact.text(name, owner)[:LONGEST_NAME]] = step, number
        return dict([*values.items()][: MOST_VALUES + 1])
