"""A pool of rank processes that the tests share, so that no test waits for imports of torch.

Each rank runs one command line of ddpbench after another, each in a fork, as if a launcher had just
started it: whatever one changes is gone before the next. This module, run as a program, is such a
rank: it reads orders and writes answers as lines of JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import NoReturn, TextIO

from command_lines import clean_environment
from patience import PATIENCE_SECONDS
from warm_python import PRELOADED, warm_python

import ddpbench
from ddpbench import cli
from ddpbench.launch.placement import free_port
from ddpbench.session import errors

IMPORTED = ("analysis", "doctor", "measure", "present", "replicas", "session")  # before any order


@dataclass(frozen=True)
class Done:
    """The highest exit code and the output of a command line."""

    returncode: int
    stdout: str
    stderr: str


def start_rank(prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a rank process; `prefix` is a command that runs it elsewhere, as on another host."""
    return subprocess.Popen(
        [*prefix, *warm_python(), __file__],
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

    def call(self, world_size: int, cwd: Path, *words: str, **variables: str) -> Done:
        """Run a command line of ddpbench in `world_size` ranks, on this host."""
        environs = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), **variables} for rank in range(world_size)
        ]
        return self.ask(cwd, environs, *words)

    def ask(self, cwd: Path, environs: Sequence[dict[str, str]], *words: str) -> Done:
        """Run a command line in one rank per environment; return its output and highest code."""
        world_size, port = len(environs), str(free_port())
        while len(self.processes) < world_size:
            self.processes.append(start_rank())
        for process, environ in zip(self.processes, environs, strict=False):
            order = {
                "environ": {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "WORLD_SIZE": str(world_size),
                    **environ,
                },
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
            process.wait(PATIENCE_SECONDS)
        self.processes.clear()


def main() -> None:
    """Run each order in a fork of this process, until standard input ends."""
    errors.WAIT_FOR_SPEAKER_SECONDS = 0.0  # no launcher ends rank 0 here
    answers = os.fdopen(os.dup(1), "w")
    faulthandler.enable()
    os.dup2(2, 1)  # output past sys.stdout must not mix with the answers
    own = (module.name for module in walk_packages(ddpbench.__path__, "ddpbench."))
    for name in (*PRELOADED, *(name for name in own if name.split(".")[1] in IMPORTED)):
        if not name.endswith("__main__"):
            import_module(name)
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_order(answers, **json.loads(line))
        if status := os.waitpid(child, 0)[1]:
            ended = f"the rank ended by itself, with status {os.waitstatus_to_exitcode(status)}\n"
            answers.write(json.dumps({"code": 5, "stderr": ended}) + "\n")
            answers.flush()


def run_order(answers: TextIO, environ: dict[str, str], cwd: str, words: list[str]) -> NoReturn:
    """Run a command line of ddpbench, answer with its exit code and output, and end this process.

    A rank that its watchdog ends by `os._exit` answers, too: with the verdict that it has printed.
    """
    os.environ.update(environ)
    os.chdir(cwd)
    sys.path.insert(0, cwd)  # as `python -m` does
    sys.argv[1:] = words
    out, err = io.StringIO(), io.StringIO()
    leave, rank = os._exit, os.getpid()

    def end(code: int) -> NoReturn:
        if os.getpid() != rank:  # a child of the rank
            leave(code)
        answer = {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        leave(0)

    os._exit = end
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    end(code)


if __name__ == "__main__":
    main()
