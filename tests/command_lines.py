"""Command lines of ddpbench as a user types them, run as processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpbench.launch import placement
from ddpbench.records import store
from ddpbench.records.schema import Run

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def environment(**extra: str) -> dict[str, str]:
    """This environment without what a launcher or a user may have set, plus `extra`."""
    foreign = ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    path = f"{ROOT}{os.pathsep}{TESTS}"
    return {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


QUICK = ("--slice", "0.1", "--timeout", "10", "--launches", "1")
MPI = pytest.mark.skipif(
    placement.find_mpirun() is None, reason="there is no mpirun: install the extra `mpi`"
)


def command(*words: str) -> list[str]:
    """ddpbench's front door in this Python."""
    return [sys.executable, "-m", "ddpbench", *words]


def call(
    words: list[str], cwd: Path, timeout: float = 90, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end, which comes."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def stored(cwd: Path) -> tuple[Path, Run]:
    """The one run in this folder's results/."""
    (folder,) = store.runs(cwd / "results")
    return folder, store.read(folder)


def mpirun(nproc: int) -> list[str]:
    """mpirun as a user types it."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [
        str(placement.find_mpirun()),
        *root,
        "--oversubscribe",
        "-n",
        str(nproc),
        sys.executable,
    ]


def torchrun(nproc: int) -> list[str]:
    """torchrun as a user types it."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(nproc),
    ]


@contextlib.contextmanager
def running(words: list[str], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own; whatever the test finds, no rank of it stays behind."""
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen: list[psutil.Process] = []
    try:
        seen = [psutil.Process(process.pid)]
        yield process
    finally:
        for parent in seen:
            with contextlib.suppress(psutil.Error):
                seen = [*parent.children(recursive=True), parent]
        for each in seen:
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.wait()


def wait_for_a_result(cwd: Path) -> None:
    """Until one case is stored."""
    until = time.monotonic() + 40
    while time.monotonic() < until:
        folders = store.runs(cwd / "results")
        if folders and any(outcome.summary for outcome in store.read(folders[0]).outcomes):
            return
        time.sleep(0.05)
    ends = [(run.state, run.state_reason) for run in map(store.read, folders)]
    raise AssertionError(f"nothing was measured: {ends}")


ONE_LINE = re.compile(r"ddpbench: [^\n]+\n")


def refused(done: subprocess.CompletedProcess[str], sentence: str, code: int = 2) -> None:
    """One sentence on stderr, nothing on stdout, this exit code."""
    assert done.returncode == code, done.stderr
    assert ONE_LINE.fullmatch(done.stderr), done.stderr
    assert re.search(sentence, done.stderr), done.stderr
    assert done.stdout == ""
