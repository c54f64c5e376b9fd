"""What both fuzzers share: a command line run in this process, and what must hold of its end."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rank_pool import environment

from ddpbench import cli
from ddpbench.runtime import world
from ddpbench.session import options

CODES = frozenset({0, 1, 2, 3, 4, 5, 130})
PATIENCE_SECONDS = 60.0  # of one command; the machine may be busy
LINES = 3  # that a refusal may have


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


@dataclass
class Tally:
    """What was tried, and what is wrong with how it ended."""

    tried: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    tracebacks: int = 0
    hangs: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, about: str, ended: Ended, fault: str | None) -> None:
        """Count one end, and keep the fault, if it is one, with what led to it."""
        self.tried += 1
        self.ends["started" if ended.code is None else str(ended.code)] += 1
        self.tracebacks += "Traceback" in ended.err
        self.hangs += ended.err == "hung"
        if fault is not None:
            self.faults.append(f"{about}\n  {fault}\n{ended.err[-2000:]}")

    def __str__(self) -> str:
        ends = ", ".join(f"{name}: {count}" for name, count in sorted(self.ends.items()))
        return (
            f"{self.tried} tried (exit codes {ends}), {self.tracebacks} tracebacks, "
            f"{self.hangs} hangs, {len(self.faults)} faults"
        )


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


def called(words: Sequence[str]) -> Ended:
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


def process(words: Sequence[str], cwd: Path) -> Ended:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "ddpbench", *words]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment(), capture_output=True, check=False,
            timeout=PATIENCE_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ended(1, "", "hung")
    return Ended(done.returncode, *(o.decode(errors="replace") for o in (done.stdout, done.stderr)))


def fault_of(ended: Ended) -> str | None:
    """What is wrong with an end, if anything is."""
    if ended.err == "hung":
        return f"it did not end within {PATIENCE_SECONDS:g} s"
    if "Traceback" in ended.err:
        return "a traceback"
    if ended.code is not None and ended.code not in CODES:
        return f"exit code {ended.code}"
    if ended.code in (2, 3) and not 0 < ended.err.count("\n") <= LINES and not ended.out:
        return f"exit code {ended.code} with {ended.err.count(chr(10))} lines on stderr"
    strange = {c for c in ended.out + ended.err if not c.isprintable()} - {"\n"}
    return f"not printable: {strange}" if strange else None


def main(description: str, fuzz: Callable[[random.Random, float], Tally]) -> None:
    """Fuzz by hand for as long as asked, and report."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began = time.monotonic()
    tally = fuzz(random.Random(asked.seed), asked.seconds)
    for fault in tally.faults:
        sys.stdout.write(f"{fault}\n\n")
    sys.stdout.write(f"seed {asked.seed}, {time.monotonic() - began:.0f} s: {tally}\n")
    sys.exit(bool(tally.faults))


def typed(words: Sequence[str]) -> str:
    """The command line, to be run again."""
    return ascii(shlex.join(["ddpbench", *words]))[:1000]
