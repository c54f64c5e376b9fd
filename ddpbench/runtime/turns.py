"""The turns of a launch, in all its ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddpbench.runtime import control, cpu

if TYPE_CHECKING:
    from ddpbench.launch.turn import Turn
    from ddpbench.runtime.world import World


class Turns:
    """The turns of a launch, as all its ranks see them: whether they wait for another launch."""

    def __init__(self, world: World, turn: Turn | None, shared: bool) -> None:
        """turn: in rank 0. shared: the launch is measured in turns, in all ranks."""
        self._world, self._turn, self._shared = world, turn, shared

    def wait(self) -> float:
        """Let the other side measure if this one's turn is over. Return the seconds it took.

        All ranks call it, between repetitions. Rank 0 decides, and the others sleep meanwhile.
        """
        if not self._shared or not self._waits():
            return 0.0
        began = time.monotonic()
        with cpu.left_out():
            while self._waits():
                self._world.watchdog.rearm()
        self._world.watchdog.rearm()
        return time.monotonic() - began

    def _waits(self) -> bool:
        turn = self._turn if self._world.watchdog.signal is None else None
        return bool(control.broadcast_decision(self._world, turn is not None and turn.waits()))
