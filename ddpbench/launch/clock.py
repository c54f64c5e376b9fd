"""The clock that waits for ranks use."""

from typing import Protocol


class Clock(Protocol):
    """The part of the module `time` that waits use. Tests replace it."""

    def time(self) -> float: ...
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...
