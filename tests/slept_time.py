"""A clock that only sleeps move: what waits by it costs a test no time."""

from __future__ import annotations


class SleptTime:
    """Stands for the module `time`."""

    def __init__(self, now: float = 1e9) -> None:
        self.now = now

    def time(self) -> float:
        """Return the seconds slept so far, after a start in the past."""
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds
