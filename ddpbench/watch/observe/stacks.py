"""The line of the program where the training thread is, looked up many times a second.

A thread of its own does this. An error there is raised by `take`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import NamedTuple

from ddpbench.hang.places import describe_line
from ddpbench.watch.observe.marks import Marks
from ddpbench.watch.observe.observer import Observer

SECONDS = 0.05  # between two looks
OVERDUE_SECONDS = 0.01  # the same, while a step takes longer than usual
LIMIT = 4096  # looks that wait to be taken; of more, the oldest are lost


class Look(NamedTuple):
    """Where the training thread is: ns, by perf_counter; seconds, since the look before; line."""

    ns: int
    seconds: float
    line: str


class Stacks:
    """Looks at the training thread from its first mark until `close`.

    overdue_seconds: the time of a step from which looks are more frequent.
    """

    def __init__(self, marks: Marks, observer: Observer) -> None:
        self._marks, self._observer = marks, observer
        self.overdue_seconds = float("inf")
        self._looks = deque[Look](maxlen=LIMIT)
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ddpbench-stacks", daemon=True)
        self._thread.start()

    def take(self) -> list[Look]:
        """Return the looks since the last time, and forget them."""
        if self._error is not None:
            raise self._error
        return [self._looks.popleft() for _ in range(len(self._looks))]

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:
            self._error = error

    def _look(self) -> None:
        before, seconds = time.perf_counter_ns(), SECONDS
        while not self._closing.wait(seconds):
            frame = sys._current_frames().get(self._observer.thread or 0)
            now = time.perf_counter_ns()
            if frame is not None and self._marks.stepped_ns:
                self._looks.append(Look(now, (now - before) * 1e-9, describe_line(frame)))
            del frame  # it would keep the values of the training thread alive
            overdue = (now - self._marks.stepped_ns) * 1e-9 > self.overdue_seconds
            before, seconds = now, OVERDUE_SECONDS if overdue else SECONDS
