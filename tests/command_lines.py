"""Command lines of ddpbench as a user types them, run as processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from frozen import finding_facts, verdict_facts
from patience import PATIENCE_SECONDS, wait_until
from warm_python import warm_python

from ddpbench.launch import placement
from ddpbench.records import store
from ddpbench.records.schema import Run

TESTS = Path(__file__).parent
ROOT = TESTS.parent
QUICK = ("--case-time", "0.1", "--timeout", "60", "--launches", "1")
ONE_SENTENCE = re.compile(r"ddpbench: [^\n]+\n")

needs_mpirun = pytest.mark.skipif(
    placement.find_mpirun() is None, reason="there is no mpirun: install the extra `mpi`"
)


def clean_environment(**variables: str) -> dict[str, str]:
    """Return this environment without a launcher's variables, plus `variables`.

    Python finds this checkout's ddpbench and the helper modules of the tests in it.
    """
    foreign = ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    path = f"{ROOT}{os.pathsep}{TESTS}"
    return {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def write_warm_python(folder: Path) -> str:
    """Write a program that is a warm Python, with mpirun beside it; return its path.

    As sys.executable it makes warm what ddpbench starts.
    """
    programs = {"python": warm_python(), "mpirun": [placement.find_mpirun() or "false"]}
    for name, words in programs.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    return str(folder / "python")


def ddpbench_command(*words: str) -> list[str]:
    """Return the command line that starts ddpbench in this Python."""
    return [sys.executable, "-m", "ddpbench", *words]


def mpirun(nproc: int) -> list[str]:
    """Return mpirun's words for a program in `nproc` ranks, as a user types them."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = str(placement.find_mpirun())
    return [mpirun, *root, "--oversubscribe", "-n", str(nproc)]


def torchrun(nproc: int) -> list[str]:
    """Return torchrun's command line for `nproc` ranks: only torchrun itself is a warm Python."""
    module = ["-m", "torch.distributed.run", "--standalone"]
    return [*warm_python(), *module, "--nproc-per-node", str(nproc)]


def run_command(
    words: list[str], cwd: Path, timeout: float = PATIENCE_SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line until it ends; fail after `timeout` seconds."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_ddpbench(
    cwd: Path, *words: str, timeout: float = PATIENCE_SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `ddpbench WORDS…` in a warm Python until it ends; fail after `timeout` seconds."""
    return run_command([*warm_python(), "-m", "ddpbench", *words], cwd, timeout, **variables)


def run_all_warm(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `ddpbench WORDS…` as run_ddpbench does; each Python that it starts is warm, too."""
    folder = cwd / "warm"
    folder.mkdir()
    python = write_warm_python(folder)
    return run_ddpbench(cwd, *words, timeout=2 * PATIENCE_SECONDS, PYTHON_EXEC=python)


@contextlib.contextmanager
def running_command(words: list[str], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command line in a session of its own; kill what is left of it at the end."""
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    processes: list[psutil.Process] = []
    try:
        processes = [psutil.Process(process.pid)]
        yield process
    finally:
        for parent in processes:
            with contextlib.suppress(psutil.Error):
                processes = [*parent.children(recursive=True), parent]
        for survivor in processes:
            with contextlib.suppress(psutil.Error):
                survivor.kill()
        process.wait()


def read_stored_run(cwd: Path) -> tuple[Path, Run]:
    """Return the folder and the record of the only run in results/ of `cwd`."""
    (folder,) = store.list_runs(cwd / "results")
    return folder, store.read(folder)


def end_facts(run: Run) -> dict[str, Any]:
    """Return how a run ended: state, exit code, the rank its reason names first, its errors."""
    return {
        "end": [run.state, run.exit_code],
        "blamed": verdict_facts(run.state_reason or "")["blamed"],
        "errors": [finding_facts(each) for each in run.findings if each.severity == "error"],
    }


def wait_for_result(cwd: Path) -> None:
    """Wait until a run in results/ of `cwd` holds a measured case."""

    def has_result() -> bool:
        folders = store.list_runs(cwd / "results")
        return any(each.summary for folder in folders[:1] for each in store.read(folder).outcomes)

    wait_until(has_result, "a result")


def assert_refused(
    done: subprocess.CompletedProcess[str], sentence: str = "", code: int = 2
) -> None:
    """Assert that a command ended with this exit code, one sentence on stderr, and no output."""
    assert done.returncode == code, done.stderr
    assert ONE_SENTENCE.fullmatch(done.stderr), done.stderr
    assert re.search(sentence, done.stderr), done.stderr
    assert done.stdout == ""
