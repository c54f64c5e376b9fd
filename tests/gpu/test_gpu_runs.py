"""Whole commands on a GPU: one rank, two ranks that share a GPU, nccl, gloo, mpi, DDP, doctor."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from command_lines import ONE_SENTENCE, ROOT, needs_mpirun, read_stored_run, run_command
from frozen import Frozen, finding_facts
from gpu_machine import Machine
from patience import PATIENCE_SECONDS

from ddpbench.records import store
from ddpbench.records.schema import EVENTS, LAUNCH_HIDDEN

TWO = ("-n", "2", "--timeout", "60", "--share-gpu")
SHORT = ("--launches", "1", "--case-time", "0.3")
SMALL = ("--layers", "2", "--width", "256", "--vocabulary", "1000")


def assert_measured(folder: Path, *operations: str) -> None:
    """The only run in this folder is complete: each case has a time, and its checks passed."""
    _, run = read_stored_run(folder)
    assert run.state == "complete", run.state_reason
    assert {result.case.operation for result in run.results} >= set(operations)
    for result in run.results:
        assert not result.wrong, result
        assert result.summary is None or result.summary.median_seconds > 0
    assert any(result.summary for result in run.results)


def test_a_world_of_one(machine: Machine, tmp_path: Path) -> None:
    """`run_bench.sh gpu` ends with a table, and torch guesses no device."""
    place = ["cpu", "--backend", "gloo"] if machine.rehearsal else ["gpu"]
    words = [*place, "-n", "1", "--sizes", "8:64M:x64", "--case-time", "0.5", "--launches", "2"]
    command = [str(ROOT / "run_bench.sh"), *words]
    done = run_command(command, tmp_path, 2 * PATIENCE_SECONDS, VIRTUAL_ENV=sys.prefix)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    for warning in ("Guessing device", "barrier()", "device_id"):
        assert warning not in done.stderr
    assert_measured(tmp_path, "all_reduce", "all_gather", "broadcast")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=needs_mpirun)])
def test_gloo_and_mpi_with_tensors_of_a_shared_gpu(
    machine: Machine, tmp_path: Path, backend: str
) -> None:
    """Two ranks share a GPU, and the results are right. mpi moves tensors of a GPU through pinned
    host memory unless MPI is CUDA-aware, and the table names the way."""
    words = ("--backend", backend, "--sizes", "8,1M")
    done = machine.run(tmp_path, "collectives", *words, *TWO, *SHORT)
    assert done.returncode == 0
    assert_measured(tmp_path, "all_reduce", "all_gather", "broadcast")
    providers = {result.case.provider for result in read_stored_run(tmp_path)[1].results}
    if backend == "mpi" and not machine.rehearsal:
        assert providers <= {"mpi4py, staged through host memory", "mpi4py, CUDA-aware"}


def test_a_flipped_bit_is_found_on_a_shared_gpu(
    machine: Machine, tmp_path: Path, frozen: Frozen
) -> None:
    """A DDP step over gloo has equal replicas; one flipped bit is found and named: exit code 4."""
    words = ("ddp", "--backend", "gloo", "--workload", "mlp", "--width", "64", "--rounds", "3")
    done = machine.run(tmp_path, *words, *TWO)
    assert done.returncode == 0
    done = machine.run(tmp_path, *words, *TWO, "--inject", "bit-flip", "--output", "flipped")
    (result,) = store.read(tmp_path / "flipped").steps
    assert result.replicas is not None
    frozen.facts([done.returncode, finding_facts(result.replicas.findings[0])])
    assert re.search(r"bit \d+", done.stdout)
    assert "rank 1" in done.stdout


def test_too_many_ranks_of_nccl_on_one_gpu_are_refused(machine: Machine, tmp_path: Path) -> None:
    """Two without --share-gpu, and three with it: one sentence, exit code 2."""
    if machine.gpus > 1:
        pytest.skip("this machine has several GPUs")
    for two in (TWO[:-1], (*TWO, "-n", "3")):
        done = machine.run(tmp_path, "collectives", "--backend", "nccl", *two, *SHORT)
        assert done.returncode == 2
        assert ONE_SENTENCE.fullmatch(done.stderr), done.stderr
        assert re.search("GPU|nccl", done.stderr)
        assert done.stdout == ""


@pytest.mark.parametrize("start", ["barrier", "p2p_barrier"])
def test_two_ranks_of_nccl(machine: Machine, tmp_path: Path, start: str) -> None:
    """Two ranks of nccl measure every operation with right results, with both starts. The device's
    time is never longer than the host's, and the case has its definition."""
    words = ("collectives", "--backend", machine.backend, "--op", "all", "--sync", start)
    sizes = ("--sizes", "8,64K,16M")
    done = machine.run(tmp_path, *words, *sizes, *TWO, *SHORT, **machine.two_ranks)
    assert done.returncode == 0
    assert_measured(tmp_path, "all_reduce", "send_recv", "barrier", "all_to_all")
    folder, run = read_stored_run(tmp_path)
    samples = store.read_samples(folder)
    for result in run.results:
        assert result.case.clock == ("host" if machine.rehearsal else "device")
        if machine.rehearsal:
            continue
        own = samples[samples["case"] == result.case.key]
        assert (own["device_ns"] > 0).all(), result.case.key
        if result.case.time_definition == EVENTS:  # they lie between the host's stamps
            assert (own["device_ns"] <= own["exit_ns"] - own["entry_ns"] + 5000).all()
        else:
            assert result.case.time_definition in LAUNCH_HIDDEN


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("ddp", "--workload", "transformer", *SMALL, "--rounds", "5"), "exposed"),
        (("doctor", "--case-time", "5"), "examinations"),
    ],
    ids=["ddp", "doctor"],
)
def test_ddp_and_doctor_on_nccl(
    machine: Machine, tmp_path: Path, words: tuple[str, ...], shown: str
) -> None:
    """A transformer's step has its budget and equal replicas, and the doctor ends with its tables:
    there is no error on two healthy ranks of nccl."""
    done = machine.run(tmp_path, *words, "--backend", machine.backend, *TWO, **machine.two_ranks)
    assert done.returncode in (0, 1)
    assert "ERROR" not in done.stdout
    assert shown in done.stdout
