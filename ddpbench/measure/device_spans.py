"""The time of a call on a device, between two events around it in the order of the device's work.

An isolated call of a few µs takes longer to launch than to run, so events around it show the launch
of the host. `HiddenLaunch` keeps the device busy while the host launches: a sleep on the device, a
start of all ranks on the device, the first event, the call, and the second event are all issued
before the sleep ends. Only the call then lies between the events. If the first event is
taken before the second one is issued, the launch was not hidden, and the next sleeps are longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING

from ddpbench.analysis.lines import UNHIDDEN_SHARE
from ddpbench.measure import clock
from ddpbench.runtime import devices
from ddpbench.runtime.devices import Event

if TYPE_CHECKING:
    import torch

FIRST_SECONDS, MOST_SECONDS = 100e-6, 5e-3  # of a sleep
LONGER = 1.5  # how much longer than the usual launch a sleep must be


class Spans:
    """Spans on a device, between pairs of events that are made outside the timed spans."""

    def __init__(self, device: torch.device) -> None:
        self.kind, self.device = devices.of(device), device
        self._pairs: list[tuple[Event, Event]] = []

    def pairs(self, count: int) -> Iterator[tuple[Event, Event]]:
        """Return the events of so many spans, which may have been used before."""
        while len(self._pairs) < count:
            pair = self.kind.event(self.device), self.kind.event(self.device)
            for event in pair:
                event.record()  # the first time takes longer
            self._pairs.append(pair)
        return iter(self._pairs[:count])

    def elapsed_ns(self, count: int) -> list[int]:
        return [devices.elapsed_ns(*pair) for pair in self.pairs(count)]

    def around(self, call: Callable[[], object], count: int) -> Callable[[], object]:
        """Return the call between events; it returns once the device is done. For `count` uses."""
        pairs = self.pairs(count)
        wait, device = self.kind.synchronize_stream, self.device

        def timed() -> None:
            begin, end = next(pairs)
            begin.record()
            call()
            end.record()
            wait(device)

        return timed


class HiddenLaunch:
    """Spans of calls that are launched while the device sleeps."""

    def __init__(self, spans: Spans, together: Callable[[], object]) -> None:
        """`together` starts the ranks on their devices, without waiting for it."""
        self._spans, self._together = spans, together
        self.seconds = FIRST_SECONDS  # of the sleep for one call
        self.unhidden = 0  # repetitions whose launch was not hidden
        spans.kind.sleep(spans.device, 0.0)  # the first sleep measures the speed of the clock

    def stamped(
        self, count: int, start: Callable[[], object], call: Callable[[], object], calls: int
    ) -> tuple[list[int], list[int]]:
        """Run `start` and `call` `count` times; `call` makes this number of `calls`.

        Return the host's stamps before and after `call`, in ns. They show the launch alone, because
        `call` returns before the device begins.
        """
        now, kind, device = clock.now_ns, self._spans.kind, self._spans.device
        together, seconds = self._together, min(self.seconds * calls, MOST_SECONDS)
        entry: list[int] = []
        exits: list[int] = []
        issue: list[int] = []
        unhidden = 0
        for begin, end in self._spans.pairs(count):
            start()
            first = now()
            kind.sleep(device, seconds)
            together()
            begin.record()
            began = now()
            call()
            ended = now()
            end.record()
            unhidden += begin.query()
            issue.append(now() - first)
            kind.synchronize_stream(device)
            entry.append(began)
            exits.append(ended)
        self.unhidden += unhidden
        # A single repetition shows little: the first call of a case takes far longer than others.
        if count > 1 and unhidden > UNHIDDEN_SHARE * count:
            usual = LONGER * median(issue) * 1e-9 / calls
            self.seconds = min(max(2 * self.seconds, usual), MOST_SECONDS)
        return entry, exits
