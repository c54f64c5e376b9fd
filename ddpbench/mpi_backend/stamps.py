"""Stamps of the calls over MPI: when each was issued, began and ended.

By default a group's calls have no stamps. While a watch runs, each lane gets another class, in
which the slots for the running call are properties. Without a watch, a call therefore runs the
same instructions as if stamps did not exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import time_ns
from typing import Any, NamedTuple

from ddpbench.mpi_backend.work import Call, Lane, Noted, live_lanes

KEPT = 2000  # stamps of a group


class Stamp(NamedTuple):
    """The times of a call, by the system clock."""

    noted: Noted
    issued_ns: int
    began_ns: int
    ended_ns: int


# The two slots are properties of plain functions, and a stamp is a tuple until `take`, because a
# synchronous call may take only 5 µs.
def _read(name: str) -> Callable[[StampedLane], Noted | None]:
    return lambda lane: lane.__dict__[name]


def _fill_inside(lane: StampedLane, noted: Noted | None) -> None:
    """Stamp a synchronous call, whose thread begins and ends it."""
    state = lane.__dict__
    if noted is None:
        if state["_inside_ns"]:
            now_ns = time_ns()
            lane.keep((state["inside"], state["_inside_ns"], state["_inside_ns"], now_ns))
        state["inside"], state["_inside_ns"] = None, 0
    else:
        state["inside"], state["_inside_ns"] = noted, time_ns()


def _fill_doing(lane: StampedLane, noted: Noted | None) -> None:
    """Stamp queued calls: a new one in the slot ends the one before."""
    lane.__dict__["_doing"] = noted
    lane.stamp(noted)


class StampedLane(Lane):
    """A lane that stamps its calls."""

    inside: Any = property(_read("inside"), _fill_inside)
    _doing: Any = property(_read("_doing"), _fill_doing)
    stamps: deque[tuple[Noted, int, int, int]]
    keep: Callable[[tuple[Noted, int, int, int]], None]

    def start(self) -> None:
        """Stamp the calls from the next one on."""
        self.stamps = deque(maxlen=KEPT)
        self.keep, self._inside_ns = self.stamps.append, 0
        # The queued call that runs, when it was issued, and when it began.
        self._begun: tuple[Noted, int, int] | None = None
        self._newest = 0  # number of the latest queued call that has begun

    def submit(self, call: Call) -> None:
        vars(call)["issued_ns"] = time_ns()
        super().submit(call)

    def stamp(self, noted: Noted | None) -> None:
        """Note that the previous queued call has ended and another one, if any, has begun."""
        now_ns = time_ns()
        if self._begun is not None:
            self.keep((*self._begun, now_ns))
            self._begun = None
        if noted is not None and noted[0] > self._newest:  # ignore one resumed after a callback
            self._newest = noted[0]
            self._begun = noted, getattr(self._running, "issued_ns", now_ns), now_ns


def take() -> list[tuple[str, list[Stamp]]]:
    """Return for each group its name and the calls that ended since the last call of this function.

    The first time for a group, stamping its calls begins.
    """
    taken = []
    for lane in live_lanes():
        if type(lane) is Lane:
            StampedLane.start(lane)  # type: ignore[arg-type]
            lane.__class__ = StampedLane
        stamps = vars(lane)["stamps"]
        taken.append((lane.group, [Stamp(*stamps.popleft()) for _ in range(len(stamps))]))
    return taken


def end() -> None:
    """Stop stamping."""
    for lane in live_lanes():
        lane.__class__ = Lane
