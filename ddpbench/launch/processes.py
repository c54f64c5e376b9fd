"""Forward signals to child processes, and tell an orderly end from a failure."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator

from ddpbench.launch.placement import PASSED_ON

ORDERLY = (0, 130)  # exit codes after which the other ranks go on


@contextlib.contextmanager
def forward_signals(
    forward: Callable[[int], None], others: Iterable[signal.Signals] = ()
) -> Iterator[None]:
    """Meanwhile hand PASSED_ON, and other signals, to `forward` instead."""
    previous = {
        number: signal.signal(number, lambda received, _: forward(received))
        for number in (*PASSED_ON, *others)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
