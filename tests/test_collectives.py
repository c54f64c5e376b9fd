"""The sweep end to end, in real process groups: launchers, faults, interruptions."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import psutil
import pytest
from command_lines import (
    QUICK,
    clean_environment,
    ddpbench_command,
    end_facts,
    needs_mpirun,
    read_stored_run,
    run_all_warm,
    run_ddpbench,
    running_command,
    wait_for_result,
)
from frozen import Frozen, verdict_facts
from in_process import call_in_process
from patience import PATIENCE_SECONDS, wait_until
from rank_pool import RankPool
from warm_python import warm_python

from ddpbench.analysis.flags import BUSY_SHARE
from ddpbench.records import store


def read_sizes(text: str) -> list[str]:
    """Return the sizes of the rows, in order."""
    return re.findall(r"^ *(\d+ (?:B|[KMG]iB))  ", text, re.MULTILINE)


@needs_mpirun
def test_one_command_measures_gloo_and_mpi_into_one_table(tmp_path: Path) -> None:
    """Both backends are measured and checked at each size, and the files load with pandas."""
    words = ("--backend", "gloo,mpi", "-n", "2", "--sizes", "8,64K", *QUICK)
    done = run_all_warm(tmp_path, "collectives", *words)
    assert done.returncode == 0, done.stderr
    for text in ("all_reduce  float32", "all_gather  float32", "broadcast  float32", "Open MPI"):
        assert text in done.stdout
    folder, run = read_stored_run(tmp_path)
    assert run.state == "complete"
    assert {(r.case.backend, r.case.operation, r.case.nbytes) for r in run.results} == {
        (backend, operation, nbytes)
        for backend in ("gloo", "mpi")
        for operation in ("all_reduce", "all_gather", "broadcast")
        for nbytes in (8, 65536)
    }
    assert all(r.summary and r.summary.repetitions >= 6 and r.checks >= 2 for r in run.results)
    assert not any(r.wrong for r in run.results)
    table = pd.read_csv(folder / "table.csv")
    assert len(table) == 12
    assert (table["time"] > 0).all()
    samples = pd.read_parquet(folder / "samples.parquet")
    assert set(samples["rank"]) == {0, 1}
    assert (samples["exit_ns"] >= samples["entry_ns"]).all()
    # The stored figure follows from the stored samples.
    first = run.results[0]
    assert first.summary is not None
    its = samples[(samples["case"] == first.case.key) & ~samples["warm_up"]]
    t_max = (its["exit_ns"] - its["entry_ns"]).groupby(its["repetition"]).max()
    assert t_max.median() * 1e-9 / first.calls == pytest.approx(first.summary.median_seconds)
    assert (folder / "table.txt").read_text() == done.stdout


def test_different_options_are_found_before_measuring(tmp_path: Path, frozen: Frozen) -> None:
    """A rank with another option is named, with the option, once, and nothing is measured. The
    ranks find each other by the variables that srun sets."""
    common = {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1"}
    tasks = [
        subprocess.Popen(
            [*warm_python(), "-m", "ddpbench.collectives", "--sizes", size, *QUICK],
            cwd=tmp_path,
            env=clean_environment(
                SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_JOB_ID=str(os.getpid()), **common
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, size in (("0", "4"), ("1", "8"))
    ]
    (_, first), (_, second) = [task.communicate(timeout=PATIENCE_SECONDS) for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2]
    frozen.verdict(first)
    assert second == ""
    assert not (tmp_path / "results").exists()


def test_every_operation_form_place_and_pipelining_is_checked(
    pool: RankPool, tmp_path: Path
) -> None:
    """All operations in both forms, in and out of place, on three ranks, have right results."""
    words = ["--op", "all", "--form", "tensor,list", "--place", "in,out", "--sizes", "1000"]
    done = pool.call(3, tmp_path, "collectives", "--backend", "gloo", *words, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    _, run = read_stored_run(tmp_path)
    measured = {(r.case.operation, r.case.form, r.case.in_place) for r in run.results if r.summary}
    assert len(measured) >= 15
    assert {operation for operation, _, _ in measured} == {
        "all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "all_to_all",
        "gather", "scatter", "barrier", "send_recv", "bidirectional",
    }  # fmt: skip
    assert all(r.checks and not r.wrong for r in run.results if r.summary and r.case.nbytes)


def test_a_quiet_run_reports_why_nothing_was_measured(pool: RankPool, tmp_path: Path) -> None:
    """The reason comes last on stderr, with exit code 2."""
    words = ("--op", "all_reduce", "--sizes", "4096G", *QUICK, "--quiet")
    done = pool.call(2, tmp_path, "collectives", "--backend", "gloo", *words)
    assert done.returncode == 2, done.stdout
    _, run = read_stored_run(tmp_path)
    assert done.stderr.splitlines()[-1].endswith(str(run.results[0].reason))


@needs_mpirun
@pytest.mark.thorough
def test_dtypes_and_reduce_ops_are_right_or_refused_together(tmp_path: Path) -> None:
    """Cases that a backend lacks are skipped on all ranks, with a reason; the rest is right."""
    words = ["--op", "all_reduce", "--dtype", "all", "--reduce-op", "sum,max"]
    words += ["--sizes", "100", *QUICK, "--case-time", "0.02"]
    done = run_all_warm(tmp_path, "collectives", "--backend", "gloo,mpi", "-n", "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    _, run = read_stored_run(tmp_path)
    skipped = [r for r in run.results if r.summary is None]
    right = {(r.case.backend, r.case.dtype, r.case.reduce_op) for r in run.results if r.summary}
    assert all(r.reason for r in skipped)
    for backend in ("gloo", "mpi"):
        for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8"):
            assert {(backend, dtype, "sum"), (backend, dtype, "max")} <= right
    assert ("mpi", "bfloat16", "sum") in right


def test_pipelined_and_async_calls_are_waited_for(pool: RankPool, tmp_path: Path) -> None:
    """Pipelined repetitions hold several calls and no percentiles, and their results are right.
    The run records the time of a cache line between the ranks' cores, which both ranks wait for.
    `--format json` prints the stored run."""
    patient = (
        f"from ddpbench.measure import calibrate\ncalibrate.DEADLINE_NS = {PATIENCE_SECONDS:.0f}e9"
    )
    (tmp_path / "patient.py").write_text(patient)
    words = ["--mode", "pipelined", "--in-flight", "4", "--op", "all_reduce", "--sizes", "4,64K"]
    words += ["--import", "patient"]
    words += ["--backend", "gloo", "--format", "json"]
    done = pool.call(2, tmp_path, "collectives", *words, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    _, run = read_stored_run(tmp_path)
    assert json.loads(done.stdout)["id"] == run.id
    for result in run.results:
        assert result.summary is not None
        case = result.case
        assert (result.calls, case.async_op, case.start) == (4, True, "none")
        assert result.summary.percentiles_seconds == {}
        assert result.checks >= 2
        assert (result.handoff_seconds or 0) > 0


def test_one_rank_is_measured_without_bus_bandwidth(pool: RankPool, tmp_path: Path) -> None:
    """World size 1 has a bus bandwidth of 0, and no time between cores."""
    words = ["--op", "all_reduce", "--sizes", "1K", *QUICK]
    done = pool.call(1, tmp_path, "collectives", "--backend", "gloo", *words)
    assert done.returncode == 0, done.stderr
    assert "bus bandwidth is 0" in done.stdout
    table = pd.read_csv(read_stored_run(tmp_path)[0] / "table.csv")
    assert list(table["busbw"]) == [0.0]
    assert [r.handoff_seconds for r in read_stored_run(tmp_path)[1].results] == [None]


def test_a_case_that_does_not_fit_is_skipped_on_all_ranks(
    pool: RankPool, tmp_path: Path, frozen: Frozen
) -> None:
    """A size beyond the memory is skipped with both figures; the others are measured."""
    words = ["--op", "all_gather", "--sizes", "4K,4096G", *QUICK]
    done = pool.call(2, tmp_path, "collectives", "--backend", "gloo", *words)
    assert done.returncode == 0, done.stderr
    assert read_sizes(done.stdout) == ["4 KiB"]
    run = read_stored_run(tmp_path)[1]
    skipped = [result for result in run.results if result.reason]
    assert str(skipped[0].reason).count(" GB") == 2
    frozen.facts([[each.case.operation, each.case.nbytes] for each in skipped])


@pytest.mark.parametrize(
    ("fault", "ranks", "sizes"),
    [
        ("element:1:1024", {1}, {1024}),
        ("drop:0", {0, 1}, {4, 1024, 65536}),
        ("stale", {0, 1}, {4, 1024, 65536}),
        ("early", {0, 1}, {4, 1024, 65536}),
    ],
)
def test_wrong_results_are_caught_with_op_size_rank_and_index(
    pool: RankPool, tmp_path: Path, frozen: Frozen, fault: str, ranks: set[int], sizes: set[int]
) -> None:
    """A planted wrong result is named with operation, size, rank and index, and exits with 4."""
    words = ["--import", "faulty_backend", "--backend", "faulty", "--op", "all_reduce"]
    words += ["--sizes", "4,1K,64K", *QUICK]
    done = pool.call(2, tmp_path, "collectives", *words, FAULT=fault)
    assert done.returncode == 4, done.stdout + done.stderr
    _, run = read_stored_run(tmp_path)
    found = {(wrong.rank, r.case.nbytes) for r in run.results for wrong in r.wrong}
    assert found == {(rank, size) for rank in ranks for size in sizes}
    named = ("operation", "nbytes", "rank")
    errors = [[each.code, *(each.place[name] for name in named)] for each in run.findings
              if each.severity == "error"]  # fmt: skip
    frozen.facts({"end": [run.state, run.exit_code], "errors": sorted(errors)})
    if fault.startswith("element"):
        (wrong,) = [wrong for r in run.results for wrong in r.wrong]
        assert wrong.index == 128
        assert float(wrong.got) == float(wrong.expected) + 1


def wait_for_ranks(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Return the rank processes below a launcher, in order of rank: forks, or mpirun's programs."""

    def find_ranks() -> list[psutil.Process]:
        ranked = {}
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith("ddpbench-r"):
                    ranked[int(child.name().removeprefix("ddpbench-r"))] = child
                elif "ddpbench.collectives" in child.cmdline() and "python" in child.name():
                    number = child.environ().get("OMPI_COMM_WORLD_RANK")
                    if number is not None:
                        ranked[int(number)] = child
        return [ranked[rank] for rank in sorted(ranked)] if len(ranked) == count else []

    return wait_until(find_ranks, "the start of the ranks")


def test_a_dead_rank_is_named_and_the_rest_is_kept(tmp_path: Path, frozen: Frozen) -> None:
    """The other rank ends and names it once, and `show` prints the partial result."""
    words = ["--backend", "gloo", "-n", "2", "--op", "all_reduce", "--sizes", "4:1M:x2"]
    run_it = ddpbench_command("collectives", *words, "--case-time", "1", "--launches", "2")
    with running_command(run_it, tmp_path) as process:
        ranks = wait_for_ranks(process, 2)
        wait_for_result(tmp_path)
        ranks[0].kill()
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 5, stderr
    (sentence,) = re.findall(rf"ddpbench: rank 0 \(.*, pid {ranks[0].pid}\) .*", stderr)
    assert "has died" in sentence
    named = verdict_facts(sentence)
    assert (named["ranks"], len(named["places"])) == ([0, 1], 1), sentence
    assert not any(rank.is_running() and rank.status() != "zombie" for rank in ranks)
    folder, run = read_stored_run(tmp_path)
    frozen.facts(end_facts(run))
    assert "PARTIAL (failed)" in stdout
    shown = call_in_process(["show", str(folder)])
    assert shown.code == 0
    assert "PARTIAL (failed): rank" in shown.out
    assert read_sizes(shown.out)
    assert len(store.read_samples(folder)) > 0


@pytest.mark.parametrize(
    ("fault", "deadline"),
    [("raise:1", "60"), pytest.param("hang:1", "20", marks=pytest.mark.nightly)],
    ids=["raise:1", "hang:1"],
)
def test_a_rank_that_raises_or_sleeps_is_named_with_its_line(
    tmp_path: Path, frozen: Frozen, fault: str, deadline: str
) -> None:
    """An error in one rank, and a rank that never joins, are reported with the line of code."""
    words = ["--import", "faulty_backend", "--backend", "faulty", "--op", "all_reduce", "-n", "2"]
    words += ["--sizes", "4", "--case-time", "1", "--timeout", deadline]
    done = run_ddpbench(tmp_path, "collectives", *words, FAULT=fault)
    assert done.returncode == 5
    (sentence,) = re.findall(r"rank 1: ([^;]*)", done.stderr)
    assert re.search(r"\(faulty_backend\.py:\d+\)", sentence), done.stderr
    assert ("--timeout" in sentence) == (fault == "hang:1")
    end = end_facts(read_stored_run(tmp_path)[1])
    frozen.facts([end["end"], end["errors"]])  # the reason may name both ranks
    # Twice in the sentences and once in the traceback.
    assert done.stderr.count("planted error") == (3 if fault == "raise:1" else 0)


@pytest.mark.measures_time
def test_a_short_case_notices_a_busy_host(pool: RankPool, tmp_path: Path) -> None:
    """A tenth of a second on one case is enough to see processes that use all cores."""
    spin = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    with contextlib.ExitStack() as ends:
        for _ in range(os.cpu_count() or 1):
            process = ends.enter_context(subprocess.Popen(spin, stdout=subprocess.PIPE))
            ends.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()  # it is busy from here on
        words = ("--op", "all_reduce", "--sizes", "4K", "--backend", "gloo", *QUICK)
        done = pool.call(2, tmp_path, "collectives", *words)
    assert done.returncode == 0, done.stderr
    (result,) = read_stored_run(tmp_path)[1].results
    assert (result.others_share or 0) > BUSY_SHARE


@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("mpi", marks=[needs_mpirun, pytest.mark.nightly])]
)
def test_ctrl_c_leaves_a_partial_marked_result(
    tmp_path: Path, frozen: Frozen, backend: str
) -> None:
    """SIGINT to the terminal's process group ends the run with 130 and what was measured."""
    words = ["--backend", backend, "-n", "2", "--op", "all_reduce", "--sizes", "4:1M:x2"]
    with running_command(
        ddpbench_command("collectives", *words, "--case-time", "1"), tmp_path
    ) as process:
        wait_for_ranks(process, 2)
        wait_for_result(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    folder, run = read_stored_run(tmp_path)
    frozen.facts(end_facts(run))
    assert "PARTIAL (interrupted)" in stdout
    assert any(result.summary for result in run.results)
    assert len(store.read_samples(folder)) > 0


@pytest.mark.thorough
def test_launches_are_fresh_processes_of_one_run(tmp_path: Path) -> None:
    """Two runs started together in one folder end well, each with a folder of its own. Each launch
    has pids of its own; below six launches there is no interval over them."""
    words = ["--backend", "gloo", "-n", "2", "--launches", "2", "--op", "barrier"]
    words += ["--case-time", "0.05"]
    with ThreadPoolExecutor() as starter:
        calls = [starter.submit(run_ddpbench, tmp_path, "collectives", *words) for _ in range(2)]
    both = [call.result() for call in calls]
    assert [done.returncode for done in both] == [0, 0], both
    folders = store.list_runs(tmp_path / "results")
    runs = [store.read(folder) for folder in folders]
    assert [(run.state, len(run.results)) for run in runs] == [("complete", 2)] * 2
    pids = {rank["pid"] for run in runs for each in run.launches for rank in each.ranks}
    assert len(pids) == 8
    assert pd.read_csv(folders[0] / "table.csv")[["low", "high"]].isna().all(axis=None)
