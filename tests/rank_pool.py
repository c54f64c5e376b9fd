"""A pool of rank processes that the tests share, so that no test waits for imports of torch.

Each rank runs one command line of ddpbench after another, as if a launcher had just started it.
This module, run as a program, is such a rank: it reads orders and writes answers as lines of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_lines import clean_environment
from warm_python import warm_python

from ddpbench import cli
from ddpbench.session import errors


@dataclass(frozen=True)
class Done:
    """Outcome of a command line: the highest exit code and the output."""

    returncode: int
    stdout: str
    stderr: str


def start_rank(prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a rank process; `prefix` is a command that runs it elsewhere, as on another host."""
    python = [sys.executable] if prefix else warm_python()
    return subprocess.Popen(
        [*prefix, *python, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


@dataclass
class RankPool:
    """Rank processes, as many as the largest command so far has needed."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    calls: int = 0

    def call(self, world_size: int, cwd: Path, *words: str) -> Done:
        """Run a command line of ddpbench in `world_size` ranks, which meet over a file in `cwd`."""
        while len(self.processes) < world_size:
            self.processes.append(start_rank())
        self.calls += 1
        meeting = cwd / f"meeting-{self.calls}"
        environs = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        return self.ask(cwd, environs, *words, "--init-method", f"file://{meeting}")

    def ask(self, cwd: Path, environs: Sequence[dict[str, str]], *words: str) -> Done:
        """Run a command line in one rank per environment; return its output and highest code."""
        world_size = len(environs)
        for process, environ in zip(self.processes, environs, strict=False):
            order = {
                "environ": {**environ, "WORLD_SIZE": str(world_size)},
                "cwd": str(cwd),
                "words": words,
            }
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        answers = []
        for process in self.processes[:world_size]:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline() or '{"code": 5}'))
        if any(
            "stdout" not in answer for answer in answers
        ):  # a rank has died: start new ones next time
            for process in self.processes:
                process.kill()
            self.close()
        return Done(
            max(answer["code"] for answer in answers),
            "".join(answer.get("stdout", "") for answer in answers),
            "".join(answer.get("stderr", "") for answer in answers),
        )

    def close(self) -> None:
        """End all ranks; pytest's own deadline kills a rank that hangs."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(30)
        self.processes.clear()


def _read_orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Run orders until standard input ends."""
    errors.WAIT_FOR_SPEAKER_SECONDS = 0.0  # no launcher ends rank 0 here
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output past sys.stdout must not mix with the answers
    for order in _read_orders():
        os.environ.update(order["environ"])
        os.chdir(order["cwd"])
        sys.path.insert(0, order["cwd"])  # as `python -m` does
        sys.argv[1:] = order["words"]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(order["words"])
            except SystemExit as end:
                code = int(end.code or 0)
        sys.path.remove(order["cwd"])
        answer = {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
