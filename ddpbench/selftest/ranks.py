"""A command line run elsewhere than in this process, with a deadline, and how it ended."""

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
    """What a command line ended with: the highest exit code, all that was printed."""

    returncode: int
    stdout: str
    stderr: str


def environment(**extra: str) -> dict[str, str]:
    """This environment plus `extra`, in which this very ddpbench is found from everywhere."""
    package = str(Path(ddpbench.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **extra}


def call(words: Sequence[str], seconds: float) -> Done:
    """Run words on this host; stdout is not kept. Raises TimeoutError, with what was printed, when
    they have not ended in time; nothing that they have started stays."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            env=environment(), start_new_session=True,
        )  # fmt: skip
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
