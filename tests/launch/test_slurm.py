"""Slurm: what a step's ranks are told, and a real Slurm of two nodes."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_lines import ROOT
from patience import PATIENCE_SECONDS
from rank_pool import Done, RankPool
from slurm_cluster import Cluster, explain_missing, start_cluster
from warm_python import warm_python

from ddpbench.records import store

TINY = ("--device", "cpu", "--op", "all_reduce", "--sizes", "4,1K", "--case-time", "0.1")


# --- signals --------------------------------------------------------------------------------------


MANY = ",".join(str(4 * count) for count in range(1, 129))  # sizes, for a run of some seconds
WARNED = """\
import os, pathlib, signal, threading, time

def warn():
    here = pathlib.Path.cwd()
    while not any(here.glob("results/*/samples.parts/part-*")):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGUSR1)

if os.environ["RANK"] == "1":
    threading.Thread(target=warn, daemon=True).start()
"""


def test_sigusr1_ends_a_run_with_what_was_measured(tmp_path: Path, pool: RankPool) -> None:
    """One rank alone gets Slurm's warning in the middle: all stop, the run is marked with the
    signal's name and the rank, its cases are kept, and the exit code is 130."""
    (tmp_path / "warned.py").write_text(WARNED)
    words = ("--device", "cpu", "--op", "all_reduce", "--sizes", MANY, "--case-time", "0.1")
    done: Done = pool.call(2, tmp_path, "collectives", *words, "--import", "warned")
    assert done.returncode == 130, done.stderr
    assert "PARTIAL (interrupted)" in done.stdout
    run = store.read(store.find(str(next((tmp_path / "results").iterdir()))))
    assert (run.state, run.exit_code) == ("interrupted", 130)
    assert "SIGUSR1 (rank 1)" in str(run.state_reason)
    assert run.outcomes


# --- a real Slurm ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Slurm of two nodes. Where there can be none: skipped, but in CI an error."""
    if (reason := explain_missing()) is not None:
        (pytest.fail if os.environ.get("DDPBENCH_TEST_ALL") else pytest.skip)(f"no Slurm: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        start_cluster(Path(folder)) as up,
    ):
        yield up


def measured(folder: Path) -> bool:
    """Whether the run in a folder's results/ has a case on disk."""
    return any(store.read(each.parent).results for each in folder.glob("results/*/run.json"))


def submitted(cluster: Cluster, folder: Path, *words: str) -> str:
    """The number of the job that run_bench.sh submits in a new folder, with two ranks."""
    folder.mkdir()
    line = (ROOT / "run_bench.sh", "slurm", "-N2", "-n2", "--cpus-per-task=2", "--", *words)
    done = cluster.call(*line, cwd=folder)
    assert done.returncode == 0, done.stderr
    return re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout)[1]  # type: ignore[index]


@pytest.mark.thorough
def test_a_job_and_a_direct_srun_leave_complete_runs(cluster: Cluster, tmp_path: Path) -> None:
    """At the same time on the same two nodes, whose names resolve nowhere: four ranks of a bare
    srun, unequally spread, and a job of run_bench.sh. Both meet, measure, and store what they
    measured where they were started; the job's output lies beside its run."""
    direct, job = tmp_path / "direct", tmp_path / "job"
    direct.mkdir()
    words = ("srun", "-N2", "-n4", *warm_python(), "-m", "ddpbench.collectives", *TINY)
    running = cluster.begin(*words, cwd=direct)
    try:
        number = submitted(cluster, job, "collectives", *TINY)
        out, err = running.communicate(timeout=PATIENCE_SECONDS)
    finally:
        running.kill()
    assert running.returncode == 0, err
    assert "where     4 ranks" in out
    output = job / "results" / f"slurm-{number}.out"
    assert cluster.until(lambda: output.exists() and "stored in " in output.read_text())
    for folder, world in ((direct, 4), (job, 2)):
        run = store.read(store.find(str(next(folder.glob("results/*/run.json")).parent)))
        assert (run.state, run.exit_code, len(run.outcomes)) == ("complete", 0, 2)
        assert run.launches[0].launcher == "srun"
        assert run.launches[0].world_size == world
        seen = [rank["variables"] for rank in run.launches[0].ranks]
        assert [int(each["SLURM_PROCID"]) for each in seen] == list(range(world))
        assert {each["SLURM_NODEID"] for each in seen} == {"0", "1"}


@pytest.mark.thorough
def test_scancel_leaves_a_marked_partial_run(cluster: Cluster, tmp_path: Path) -> None:
    """Of two jobs that share the nodes, one is cancelled in the middle and one is warned: each run
    is marked with its signal, keeps its cases, and the table of what was measured still reaches the
    job's output."""
    words = ("--op", "all_reduce", "--sizes", MANY, "--case-time", "0.1")
    cancel = {"SIGTERM": (), "SIGUSR1": ("--signal", "USR1")}
    jobs = {name: submitted(cluster, tmp_path / name, "collectives", *words) for name in cancel}
    for name, job in jobs.items():
        assert cluster.until(lambda folder=tmp_path / name: measured(folder))
        assert cluster.call("scancel", *cancel[name], job, cwd=tmp_path).returncode == 0
    for name, job in jobs.items():
        output = tmp_path / name / "results" / f"slurm-{job}.out"
        ended = cluster.until(lambda output=output: "stored in " in output.read_text())
        assert ended, output.read_text()
        assert "PARTIAL (interrupted)" in output.read_text()
        run = store.read(next((tmp_path / name).glob("results/*/run.json")).parent)
        assert (run.state, run.exit_code) == ("interrupted", 130)
        assert name in str(run.state_reason)
        assert run.outcomes


@pytest.mark.thorough
def test_a_refusal_under_srun_is_one_rank_s(cluster: Cluster, tmp_path: Path) -> None:
    """Four tasks with a typo: one sentence, exit code 2."""
    words = ("srun", "-N2", "-n4", *warm_python(), "-m", "ddpbench.collectives", "--sise", "4")
    done = cluster.call(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("ddpbench: ") == done.stderr.count("--sise") == 1
