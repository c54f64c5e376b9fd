"""Start the ranks of a launch on this host, under torchrun's agent or mpirun, and watch them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ddpbench.launch import family, rendezvous, siblings, supervise
from ddpbench.launch.placement import NO_MPIRUN, PASSED_ON, PATIENT, Refused, find_mpirun
from ddpbench.launch.processes import forward_signals

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

VERSION_SECONDS = 5.0  # for `mpirun --version`, which takes a hundredth of that


def torchrun(
    arguments: Sequence[str], nproc: int, deadline: supervise.Deadline | None = None
) -> int:
    """Run `python ARGUMENTS` in nproc ranks of this host under torchrun's agent.

    Returns the exit code, 5 if a rank was killed or stopped. This uses torch's launcher API, which
    gives the ranks' exit codes; the command prints a traceback and exits with 1.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with family.open_family() as kin, _set_environment(kin.environ()):
        config = _configure_torchrun(nproc, kin.folder)
        watch = supervise.Watch(kin, nproc, deadline or supervise.Deadline(), root=psutil.Process())
        before = signal.signal(signal.SIGUSR1, _end_agent)
        try:
            with supervise.watch_ranks(watch):
                elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            if first.exitcode < 0:
                watch.report_killed(rank, -first.exitcode)
            codes = [failure.exitcode for failure in error.failures.values()]
            return watch.final_code(max((code for code in codes if code > 0), default=5))
        except SignalException as error:
            return 130 if error.sigval in PASSED_ON else 5
        finally:
            signal.signal(signal.SIGUSR1, before)
    return 0


def _configure_torchrun(nproc: int, folder: Path) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig

    rendezvous_handler_registry.register(rendezvous.TORCHRUN_BACKEND, rendezvous.torchrun_handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"ddpbench-{os.getpid()}",
        rdzv_backend=rendezvous.TORCHRUN_BACKEND,  # torch's own would listen on all interfaces
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),  # torchrun leaves its own behind
    )


@contextlib.contextmanager
def _set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for the processes that this one starts meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _end_agent(received: int, _: object) -> None:
    """Do with a signal that torchrun's agent ignores what it does with SIGTERM.

    It passes the signal on to its ranks and waits for them.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    raise SignalException(f"got signal {received}", signal.Signals(received))


def mpirun(arguments: Sequence[str], nproc: int, deadline: supervise.Deadline | None = None) -> int:
    """Run `python ARGUMENTS` in nproc ranks of this host under mpirun.

    Returns its exit code, 5 if it or a rank was killed or stopped. Raises Refused without mpirun.
    """
    if (command := find_mpirun()) is None:
        raise Refused(NO_MPIRUN)
    deadline = deadline or supervise.Deadline()
    with family.open_family() as kin:
        environ = _mpi_environ(command) | kin.environ()
        if (version := _read_version(command, environ, deadline)) is None:
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
        received = []

        def forward(number: int) -> None:
            received.append(number)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            watch.request_end()

        with forward_signals(forward):
            with supervise.watch_ranks(watch):
                code = process.wait()
            # After a signal mpirun's own code depends on which rank left first; the ranks have
            # marked what else went wrong.
            return 130 if received and code else watch.final_code(code)


def _mpi_environ(command: str) -> dict[str, str]:
    """The environment for mpirun and its ranks."""
    return {
        # Open MPI's search for libfabric's networks takes a second; no rank here is beyond one.
        "OMPI_MCA_btl": "^ofi",
        # Open MPI kills its ranks a second after Ctrl-C: too soon to store what they have.
        "PRTE_MCA_odls_base_sigkill_timeout": "15",
        **os.environ,
        # Intel's mpirun is a script that takes the first mpiexec.hydra in PATH, of any MPI.
        "PATH": f"{Path(command).parent}:{os.environ.get('PATH', '')}",
    }


def _read_version(
    command: str, environ: Mapping[str, str], deadline: supervise.Deadline
) -> str | None:
    """The output of `mpirun --version`; None, after a report, if it was stopped or killed."""
    process = subprocess.Popen(
        [command, "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environ,
    )
    end, output = "was killed", ""
    try:
        output = process.communicate(timeout=max(deadline.seconds, VERSION_SECONDS))[0]
    except subprocess.TimeoutExpired:
        end = "has not ended in time: see whether somebody stops it"
        process.kill()
        process.communicate()
    if process.returncode >= 0:
        return output
    name = siblings.describe_process("`mpirun --version`", process.pid)
    deadline.report(f"{name} {end}, and no rank was started")
    return None


STARTERS = {"torchrun": torchrun, "mpirun": mpirun}
