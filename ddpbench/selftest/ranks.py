"""Run a command line in a process of its own, with a deadline."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ddpbench
from ddpbench.launch import processes


@dataclass(frozen=True)
class Done:
    """Outcome of a command line: the highest exit code and the output."""

    returncode: int
    stdout: str
    stderr: str


def environment(**extra: str) -> dict[str, str]:
    """Return this environment plus `extra`; this copy of ddpbench is importable in any folder."""
    package = str(Path(ddpbench.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **extra}


def call(arguments: Sequence[str], seconds: float) -> Done:
    """Run a command line on this host without keeping stdout, and end all that it has started.

    Raises TimeoutError with the text on stderr if it runs longer than `seconds`.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment(),
            start_new_session=True,
        )
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            processes.kill_tree(process)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if late:
        raise TimeoutError(f"not done in {seconds:g} s: {text.strip()}")
    return Done(5 if process.returncode < 0 else process.returncode, "", text)
