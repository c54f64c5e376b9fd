"""The DDP step end to end, in real process groups: tables, budget, replicas and planted faults."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from command_lines import (
    ddpbench_command,
    end_facts,
    mpirun,
    needs_mpirun,
    read_stored_run,
    run_all_warm,
    run_command,
    run_ddpbench,
    running_command,
    torchrun,
    wait_for_result,
)
from frozen import Frozen
from in_process import call_in_process
from patience import PATIENCE_SECONDS
from rank_pool import Done, RankPool
from warm_python import warm_python

from ddpbench import ddp
from ddpbench.catalog.planting import Fault, Planted
from ddpbench.catalog.workloads import WORKLOADS
from ddpbench.measure import step
from ddpbench.records import store
from ddpbench.records.schema import StepResult
from ddpbench.session import options

SMALL = ("--width", "64", "--depth", "2", "--batch", "8")
FEW = ("--rounds", "6", "--steps-per-round", "2")
# A shape that each workload takes a moment for.
TINY = (
    "--width", "16", "--depth", "2", "--layers", "1", "--sequence", "8", "--vocabulary", "64",
    "--rows", "500", "--batch", "8",
)  # fmt: skip


def read_result(cwd: Path) -> StepResult:
    """Return the only result of the only run in this folder."""
    (result,) = read_stored_run(cwd)[1].steps
    return result


def read_budget(result: StepResult) -> dict[str, float]:
    """Return the budget by name, in seconds."""
    assert result.summary is not None
    return {part.name: part.figure.value for part in result.summary.budget}


def test_torchrun_prints_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases, budget, buckets and replicas from rank 0 alone, exit code 0; what is stored agrees:
    each step was verified, phases add up to the step, both gradients' buckets were seen."""
    words = [*torchrun(2), "--no-python", *warm_python(), "-m", "ddpbench.ddp", *SMALL, *FEW]
    done = run_command(words, tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("forward", "backward", "optimizer", "exposed communication", "wire"):
        assert word in done.stdout, word
    result = read_result(tmp_path)
    assert_equal(result, 12)
    summary = result.summary
    assert summary is not None
    assert (summary.rounds, summary.in_a_row) == (6, 2)
    phases = {phase.name: phase.slowest.value for phase in summary.phases}
    assert 0 < phases["forward"] < phases["step"]
    assert sum(bucket.nbytes for bucket in summary.buckets) == result.case.parameter_nbytes
    assert {"compute", "bucket copies", "exposed communication"} <= set(read_budget(result))
    assert len(set(result.losses)) == 2  # each rank has data of its own
    frame = store.read_samples(read_stored_run(tmp_path)[0])
    of_arm = frame[frame["case"] == "mlp/gloo/cpu/ddp/backward"]
    assert len(of_arm) == 2 * 12
    assert (of_arm["exit_ns"] > of_arm["entry_ns"]).all()
    folder, run = read_stored_run(tmp_path)
    assert run.launches[0].launcher == "torchrun"
    table = pd.read_csv(folder / "table.csv")
    assert len(table) == 1
    monkeypatch.chdir(tmp_path)
    assert call_in_process(["show", "last"]).out == done.stdout


def assert_equal(result: StepResult, steps: int) -> None:
    """Assert that replicas were equal after so many steps, the warm-up not counted."""
    assert result.summary is not None
    assert result.replicas is not None
    assert result.replicas.ok
    assert result.replicas.verified == result.replicas.last_step == result.summary.warm_up + steps


@needs_mpirun
@pytest.mark.thorough
def test_every_workload_runs_on_gloo_and_mpi(tmp_path: Path) -> None:
    """Side by side in one run, replicas are equal after each step, and each rank has its own loss,
    except with contrastive, whose loss is of the joined batch."""
    words = ("ddp", "-n", "2", "--backend", "gloo,mpi", "--workload", "all", "--rounds", "1")
    done = run_all_warm(tmp_path, *words, *TINY, "--steps-per-round", "2", "--no-breakdown")
    assert done.returncode == 0, done.stdout + done.stderr
    results = read_stored_run(tmp_path)[1].steps
    assert {(result.case.workload, result.case.backend) for result in results} == {
        (workload, backend) for workload in WORKLOADS for backend in ("gloo", "mpi")
    }
    for result in results:
        assert_equal(result, 2)
        joined = result.case.workload == "contrastive"
        assert len(set(result.losses)) == (1 if joined else 2)


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.thorough
def test_a_divided_model_steps_on_mpi(tmp_path: Path) -> None:
    """HSDP over two groups of MPI is measured, and its replicas are equal after each step. The
    ranks are mpirun's own and meet over MPI; rank 0 alone prints."""
    words = ["-m", "ddpbench.ddp", "--backend", "mpi", "--parallel", "hsdp", "--mesh", "2x1"]
    words += [*TINY[:4], *FEW, "--no-breakdown"]
    done = run_command([*mpirun(2), *warm_python(), *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(tmp_path)
    assert (result.case.mesh, result.case.world_size) == ((2, 1), 2)
    folder, run = read_stored_run(tmp_path)
    assert run.launches[0].launcher == "mpirun"
    assert (folder / "table.txt").read_text() == done.stdout
    assert_equal(result, 12)


@pytest.mark.parametrize(
    ("options", "recorded", "verified"),
    [
        (
            "--gradient-as-bucket-view --bucket-cap-mb 0.01",
            {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
            16,
        ),
        (
            "--static-graph --amp bf16 --optimizer adamw",
            {"static_graph": True, "amp": "bf16", "optimizer": "adamw"},
            16,
        ),
        (
            "--find-unused-parameters --accumulate 3 --verify 5",
            {"find_unused_parameters": True, "accumulate": 3},
            3,
        ),
        pytest.param(
            "--comm-hook fp16 --optimizer adam",
            {"comm_hook": "fp16", "optimizer": "adam"},
            16,
            marks=pytest.mark.thorough,
        ),
        ("--no-breakdown --verify off", {"accumulate": 1}, 0),
    ],
)
def test_ddp_options(
    pool: RankPool, tmp_path: Path, options: str, recorded: dict[str, Any], verified: int
) -> None:
    """Each of DDP's options is measured, recorded, and leaves the replicas equal."""
    done = pool.call(2, tmp_path, "ddp", *SMALL, *FEW, *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(tmp_path)
    summary, case = result.summary, result.case
    assert summary is not None
    assert {name: getattr(case, name) for name in recorded} == recorded
    assert (result.replicas.verified if result.replicas else 0) == verified
    assert result.replicas is None or result.replicas.ok
    assert ("exposed communication" in read_budget(result)) == ("breakdown" not in options)
    assert ("no_sync" in " ".join(result.notes)) == case.static_graph
    assert (len(summary.buckets) > 1) == (case.bucket_cap_mb == 0.01)


def test_a_hook_that_hangs_on_this_backend_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """PowerSGD on gloo would hang: one sentence, and nothing is measured."""
    done = pool.call(2, tmp_path, "ddp", *SMALL, *FEW, "--comm-hook", "powersgd")
    assert done.returncode == 2
    assert "--comm-hook powersgd on gloo hangs or aborts" in done.stderr
    assert "another --backend" in done.stderr


def test_one_rank_has_a_step_and_no_communication(pool: RankPool, tmp_path: Path) -> None:
    """World size 1 measures phases, and has no figure of communication."""
    done = pool.call(1, tmp_path, "ddp", *SMALL, *FEW)
    assert done.returncode == 0, done.stderr
    assert "exposed communication" not in read_budget(read_result(tmp_path))


def test_steps_are_timed_with_the_devices_clock(pool: RankPool, tmp_path: Path) -> None:
    """With events of the CPU, as on a GPU, the case records it; the budget adds up to the step."""
    (tmp_path / "timed.py").write_text(
        'from ddpbench.runtime import devices\ndevices.KINDS["cpu"].clock = "device"\n'
    )
    done = pool.call(2, tmp_path, "ddp", "--import", "timed", *SMALL, *FEW)
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(tmp_path)
    assert result.case.clock == "device"
    assert result.replicas is not None
    assert result.replicas.verified == 16
    summary, part = result.summary, read_budget(result)
    assert summary is not None
    whole = part["compute"] + part["bucket copies"] + part["exposed communication"]
    assert whole == pytest.approx(summary.step.value)
    assert summary.buckets


def test_an_edited_buffer_is_overwritten(pool: RankPool, tmp_path: Path) -> None:
    """DDP sends rank 0's buffers to all before the next forward: exit code 0."""
    words = ("ddp", "--workload", "convnet", *FEW, "--width", "8", "--batch", "4")
    done = pool.call(2, tmp_path, *words, "--inject", "buffer:step=6,rank=1")
    assert done.returncode == 0, done.stdout + done.stderr
    replicas = read_result(tmp_path).replicas
    assert replicas is not None
    assert replicas.ok
    assert replicas.compared["buffer"] > 0


# It writes how long the last bucket really took, in each rank and step.
STAMPED_LINK = """
import os
from ddpbench.measure import clock, ddp_step

reduce = ddp_step.Hook._reduced

def reduce_and_stamp(hook, bucket):
    began = clock.now_ns()
    future = reduce(hook, bucket)
    if hook.mode == "plain" and hook.least_seconds:
        with open("planted-" + os.environ["RANK"], "a") as file:
            print(clock.now_ns() - began, file=file)
    return future

ddp_step.Hook._reduced = reduce_and_stamp
"""


@pytest.mark.measures_time
def test_a_planted_slow_link_is_recovered(pool: RankPool, tmp_path: Path) -> None:
    """The last bucket takes 40 ms from hand-over to reduction. Exposed communication is the time
    that was really slept, longer on a busy host, within its interval or a millisecond."""
    (tmp_path / "stamped_link.py").write_text(STAMPED_LINK)
    words = ("ddp", "--workload", "linear", "--rounds", "12", "--steps-per-round", "1")
    fault = ("--inject", "slow-link:ms=40,step=1", "--import", "stamped_link")
    done = pool.call(2, tmp_path, *words, *fault)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [map(int, file.read_text().split()) for file in tmp_path.glob("planted-*")]
    planted = median(map(max, zip(*ranks, strict=True))) * 1e-9  # a step takes its slowest rank
    assert planted >= 0.040
    summary = read_result(tmp_path).summary
    assert summary is not None
    (exposed,) = [part for part in summary.budget if part.name == "exposed communication"]
    interval = exposed.figure.interval
    assert interval is not None
    assert interval.low - 1e-3 <= planted <= interval.high + 1e-3
    assert exposed.resolved


@pytest.mark.parametrize(
    ("device", "subjects", "batch", "sequence"),
    [("auto", ("mlp",), 4, 64), ("cpu", ("mlp",), 4, 64), ("cuda", ("transformer",), 8, 1024)],
)
def test_sizes_depend_on_the_kind_of_device(
    device: str, subjects: tuple[str, ...], batch: int, sequence: int
) -> None:
    """Workload, batch and settings have a default for GPUs; given options replace it."""
    parser = options.Parser()
    ddp.add_arguments(parser)
    chosen = ddp.Options.of(parser.parse_args(["--device", device, "--layers", "3"]))
    transformer = WORKLOADS["transformer"]
    assert chosen.subjects == subjects
    assert chosen.batch_of(transformer) == batch
    settings = chosen.settings_of(transformer)
    assert (settings["sequence"], settings["layers"]) == (sequence, 3)
    assert replace(chosen, batch=5).batch_of(transformer) == 5


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--inject", "buffer", *SMALL), "convnet"),
        (("--inject", "nan:rank=2", *SMALL), "rank 2"),
        (("--workload", "embedding", "--rows", "40000000000"), "memory"),
    ],
)
def test_an_impossible_case_is_skipped_by_all_ranks(
    pool: RankPool, tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    """The ranks find the reason and skip the case together: exit code 2."""
    done = pool.call(2, tmp_path, "ddp", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    text = done.stdout + done.stderr
    assert reason in text
    assert "Traceback" not in text


ENDLESS = """
import time
from dataclasses import replace
from ddpbench.catalog.workloads import WORKLOADS

linear = WORKLOADS["linear"]

def build(settings, setup):
    task, steps = linear.build(settings, setup), []
    def loss(model, batch):
        steps.append(1)
        if len(steps) > 6:
            time.sleep(600)
        return task.loss(model, batch)
    return replace(task, loss=loss)

WORKLOADS["endless"] = replace(linear, name="endless", build=build)
"""


@pytest.mark.thorough
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, frozen: Frozen) -> None:
    """SIGINT in the second workload ends the run with 130 and the first one's result."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    words = ["--backend", "gloo", "--import", "endless", "--workload", "linear,endless", *FEW]
    line = ddpbench_command("ddp", "-n", "2", *words, "--no-breakdown")
    with running_command(line, tmp_path) as process:
        wait_for_result(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "PARTIAL (interrupted)" in stdout
    run = read_stored_run(tmp_path)[1]
    frozen.facts(end_facts(run))
    assert run.steps[0].summary is not None


OWN = """
import torch

def build(rank, world_size, device):
    torch.manual_seed(rank)
    model = torch.nn.Linear(6, 3)
    return model, lambda step: torch.randn(4, 6), lambda m, batch: m(batch).square().mean()

def wrong(rank, world_size, device):
    return torch.nn.Linear(6, 3)

def unlike(rank, world_size, device):
    model = torch.nn.Linear(6, 3 + rank)
    return model, lambda step: torch.randn(4, 6), lambda m, batch: m(batch).sum()

def starves(rank, world_size, device):
    def starves(step):
        raise RuntimeError("no data")
    return torch.nn.Linear(6, 3), starves, lambda m, batch: m(batch).sum()

class Half(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.other = torch.nn.Linear(6, 3)

def unused(rank, world_size, device):
    model = Half()
    torch.manual_seed(rank)
    return model, lambda step: torch.randn(4, 6), lambda m, batch: m(batch).square().mean()
"""


def run_own(pool: RankPool, cwd: Path, function: str) -> Done:
    """Measure the user's own model, from the folder where ddpbench is called."""
    (cwd / "mine.py").write_text(OWN)
    return pool.call(2, cwd, "ddp", "--workload", f"mine:{function}", *FEW)


def test_the_users_own_model(pool: RankPool, tmp_path: Path) -> None:
    """It is measured like the others; weights that differ before DDP are equal in it."""
    done = run_own(pool, tmp_path, "build")
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path)
    assert result.case.workload == "mine:build"
    assert result.case.batch == 4  # as its batches are
    assert result.case.parameters == 21
    assert result.replicas is not None
    assert result.replicas.ok


@pytest.mark.parametrize(
    ("function", "reason"),
    [("wrong", "(model, batch, loss)"), ("unlike", "parameter ['weight', [4, 6]")],
)
def test_a_wrong_model_function_is_refused(
    pool: RankPool, tmp_path: Path, function: str, reason: str
) -> None:
    """The sentence has what it should return, or which parameter differs; exit code 2."""
    done = run_own(pool, tmp_path, function)
    assert done.returncode == 2
    assert reason in done.stdout + done.stderr


@pytest.mark.thorough
def test_an_exception_of_the_users_model_ends_the_run(tmp_path: Path) -> None:
    """An error in its first batch fails the run, with the traceback and its line."""
    (tmp_path / "mine.py").write_text(OWN)
    done = run_ddpbench(tmp_path, "ddp", "-n", "2", "--workload", "mine:starves", *FEW)
    assert done.returncode not in (0, 2)
    assert "Traceback" in done.stderr
    assert "at starves (mine.py:" in done.stderr


def test_a_parameter_that_the_loss_does_not_use_is_the_cause(
    pool: RankPool, tmp_path: Path, frozen: Frozen
) -> None:
    """DDP then leaves its bucket unreduced: replicas differ, and the next step names the option."""
    done = run_own(pool, tmp_path, "unused")
    assert done.returncode == 4
    assert "--find-unused-parameters" in done.stdout
    frozen.facts(end_facts(read_stored_run(tmp_path)[1]))


def test_phases_of_several_micro_batches_are_added_up() -> None:
    """Marks begin, (forward, backward) twice, end: 10 + 30 forward, 20 + 40 backward, 5 optimizer;
    and the second step goes on from where it began."""
    marks = [0, 10, 30, 60, 100, 105]
    later = [200 + mark for mark in marks]
    assert step.sum_phases([*marks, *later], 2) == [[0, 40, 100, 105], [200, 240, 300, 305]]


@pytest.mark.parametrize(("before", "steps"), [(False, [3]), (True, [3, 4, 5])])
def test_a_fault_acts_in_its_rank_at_its_step(before: bool, steps: list[int]) -> None:
    """It acts once after the step, or before every step from it on; -1 is the last rank. Where one
    rank calls another collective, the others call the right one."""
    replica = SimpleNamespace(steps=0)
    seen: list[tuple[str, int]] = []
    fault = Fault(
        lambda replica, _: seen.append(("faulty", replica.steps)),
        before=before,
        others=lambda replica, _: seen.append(("right", replica.steps)),
    )
    planted = Planted(fault, {"step": 3.0, "rank": -1.0})
    for replica.steps in range(1, 6):
        for rank in (0, 1):
            planted.act(replica, rank, 2, before)
            planted.act(replica, rank, 2, not before)
    assert seen == [(role, step) for step in steps for role in ("right", "faulty")]
