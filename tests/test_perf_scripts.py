"""Each script of tests/perf runs as it does for somebody who measures, but only for seconds.

The end of its output is checked, never a figure.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from command_lines import ROOT, needs_mpirun, run_command, write_warm_python
from patience import PATIENCE_SECONDS
from stored_runs import a_case, a_run, launch_results
from warm_python import warm_python

from ddpbench.records import store

PERF = Path(__file__).parent / "perf"
# Script, its words, a part of its output, and its marks. NIGHTLY takes more than ten seconds.
NIGHTLY = (pytest.mark.nightly,)
SCRIPTS: list[tuple[str, list[str], str, tuple[pytest.MarkDecorator, ...]]] = [
    ("healthy", ["2"], "2 healthy runs, ", NIGHTLY),
    ("links", ["collectives", "0.05", "2.5 Gbit/s"], "of 8 rows off", NIGHTLY),
    ("links", ["doctor", "1", "one of three"], "planted Mbit/s", NIGHTLY),
    ("links", ["step", "2", "1 Gbit/s"], "of 1 rows off", NIGHTLY),
    ("mpi_speed", ["2", "1", "4 B", "1"], "all_gather 4 B", (*NIGHTLY, needs_mpirun)),
    ("overhead", ["gloo", "1", "0.05"], "1 launches per side; bound ", NIGHTLY),
    ("scale", ["16"], "run.json MB", ()),
    ("tuning", ["host", "1"], "run 0: ", NIGHTLY),
    ("verdicts", ["simulated", "10"], "worst share of false verdicts: ", ()),
    ("verdicts", ["noticed", "8"], "launch=0.1, cases=4, earlier=10): ", ()),
    ("verify_cost", ["2", "1", "1"], "and gradients", ()),
    ("watch_cost", ["1", "1", "5"], "CPU of the launch", NIGHTLY),
    ("watch_faults", ["--runs", "1", "--only", "save and barrier"], "95 of 100", ()),
    ("watch_faults", ["--runs", "1", "--only", "every fifth step"], "90 of 100", NIGHTLY),
    ("watch_scale", ["16"], "history s", ()),
    ("watchdog_cost", ["1", "100"], "a heartbeat: ", ()),
]
# These judge measured figures, which may be bad here, and then exit with 1.
JUDGES = {"links", "overhead", "tuning", "verdicts", "watch_faults"}
NOT_HERE = {
    "peers": "needs a build of OSU's programs",
    "test_speed": "a test file: see the last test",
    "conftest": "of test_speed",
    "bare": "a rank of overhead",
    "train": "a rank of watch_cost",
}


def run_script(cwd: Path, name: str, *words: str) -> str:
    """Run a script to its end and return its output."""
    command = [str(PERF / f"{name}.py"), *words]
    if name == "healthy":  # it starts a pool of such ranks itself
        python, extra = [sys.executable], {}
    else:  # with all that it starts
        python, extra = warm_python(), {"PYTHON_EXEC": write_warm_python(cwd)}
    done = run_command([*python, *command], cwd, 4 * PATIENCE_SECONDS, **extra)
    codes = (0, 1) if name in JUDGES else (0,)
    assert done.returncode in codes, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_each_script_is_run_here_or_has_a_reason() -> None:
    """A new script must be added to a table of this file."""
    scripts = {name for name, *_ in SCRIPTS}
    assert {path.stem for path in PERF.glob("*.py")} == scripts | NOT_HERE.keys()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "words", "end"), [pytest.param(*each, marks=marks) for *each, marks in SCRIPTS]
)
def test_a_script_prints_its_table(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, words: list[str], end: str
) -> None:
    if name == "links":
        request.getfixturevalue("hosts")  # skips or fails where there can be none
    assert end in run_script(tmp_path, name, *words)


@pytest.mark.thorough
@needs_mpirun
def test_launches_are_measured_and_judged(tmp_path: Path) -> None:
    run_script(tmp_path, "verdicts", "pool", "pool", "1", "0.02", "1")
    assert all(store.read(tmp_path / "pool" / f"{each}-00").launches for each in ("gloo", "mpi"))
    for backend, seed in itertools.product(("gloo", "mpi"), range(3)):
        run = a_run(*launch_results(1e-3, a_case(backend=backend), seed=seed))
        store.create(tmp_path / "runs" / f"{backend}-{seed}", run, "")
    assert "judge_tests     mpi" in run_script(tmp_path, "verdicts", "table", "runs")


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_test_of_speed_passes(tmp_path: Path) -> None:
    """One of the tests of speed, with a single launch."""
    words = ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    words += ["-k", "gloo and 4K and broad", "--ddpbench-launches", "1"]
    done = run_command(
        [sys.executable, "-m", "pytest", *words, str(PERF / "test_speed.py")], tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
