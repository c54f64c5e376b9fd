"""Stamps of the calls over MPI: when each was issued, began and ended.

A group's calls carry no stamps by themselves. While a watch is on, the class of each lane is
another, in which the slots for the running call are properties. So without a watch a call runs the
same instructions as if there were no stamps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from ddpbench.mpi_backend.work import Lane, Noted, live_lanes

KEPT = 2000  # stamps of a group


class Stamp(NamedTuple):
    """The times of a call, by the system clock.

    waited: the thread that issued the call also made it, and so was blocked until its end.
    """

    noted: Noted
    issued_ns: int
    began_ns: int
    ended_ns: int
    waited: bool


def _slot(name: str) -> Any:
    def read(lane: StampedLane) -> Noted | None:
        noted: Noted | None = lane.__dict__[name]
        return noted

    def fill(lane: StampedLane, noted: Noted | None) -> None:
        lane.__dict__[name] = noted
        lane.stamp(name, noted)

    return property(read, fill)


class StampedLane(Lane):
    """A lane that stamps its calls."""

    inside = _slot("inside")
    _doing = _slot("_doing")
    stamps: deque[Stamp]
    _issued: dict[int, tuple[int, int]]  # number of a call → when, and by which thread
    _begun: dict[str, tuple[Noted, int, int]]  # slot → the call in it, since when, which thread
    _newest: int  # number of the latest call that has begun

    def note(self, name: str, like: Tensor | None) -> Noted:
        noted = super().note(name, like)
        self._issued[noted[0]] = time.time_ns(), threading.get_ident()
        return noted

    def start(self) -> None:
        """Stamp the calls from the next one on."""
        self.stamps, self._issued, self._begun, self._newest = deque(maxlen=KEPT), {}, {}, 0

    def stamp(self, slot: str, noted: Noted | None) -> None:
        """Note that the call in the slot has ended, and another one, if any, has begun."""
        now, thread = time.time_ns(), threading.get_ident()
        if (begun := self._begun.pop(slot, None)) is not None:
            before, began_ns, runner = begun
            issued_ns, issuer = self._issued.pop(before[0], (began_ns, runner))
            self.stamps.append(Stamp(before, issued_ns, began_ns, now, issuer == runner))
        if noted is not None and noted[0] > self._newest:  # not one that goes on after a callback
            self._begun[slot], self._newest = (noted, now, thread), noted[0]


def take() -> list[tuple[str, list[Stamp]]]:
    """For each group, its name and the calls that ended since the last time.

    The first time for a group, its calls begin to be stamped.
    """
    taken = []
    for lane in live_lanes():
        if type(lane) is Lane:
            StampedLane.start(lane)  # type: ignore[arg-type]
            lane.__class__ = StampedLane
        stamps: deque[Stamp] = vars(lane)["stamps"]
        taken.append((lane.group, [stamps.popleft() for _ in range(len(stamps))]))
    return taken


def end() -> None:
    """Stop stamping."""
    for lane in live_lanes():
        lane.__class__ = Lane
