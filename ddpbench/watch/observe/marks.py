"""Marks: time stamps of the training thread, on the host's clock and, on GPUs, on the device's."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ddpbench.runtime import devices

if TYPE_CHECKING:
    import torch

# A kind is an index of PHASES, or BLOCKED, where that begins; with END added, where it ends.
END = 8
STEP = 15  # a step ends, and the next one begins
LIMIT = 1 << 16  # marks that wait to be taken: some seconds of steps of 1 ms
PENDING = 4096  # marks whose events the device has not come to

# (kind, ns, clock_ns, step): by the host's perf_counter, by the clock that measures the phases, and
# the number of the latest STEP, which begins with 0 (-1: there was none).
Mark = tuple[int, int, int, int]


class Marks:
    """The marks of one thread, for another one to take. Past LIMIT, the oldest are lost.

    Without a device, both clocks are the host's. With one, a mark also records an event there, and
    becomes available once the device has passed it. Nothing ever waits for an event. The training
    thread itself queries the events, because a query by another thread could break a CUDA graph
    that is being captured meanwhile.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.step, self.stepped_ns = -1, 0  # the latest STEP, and when it was
        self._ready: deque[Mark] = deque(maxlen=limit)
        self._append = self._ready.append  # found faster
        self._device: torch.device | None = None
        self._kind: devices.Cpu = devices.KINDS["cpu"]
        self._pending: deque[tuple[int, int, Any, int]] = deque()
        self._pool: list[Any] = []
        self._stream: Any = None  # of the latest STEP
        self._latest: Any = None  # event, the device's time of which is _clock_ns
        self._clock_ns = 0

    def add(self, kind: int) -> None:
        """Mark this moment."""
        ns = time.perf_counter_ns()
        if self._device is None:
            self._append((kind, ns, ns, self.step))
        else:
            self._record(self._device, kind, ns)

    def add_step(self) -> int:
        """Mark the end of a step, and return its number."""
        self.step += 1
        self.stepped_ns = time.perf_counter_ns()
        self.add(STEP)
        if self._device is not None:
            self._stream = self._kind.current_stream(self._device)
            self.resolve()
        return self.step

    def is_in_order(self) -> bool:
        """Return whether this thread's current stream is the one of the latest STEP.

        In another one, the device may come to a mark before earlier ones.
        """
        if self._device is None:
            return True
        return bool(self._kind.current_stream(self._device) == self._stream)

    def use_device(self, device: torch.device) -> None:
        """Measure phases by the clock of a device, if its kind has one."""
        if self._device is not None or device.type not in devices.list_names():  # such as xla
            return
        kind = devices.of(device)
        if kind.clock == "device":
            self._device, self._kind, self._clock_ns = device, kind, time.perf_counter_ns()

    def take(self) -> list[Mark]:
        """Return the marks that are available, and forget them. For any thread."""
        return [self._ready.popleft() for _ in range(len(self._ready))]

    def _record(self, device: torch.device, kind: int, ns: int) -> None:
        if self._kind.capturing() or len(self._pending) >= PENDING:
            return
        event = self._pool.pop() if self._pool else self._kind.event(device)
        with self._kind.current(device):  # autograd calls from threads of its own
            event.record()
        self._pending.append((kind, ns, event, self.step))

    def resolve(self) -> None:
        """Make the marks available that the device has passed. For the training thread only."""
        if self._kind.capturing():
            return
        while self._pending and self._pending[0][2].query():
            kind, ns, event, step = self._pending.popleft()
            if self._latest is not None:
                self._clock_ns += devices.elapsed_ns(self._latest, event)
                self._pool.append(self._latest)
            self._latest = event
            self._ready.append((kind, ns, self._clock_ns, step))
