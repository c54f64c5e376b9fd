"""Each script of tests/perf runs as it does for somebody who measures, but for seconds only.

What it prints at its end is checked, never a figure.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from command_lines import (
    ROOT,
    needs_mpirun,
    run_command,
    write_warm_python,
)
from patience import PATIENCE_SECONDS
from stored_runs import a_case, a_run, launch_results
from warm_python import warm_python

from ddpbench.records import store

PERF = Path(__file__).parent / "perf"
# Script, its words, and what it prints at its end.
ON_THIS_HOST = [
    ("coverage", ["10"], "worst share of false verdicts: "),
    ("overhead", ["gloo", "1", "0.05"], "1 launches a side; bound "),
    ("scale", ["16"], "run.json MB"),
    ("verdicts", ["noticed", "8"], "launch=0.1, cases=4, earlier=10): "),
    ("verify_cost", ["2", "1", "1"], "and gradients"),
    ("tuning", ["host", "1"], "run 0: "),
    ("watch_cost", ["1", "1", "5"], "CPU of the launch"),
    ("watch_pauses", ["--runs", "1", "--seed", "24", "--only", "save and barrier"], "95 of 100"),
    ("watch_scale", ["16"], "history hold"),
    ("watch_scale", ["growth", "1000"], "growth to 1000 steps: "),
    ("watch_stragglers", ["--runs", "1", "--only", "every fifth"], "size found / planted"),
    ("watchdog_cost", ["1", "100"], "the count of a call over mpi4py: "),
]
OVER_MPI = [
    ("mpi_speed", ["2", "1", "4 B", "1"], "all_gather 4 B"),
]
WITH_RANKS_OF_ITS_OWN = ("healthy", ["2"], "2 healthy runs, ")
ON_SEVERAL_HOSTS = [
    ("links", ["0.05", "2.5 Gbit/s"], "readings off by more than"),
    ("slow_links", ["1", "one of three"], "planted Mbit/s"),
    ("step_links", ["2", "1 Gbit/s"], "of 1 off"),
]
# These take more than ten seconds.
NIGHTLY = {"healthy", "links", "mpi_speed", "overhead", "slow_links", "step_links", "tuning",
           "watch_cost", "watch_stragglers"}  # fmt: skip
# These judge measured figures, which may be bad here, and then exit with 1.
JUDGES = {
    "coverage", "links", "overhead", "slow_links", "step_links", "tuning", "verdicts",
    "watch_pauses", "watch_stragglers",
}  # fmt: skip
NOT_HERE = {
    "peers": "needs a build of OSU's programs",
    "test_speed": "a test file: see the last test",
    "conftest": "of test_speed",
    "bare": "a rank of overhead",
    "train": "a rank of watch_cost",
}


def script(name: str, *rest: Any, marks: tuple[pytest.MarkDecorator, ...] = ()) -> Any:
    """One of the scripts as a case of a test."""
    marks = (*marks, *([pytest.mark.nightly] if name in NIGHTLY else []))
    return pytest.param(name, *rest, marks=marks)


def run_script(cwd: Path, name: str, *words: str, warm: bool = True) -> str:
    """Run a script to its end and return what it prints."""
    command = [str(PERF / f"{name}.py"), *words]
    if warm:  # with all that it starts
        python, extra = warm_python(), {"PYTHON_EXEC": write_warm_python(cwd)}
    else:
        python, extra = [sys.executable], {}
    done = run_command([*python, *command], cwd, 4 * PATIENCE_SECONDS, **extra)
    codes = (0, 1) if name in JUDGES else (0,)
    assert done.returncode in codes, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_each_script_is_run_here_or_has_a_reason() -> None:
    """A new script must be added to a list of this file."""
    here = (*ON_THIS_HOST, *OVER_MPI, WITH_RANKS_OF_ITS_OWN)
    runs = {name for name, *_ in (*here, *ON_SEVERAL_HOSTS)}
    assert {path.stem for path in PERF.glob("*.py")} == runs | NOT_HERE.keys()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "words", "end"),
    [script(*each) for each in ON_THIS_HOST]
    + [script(*each, marks=(needs_mpirun,)) for each in OVER_MPI],
)
def test_a_script_prints_its_table(tmp_path: Path, name: str, words: list[str], end: str) -> None:
    assert end in run_script(tmp_path, name, *words)


@pytest.mark.thorough
@needs_mpirun
def test_launches_are_measured_and_judged(tmp_path: Path) -> None:
    run_script(tmp_path, "verdicts", "pool", "pool", "1", "0.02", "1")
    assert all(store.read(tmp_path / "pool" / f"{each}-00").launches for each in ("gloo", "mpi"))
    for backend, seed in itertools.product(("gloo", "mpi"), range(3)):
        run = a_run(*launch_results(1e-3, a_case(backend=backend), seed=seed))
        store.create(tmp_path / "runs" / f"{backend}-{seed}", run, "")
    assert "judge_tests mpi, no earlier" in run_script(tmp_path, "verdicts", "table", "runs")


@pytest.mark.thorough
@pytest.mark.nightly
def test_healthy_runs_raise_no_alarm(tmp_path: Path) -> None:
    name, words, end = WITH_RANKS_OF_ITS_OWN
    assert end in run_script(tmp_path, name, *words, warm=False)


@pytest.mark.thorough
@pytest.mark.usefixtures("hosts")  # skipped or failed where there can be none
@pytest.mark.parametrize(
    ("name", "words", "end"),
    [script(*each) for each in ON_SEVERAL_HOSTS],
)
def test_a_script_measures_between_hosts(
    tmp_path: Path, name: str, words: list[str], end: str
) -> None:
    assert end in run_script(tmp_path, name, *words)


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_test_of_speed_passes(tmp_path: Path) -> None:
    """One of those that `./run_bench.sh regress` runs, with a single launch."""
    words = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
        "-k",
        "gloo and 4K and broad",
    ]
    command = [sys.executable, "-m", "pytest", *words, "--ddpbench-launches", "1"]
    done = run_command([*command, str(PERF / "test_speed.py")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
