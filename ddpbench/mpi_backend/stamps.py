"""Stamps of the calls over MPI: when each was issued.

By default a group's calls have no stamps. While a watch runs, each queue gets another class, so
that a call without a watch runs the same instructions as if stamps did not exist.
"""

from __future__ import annotations

from collections import deque
from time import time_ns
from typing import Any

from ddpbench.mpi_backend.work import CallQueue, Noted, live_queues

KEPT = 2000  # stamps of a group
Stamp = tuple[Noted, int]  # a call, and when it was issued, in ns by the system clock


class StampedQueue(CallQueue):
    """A queue that stamps its calls."""

    stamps: deque[Stamp]

    def call(self, *arguments: Any) -> None:
        began_ns = time_ns()
        CallQueue.call(self, *arguments)  # `end` may change the class meanwhile
        issued_ns = self.current.issued_ns if self.current is not None else began_ns
        self.stamps.append((self.past[-1], issued_ns))


def take() -> list[tuple[str, list[Stamp]]]:
    """Return for each group its name and the calls that ended since the last call of this function.

    The first time for a group, stamping its calls begins.
    """
    taken = []
    for queue in live_queues():
        if not isinstance(queue, StampedQueue):
            vars(queue)["stamps"] = deque(maxlen=KEPT)
            queue.__class__ = StampedQueue
        stamps = vars(queue)["stamps"]
        taken.append((queue.group, [stamps.popleft() for _ in range(len(stamps))]))
    return taken


def end() -> None:
    """Stop stamping."""
    for queue in live_queues():
        queue.__class__ = CallQueue
