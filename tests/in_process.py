"""Command lines of ddpbench, run in this process."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from command_lines import environment

from ddpbench import cli
from ddpbench.runtime import world
from ddpbench.session import options

PATIENCE_SECONDS = 60.0  # of one command; the machine may be busy


class Started(BaseException):
    """The command would start a process now: the options were accepted."""


class Hung(BaseException):
    """The command did not end in time."""


@dataclass(frozen=True)
class Ended:
    """How a command ended; code None: it would have started a process."""

    code: int | None
    out: str
    err: str


def _start(*args: Any, **settings: Any) -> Any:
    raise Started


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No launcher's variables, and no process is started."""
    clean = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    with (
        mock.patch.dict(os.environ, clean, clear=True),
        mock.patch.object(subprocess, "Popen", _start),
        mock.patch.object(os, "fork", _start),
        mock.patch.object(world, "opened", _start),
        mock.patch.object(options, "WAIT_FOR_SPEAKER_SECONDS", 0.0),
    ):
        yield


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """Raises Hung after PATIENCE_SECONDS; a timer that was set goes on afterwards."""

    def hang(number: int, frame: object) -> None:
        raise Hung

    handler = signal.signal(signal.SIGALRM, hang)
    rest, _ = signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, rest)
        signal.signal(signal.SIGALRM, handler)


def call_in_process(words: Sequence[str]) -> Ended:
    """The command in this process, as far as it starts no other."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    code: int | None
    try:
        with deadline(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except Started:
        code = None
    except Hung:
        return Ended(1, "", "hung")
    except Exception:
        err.write(traceback.format_exc())
        code = 1
    out.flush()
    err.flush()
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return Ended(code, *texts)


Answer = tuple[int, str, str]


def answer(capsys: pytest.CaptureFixture[str], *words: str, command: str = "compare") -> Answer:
    """What the command answers: exit code, stdout, stderr."""
    try:
        code = cli.main([command, *words])
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capsys.readouterr()
    return code, out, err
