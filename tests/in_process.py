"""Run command lines of ddpbench in this process."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
from command_lines import clean_environment
from patience import PATIENCE_SECONDS

from ddpbench import cli
from ddpbench.session import errors, launches


class ProcessStarted(BaseException):
    """The command would start a process now, so its options are valid."""


class CommandHung(BaseException):
    """The command did not end in time."""


class Outcome(NamedTuple):
    """Exit code and output of a command; the code is None if it would have started a process."""

    code: int | None
    out: str
    err: str


Call = Callable[..., Outcome]  # the words of a command → its outcome


def _refuse_start(*args: Any, **settings: Any) -> Any:
    raise ProcessStarted


@contextlib.contextmanager
def forbid_processes() -> Iterator[None]:
    """Remove the launcher's variables, and raise ProcessStarted instead of starting a process."""
    clean = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    with (
        mock.patch.dict(os.environ, clean, clear=True),
        mock.patch.object(subprocess, "Popen", _refuse_start),
        mock.patch.object(os, "fork", _refuse_start),
        mock.patch.object(launches, "join_world", _refuse_start),
        mock.patch.object(errors, "WAIT_FOR_SPEAKER_SECONDS", 0.0),
    ):
        yield


@contextlib.contextmanager
def enforce_deadline() -> Iterator[None]:
    """Raise CommandHung after PATIENCE_SECONDS; a timer set before continues."""

    def hang(number: int, frame: object) -> None:
        raise CommandHung

    handler = signal.signal(signal.SIGALRM, hang)
    rest, _ = signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, rest)
        signal.signal(signal.SIGALRM, handler)


def call_in_process(words: Sequence[str]) -> Outcome:
    """Run a command line until it ends or would start a process."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    code: int | None
    try:
        with enforce_deadline(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except ProcessStarted:
        code = None
    except CommandHung:
        return Outcome(1, "", "hung")
    except Exception:
        err.write(traceback.format_exc())
        code = 1
    out.flush()
    err.flush()
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return Outcome(code, *texts)


def capture_command(
    capsys: pytest.CaptureFixture[str], *words: str, command: str = "compare"
) -> Outcome:
    """Run a command and return its outcome, its output taken from pytest's `capsys`."""
    try:
        code = cli.main([command, *words])
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capsys.readouterr()
    return Outcome(code, out, err)
