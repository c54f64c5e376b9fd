"""A clock for mailboxes and transports that moves only while they wait."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import socket
from collections.abc import Callable
from typing import Any

from ddpbench.watch.gather.mailbox import MOST_NBYTES, Clock

EPOCH_NS = 1_700_000_000 * 10**9  # a multiple of any period
SECOND = 10**9


class FakeClock(Clock):
    """Whole nanoseconds, so that a test can compare exactly.

    ahead_ns: how far the system clock is ahead of a right one.
    """

    def __init__(self) -> None:
        self.passed_ns = self.ahead_ns = 0
        self._later: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, function: Callable[[], object]) -> None:
        """Call a function when so much more time has passed."""
        due_ns = self.passed_ns + round(seconds * SECOND)
        heapq.heappush(self._later, (due_ns, next(self._order), function))

    def monotonic(self) -> float:
        """Return the seconds that have passed."""
        return self.passed_ns / SECOND

    def now_ns(self) -> int:
        """Return what the system clock shows."""
        return EPOCH_NS + self.passed_ns + self.ahead_ns

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        until_ns = self.passed_ns + round(seconds * SECOND)
        while self._later and self._later[0][0] <= until_ns:
            self._reach_next()
        self.passed_ns = until_ns

    def receive(self, inbox: socket.socket, seconds: float) -> tuple[bytes, Any]:
        """Let time pass until there is a datagram."""
        until_ns = self.passed_ns + math.ceil(seconds * SECOND)  # a part of 1 ns is time as well
        inbox.setblocking(False)
        while True:
            with contextlib.suppress(BlockingIOError):
                return inbox.recvfrom(2 * MOST_NBYTES)
            if not self._later or self._later[0][0] > until_ns:
                self.passed_ns = until_ns
                raise TimeoutError
            self._reach_next()

    def _reach_next(self) -> None:
        self.passed_ns, _, function = heapq.heappop(self._later)
        function()
