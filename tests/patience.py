"""How long a test waits for what must happen, in one place.

Never prove with it that something is fast. It is long, so that a machine which does much else does
not fail a test, and all of a test's waits together stay below pytest's limit (pyproject.toml).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 120.0


def wait_until(happened: Callable[[], T], what: str = "it") -> T:
    """Return what `happened` returns as soon as that is true; fail after PATIENCE_SECONDS."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not (result := happened()):
        assert time.monotonic() < until, f"{what} did not happen within {PATIENCE_SECONDS:g} s"
        time.sleep(0.02)
    return result


def be_patient() -> None:
    """Let watched ranks wait for each other's answers longer than a machine may stop for."""
    from ddpbench.hang import guard, status_board, watchdog

    status_board.ANSWER_SECONDS = status_board.CLOSE_SECONDS = guard.SETTLE_SECONDS = 8.0
    status_board.STORE_TIMEOUT = timedelta(seconds=8)
    watchdog.GRACE_SECONDS = guard.LINGER_SECONDS = guard.END_SECONDS = 30.0
    guard.LEAVE_SECONDS = status_board.PRINT_SECONDS = 12.0
