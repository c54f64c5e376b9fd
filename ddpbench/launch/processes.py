"""Child processes that belong together: signals reach all, and none outlives the others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from ddpbench.launch.placement import PASSED_ON
from ddpbench.launch.supervise import Watch

POLL_SECONDS, LOOK_SECONDS = 0.1, 1.0
# After one has failed: for the others to end by themselves, then after SIGTERM.
GRACE_SECONDS = 10.0
ORDERLY = (0, 130)


@dataclass(frozen=True)
class Child:
    """A process, and how a signal reaches it."""

    process: subprocess.Popen[bytes]
    send: Callable[[int], None]


def start_child(command: Sequence[str], environ: dict[str, str]) -> Child:
    """Start a process in a session of its own: Ctrl-C reaches it once, from here."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **environ}
    )
    return Child(process, process.send_signal)


@contextlib.contextmanager
def forward_signals(forward: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile hand signals that ask this process to end to `forward` instead."""
    previous = {
        number: signal.signal(number, lambda received, _: forward(received)) for number in PASSED_ON
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def await_all(
    children: Sequence[Child],
    has_failed: Callable[[], bool] = lambda: False,
    watch: Watch | None = None,
) -> int:
    """Wait for all children; the highest exit code, where a death by a signal counts as 5.

    Once one has failed, or `has_failed` says that a process elsewhere has, the rest must end in
    time. watch: of these children, which are then ranks.
    """

    def forward(received: int) -> None:
        for child in children:
            with contextlib.suppress(OSError):
                child.send(received)
        if watch is not None:
            watch.request_end()

    with forward_signals(forward):
        try:
            killed = _wait(children, has_failed, 0.0 if watch is not None else GRACE_SECONDS)
            if killed is not None and watch is not None:
                number = -children[killed].process.returncode
                watch.report_killed(list(watch.ranks)[killed], number)
        finally:
            for child in children:  # an error here leaves none behind either
                if child.process.poll() is None:
                    _kill(child)
    codes = [child.process.returncode for child in children]
    return max((code if code >= 0 else 5 for code in codes), default=0)


def _wait(
    children: Sequence[Child], has_failed: Callable[[], bool], seconds_after_kill: float
) -> int | None:
    """Wait for all; the index of the first that a signal from elsewhere has ended, None if none.

    seconds_after_kill: for the others to end by themselves after that.
    """
    killed: int | None = None
    look, steps = time.monotonic(), [_terminate, _kill]
    deadline = None  # by which the rest must have ended
    while living := [child for child in children if child.process.poll() is None]:
        now = time.monotonic()
        if killed is None and len(steps) == 2:
            killed = next((i for i, c in enumerate(children) if (c.process.poll() or 0) < 0), None)
            if killed is not None:
                deadline = now + seconds_after_kill
        if deadline is None and now >= look:
            look = now + LOOK_SECONDS
            failed = any(child.process.poll() not in (None, *ORDERLY) for child in children)
            if failed or has_failed():
                deadline = now + GRACE_SECONDS
        elif deadline is not None and now >= deadline and steps:
            end = steps.pop(0)
            for child in living:
                end(child)
            deadline = now + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    return killed


def _terminate(child: Child) -> None:
    with contextlib.suppress(OSError):
        child.send(signal.SIGTERM)


def _kill(child: Child) -> None:
    """Kill the process and what it has started."""
    with contextlib.suppress(OSError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, in whatever process groups and sessions they are."""
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(process.pid).children(recursive=True)
            for descendant in descendants:
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
            psutil.wait_procs(descendants, 5.0)
        process.kill()
        process.wait()
