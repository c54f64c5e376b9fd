"""Values that the script computes: the training loss, and what it records itself.

The loss is that of one step in each round, and never waited for: the tensor of one element that is
passed to backward, of the first backward in a step. So it is scaled where the script scales it: by
a GradScaler, or by 1/n to accumulate gradients.

On the CPU the value is read at once. On a GPU it is copied to pinned memory behind the work that
computes it, and read once an event behind the copy has passed. The training thread itself queries
the event, because a query by another thread could break a CUDA graph that is being captured.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from ddpbench.records import redact
from ddpbench.records.watched import LOSS, MOST_VALUES
from ddpbench.runtime import devices
from ddpbench.watch.observe.steps import Marks
from ddpbench.watch.window import Values

WAITING = 256  # records that wait to be taken; of more, the oldest are lost
LONGEST_NAME = 64  # characters
NEVER = sys.maxsize


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


class Losses:
    """Keeps the loss of one step until it is taken.

    due: the number of the first step whose loss is to be kept; NEVER while one is.
    """

    def __init__(self) -> None:
        self.due = 1
        self._known: tuple[int, float] | None = None
        self._pinned: Tensor | None = None
        self._event: devices.Event | None = None  # behind a copy to `_pinned`
        self._copied_step, self._copies = 0, True
        self._kind: devices.Cpu = devices.KINDS["cpu"]

    def keep(self, tensors: Any, step: int) -> None:
        """Keep the loss of a step. For the training thread, before its backward."""
        loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if _is_loss(loss):
            self._kind = devices.of(loss.device)
            with torch._C.DisableTorchFunction():
                if self._kind.clock == "host":
                    self._known = step, loss.item()
                elif self._kind.capturing():
                    return
                elif self._copies:
                    self._copy(loss, step)
        self.due = NEVER

    def resolve(self) -> None:
        """Read what the device has copied. For the training thread, after each step."""
        if self._event is None or self._pinned is None or self._kind.capturing():
            return
        if self._event.query():
            self._known = self._copied_step, self._pinned.item()
            self._event = None

    def take(self, steps: int) -> tuple[int, float] | None:
        """Return the loss and its step, if it is known and finite; ask for another one.

        steps: that have ended. For any thread.
        """
        if self._event is not None or self.due != NEVER:
            return None
        known, self._known, self.due = self._known, None, steps + 1
        return known if known is not None and math.isfinite(known[1]) else None

    def _copy(self, loss: Tensor, step: int) -> None:
        try:
            if self._pinned is None:
                self._pinned = torch.empty((), dtype=loss.dtype, pin_memory=True)
            with self._kind.current(loss.device):
                self._pinned.copy_(loss.detach().reshape(()), non_blocking=True)
                event = self._kind.event(loss.device)
                event.record()
        except RuntimeError:  # as where the system allows no more pinned memory
            self._copies = False
        else:
            self._copied_step, self._event = step, event


def _is_loss(loss: Any) -> bool:
    """Return whether this is a plain tensor of one number, on a device that ddpbench knows."""
    is_number = type(loss) is Tensor and loss.numel() == 1 and loss.is_floating_point()
    return is_number and loss.device.type in devices.list_names()
