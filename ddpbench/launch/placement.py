"""This process's rank under torchrun, mpirun or srun, and what this host offers to start ranks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpbench.records.wording import install_extra


class Refused(Exception):
    """The request cannot be met: one sentence for the user, exit code 2, nothing measured.

    speaker: the rank that reports it. All ranks raise it together, unless they could not connect.
    """

    def __init__(self, sentence: str, speaker: int = 0) -> None:
        super().__init__(sentence)
        self.speaker = speaker


@dataclass(frozen=True)
class Placement:
    """One rank's position in a launch, from its launcher's variables."""

    launcher: str  # "fork", "torchrun", "mpirun" or "srun"
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None  # None: the launcher does not set it


# launcher → variables of rank, world size, local rank and local world size. The first entry whose
# rank is set wins, because one launcher may run inside another's allocation.
_DDPBENCH = ("DDPBENCH_RANK", "DDPBENCH_WORLD_SIZE", "DDPBENCH_LOCAL_RANK")
_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
_VARIABLES = (
    ("fork", *_DDPBENCH, "DDPBENCH_LOCAL_WORLD_SIZE"),  # by ddpbench itself
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpirun", *_OPEN_MPI),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)
SALLOC_STEP = "4294967290"  # of the shell that salloc opens on the first node (0xfffffffa)


def read_placement(environ: Mapping[str, str] = os.environ) -> Placement | None:
    """Return this process's placement, or None if no launcher started it.

    Raises Refused if a launcher's variables contradict each other.
    """
    for launcher, rank, world, local, local_world in _VARIABLES:
        if rank not in environ or world not in environ:
            continue
        if launcher == "srun" and (
            environ.get("SLURM_STEP_ID", SALLOC_STEP) == SALLOC_STEP
            or ("SLURM_PTY_PORT" in environ and environ[world] == "1")  # srun --pty bash
        ):
            continue  # a shell of Slurm, whose variables look like those of a task
        if rank == "PMI_RANK" and local not in environ and "SLURM_STEP_ID" in environ:
            continue  # srun --mpi=pmi2: no mpirun
        try:
            placement = Placement(
                launcher,
                int(environ[rank]),
                int(environ[world]),
                int(environ.get(local, environ[rank])),
                int(environ[local_world]) if local_world in environ else None,
            )
        except ValueError as error:
            raise Refused(f"{rank}, {world} and {local} must be integers: {error}") from None
        largest = local_world if placement.local_world_size else world
        for name, number, of in (
            (rank, placement.rank, world),
            (local, placement.local_rank, largest),
        ):
            if not 0 <= number < int(environ[of]):
                raise Refused(
                    f"{name}={number} does not fit {of}={environ[of]}: start all ranks with one "
                    "launcher command"
                )
        return placement
    return None


def name_launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Return the launcher of a script's ranks; RANK may have been set by hand."""
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is not None:
        return "ddpbench" if run_id.startswith("ddpbench-") else "torchrun"
    placement = read_placement({name: environ[name] for name in environ if name != "RANK"})
    return placement.launcher if placement is not None else "no launcher"


def slurm_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return host and port of rank 0 in this job step: the first node, and a port from the ids."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        nodes = "127.0.0.1"  # the step's tasks share a host
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # "gpu[03-07,9],login" → "gpu03"
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)
    return host, 20_000 + (job * 31 + step) % 12_000


_reserved: list[socket.socket] = []  # bound, so that no other process gets their ports


def free_port() -> int:
    """Reserve a TCP port for a server that sets SO_REUSEADDR, until this process ends."""
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("", 0))
    _reserved.append(probe)
    return int(probe.getsockname()[1])


def read_restarts() -> str:
    """Return how often torchrun has restarted these ranks; its store outlives them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def require_world_size(nproc: int | None, placement: Placement | None) -> None:
    """Raise Refused if -n contradicts the launcher that has started the ranks."""
    if placement is not None and nproc not in (None, placement.world_size):
        raise Refused(
            f"-n {nproc} does not match the {placement.world_size} ranks that "
            f"{placement.launcher} has started: leave out -n, or give it to the launcher"
        )


# Users, batch systems and pre-emption end a run by these: the ranks store their results first.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Seconds for which Open MPI lets its ranks go on after a signal. Other MPIs kill them at once.
PATIENT = "PRTE_MCA_odls_base_sigkill_timeout"


def find_mpirun() -> str | None:
    """Return the path of mpirun: beside this Python, where wheels put it, else from PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


NO_MPIRUN = (
    "mpirun was not found beside this Python or in PATH: install it, without system packages, with "
    + install_extra("mpi")
)


ORDERLY = (0, 130)  # exit codes after which the other ranks continue
