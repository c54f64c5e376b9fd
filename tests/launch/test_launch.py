"""Who a process is, from what its launcher says; and where ranks meet under Slurm."""

import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from command_lines import mpirun, needs_mpirun, run_command
from frozen import Frozen, verdict_facts

from ddpbench.launch import cleanup, placement, starters
from ddpbench.launch.placement import Placement, Refused
from ddpbench.launch.supervise import Deadline

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {
    "SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "gpu[03-04]",
}  # fmt: skip
SRUN = {**BATCH, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "2"}
# srun --mpi=pmi2 offers PMI too, without the local ranks that an MPI's own launcher sets.
SRUN_PMI2 = {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}
BY_TORCHRUN = Placement("torchrun", 3, 8, 1, 2)
BY_OPEN_MPI = Placement("mpirun", 5, 6, 2, 3)
BY_MPICH = Placement("mpirun", 1, 4, 1, 2)
BY_SRUN = Placement("srun", 3, 4, 1, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, BY_TORCHRUN),
        (OPEN_MPI, BY_OPEN_MPI),
        (MPICH, BY_MPICH),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Placement("mpirun", 1, 2, 1, None)),
        (SRUN, BY_SRUN),
        (SRUN_PMI2, BY_SRUN),
        (BATCH, None),
        # The shell of salloc, and that of `srun --pty`.
        ({**BATCH, "SLURM_STEP_ID": "4294967290"}, None),
        ({**BATCH, "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "41511"}, None),
        ({**SRUN, **TORCHRUN}, BY_TORCHRUN),
        ({**BATCH, **OPEN_MPI}, BY_OPEN_MPI),
        ({**SRUN, **OPEN_MPI}, BY_OPEN_MPI),
        ({**SRUN_PMI2, **MPICH}, BY_MPICH),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Placement("torchrun", 1, 2, 1, None)),
    ],
)
def test_the_nearest_launcher_sets_the_placement(
    environ: dict[str, str], expected: Placement | None
) -> None:
    """torchrun, Open MPI, MPICH and srun set rank, world and local rank. A launcher that runs
    inside another one's job wins. A Slurm batch script has a task's variables and is no rank."""
    assert placement.read_placement(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {**TORCHRUN, "RANK": "8"},
        {**TORCHRUN, "RANK": "one"},
        {**TORCHRUN, "LOCAL_RANK": "2"},
        {**SRUN, "SLURM_LOCALID": "4"},
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], frozen: Frozen) -> None:
    """A rank outside its world, a local rank outside its host, and what is no number are told with
    the very variables, in one line."""
    with pytest.raises(Refused) as caught:
        placement.read_placement(environ)
    assert "\n" not in str(caught.value)
    frozen.text(str(caught.value))


# --- Slurm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[03-07,9],login", "gpu03"),
        ("gpu[007,012-019]-ib,x", "gpu007-ib"),
        ("a-1.example.org,b[1-2]", "a-1.example.org"),
        ("rack[2-3]n[1,4]x,rack9n1x", "rack2n1x"),
    ],
)
def test_the_first_host_of_a_node_list_is_found(nodes: str, first: str) -> None:
    """Plain names, ranges with leading zeros, lists in brackets, suffixes, several brackets."""
    assert placement.slurm_address({"SLURM_STEP_NODELIST": nodes})[0] == first


def test_the_tasks_of_a_step_meet_on_its_first_node() -> None:
    """Address and port depend on node list, job and step alone. Other steps and jobs get other
    ports, and none is privileged or ephemeral. A step without another node meets on loopback."""
    own = {**SRUN, "SLURM_STEP_NODELIST": "gpu[04-05]"}
    other_task = {**own, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "HOSTNAME": "gpu05"}
    assert placement.slurm_address(own) == placement.slurm_address(other_task)
    ports = {
        placement.slurm_address({**own, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})[1]
        for job in (77, 78, 4_000_000_000)
        for step in range(20)
    }
    assert len(ports) == 60
    assert 20_000 <= min(ports) <= max(ports) < 32_000
    nodes = [own, SRUN, {}, {**own, "SLURM_STEP_NUM_NODES": "1"}]
    hosts = [placement.slurm_address(environ)[0] for environ in nodes]
    assert hosts == ["gpu04", "gpu03", "127.0.0.1", "127.0.0.1"]


# --- ports and programs ---------------------------------------------------------------------------


def test_a_free_port_is_reserved() -> None:
    """No other process gets it, and a server that sets SO_REUSEADDR can listen there."""
    port = placement.free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    socket.create_server(("", port)).close()


def test_mpirun_is_taken_from_this_environment_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mpirun beside this Python wins over the one in PATH; with none, the user learns what to
    install."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "mpirun").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(mine / "python"))
    monkeypatch.setenv("PATH", str(theirs))
    assert placement.find_mpirun() == str(mine / "mpirun")
    (mine / "mpirun").unlink()
    assert placement.find_mpirun() == str(theirs / "mpirun")
    monkeypatch.setenv("PATH", str(mine))
    with pytest.raises(Refused, match=r"pip install '\.\[mpi\]'"):
        starters.mpirun([], 1)


@needs_mpirun
def test_mpirun_s_exit_code_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    """`python ARGUMENTS` runs in as many ranks as asked for, more than there are cores too; the
    exit code of the rank that fails is mpirun's, and the signal handlers are as before."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    program = (
        "import sys; from ddpbench.launch.placement import read_placement; "
        "me = read_placement().rank; "
    )
    count = (os.cpu_count() or 1) + 1
    assert starters.mpirun(["-c", program + "print(f'{me}{sys.argv[1]}')", "x"], count) == 0
    assert sorted(capfd.readouterr().out.split()) == sorted(f"{n}x" for n in range(count))
    assert starters.mpirun(["-c", program + "sys.exit(7 * (me == 1))"], 2) == 7
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


LOST = """
import atexit, os, signal
from ddpbench.launch import placement, starters
from ddpbench.runtime.world import join_world
place = placement.read_placement()
blow = lambda: place.rank == 1 and os.kill(os.getpid(), signal.{blow})
{first}
with join_world(place, {seconds}): pass
"""


def lost(blow: str, at_the_end: bool = False) -> str:
    """Of two ranks, number 1 is struck before MPI starts, or after it has ended."""
    first, seconds = ("atexit.register(blow)", 60) if at_the_end else ("blow()", 4)
    return LOST.format(blow=blow, first=first, seconds=seconds)


@pytest.mark.thorough
@needs_mpirun
@pytest.mark.parametrize(
    ("program", "how"),
    [
        (lost("SIGSTOP"), r"\(SIGSTOP\)"),
        pytest.param(lost("SIGSTOP", at_the_end=True), r"\(SIGSTOP\)", marks=pytest.mark.nightly),
        (lost("SIGKILL"), r"by SIGKILL \(9\)"),
    ],
    ids=["stopped", "stopped at its end", "killed"],
)
def test_an_mpi_rank_that_is_lost_is_named_and_nothing_is_left(
    program: str, how: str, tmp_path: Path, frozen: Frozen,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Stopped before MPI starts, where the others cannot leave MPI_Init, or after MPI's end, or
    killed. Shared memory and temporary folders go."""
    shared = Path(tempfile.mkdtemp(dir=cleanup.SHARED))
    monkeypatch.setattr(cleanup, "SHARED", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(placement.__file__).parents[2]))
    code = starters.mpirun(["-c", program], 2, Deadline(4.0))
    err = capfd.readouterr().err
    told = re.findall(rf"^ddpbench: rank \d \(\S+, pid \d+\) .*{how}.*", err, re.MULTILINE)
    assert len(told) == 1, err
    frozen.facts([code, verdict_facts(told[0])["blamed"]])
    assert list(tmp_path.iterdir()) == []
    shared.rmdir()  # which only an empty folder lets one do


@pytest.mark.nightly
@pytest.mark.thorough
@needs_mpirun
def test_under_a_user_s_own_mpirun_a_rank_that_waits_ends_the_job(
    tmp_path: Path, frozen: Frozen
) -> None:
    """Nobody watches from outside then: a rank that waits in MPI_Init does, and ends the job."""
    words = [*mpirun(2), sys.executable, "-c", lost("SIGSTOP")]
    done = run_command(words, tmp_path, TMPDIR=str(tmp_path), OMPI_MCA_btl="^ofi")
    (told,) = re.findall("MPI_Init has not ended within .*stopped", done.stderr)
    frozen.facts([done.returncode, verdict_facts(told)["ranks"]])
