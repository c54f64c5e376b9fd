"""Child processes that belong together: signals go to all, the end of one does not leave others."""

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


def start(words: Sequence[str], environ: dict[str, str]) -> Child:
    """A process in a session of its own: Ctrl-C reaches it once, from here."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **environ}
    )
    return Child(process, process.send_signal)


@contextlib.contextmanager
def passing_on(pass_on: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile this process gives the signals that ask for an end to `pass_on`, and stays."""
    previous = {
        number: signal.signal(number, lambda received, _: pass_on(received)) for number in PASSED_ON
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def await_all(
    children: Sequence[Child], lost: Callable[[], bool] = lambda: False, watch: Watch | None = None
) -> int:
    """Wait until all have ended; the highest exit code, where a death by a signal counts as 5.

    When one has failed, or `lost` says that others elsewhere have, the rest end within a time.
    watch: of these children, which are then ranks.
    """

    def pass_on(received: int) -> None:
        for child in children:
            with contextlib.suppress(OSError):
                child.send(received)
        if watch is not None:
            watch.ask()

    with passing_on(pass_on):
        try:
            killed = _wait(children, lost, 0.0 if watch is not None else GRACE_SECONDS)
            if killed is not None and watch is not None:
                watch.killed(list(watch.ranks)[killed], -children[killed].process.returncode)
        finally:
            for child in children:  # an error here leaves none behind either
                if child.process.poll() is None:
                    _kill(child)
    codes = [child.process.returncode for child in children]
    return max((code if code >= 0 else 5 for code in codes), default=0)


def _wait(children: Sequence[Child], lost: Callable[[], bool], after_kill: float) -> int | None:
    """Returns which of them a signal has ended first, other than one from here; after_kill: for the
    others to end by themselves then."""
    killed: int | None = None
    look, ends = time.monotonic(), [_terminate, _kill]
    deadline = None  # by which the rest must have ended
    while living := [child for child in children if child.process.poll() is None]:
        now = time.monotonic()
        if killed is None and len(ends) == 2:
            killed = next((i for i, c in enumerate(children) if (c.process.poll() or 0) < 0), None)
            if killed is not None:
                deadline = now + after_kill
        if deadline is None and now >= look:
            look = now + LOOK_SECONDS
            failed = any(child.process.poll() not in (None, *ORDERLY) for child in children)
            if failed or lost():
                deadline = now + GRACE_SECONDS
        elif deadline is not None and now >= deadline and ends:
            end = ends.pop(0)
            for child in living:
                end(child)
            deadline = now + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    return killed


def _terminate(child: Child) -> None:
    with contextlib.suppress(OSError):
        child.send(signal.SIGTERM)


def _kill(child: Child) -> None:
    """The process and what it has started."""
    with contextlib.suppress(OSError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants, whatever groups and sessions these have made."""
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
            for each in family:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            psutil.wait_procs(family, 5.0)
        process.kill()
        process.wait()
