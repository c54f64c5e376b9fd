"""The time by which ranks are waited for."""

from typing import Protocol


class Clock(Protocol):
    """The part of the module `time` that waits use. A test gives them a clock of its own."""

    def time(self) -> float: ...
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...
