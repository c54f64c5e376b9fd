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

import psutil

from ddpbench.launch import family, rendezvous, supervise
from ddpbench.launch.placement import NO_MPIRUN, PASSED_ON, PATIENT, Refused, find_mpirun
from ddpbench.launch.processes import passing_on

VERSION_SECONDS = 5.0  # of which it takes a hundredth


def torchrun(
    arguments: Sequence[str], nproc: int, deadline: supervise.Deadline | None = None
) -> int:
    """Run `python ARGUMENTS` in nproc ranks of this host under torchrun's agent; the exit code, 5
    where a rank was killed or stopped.

    torch's own launcher API instead of the command, because it gives the ranks' exit codes where
    the command prints a traceback and exits with 1.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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


def mpirun(arguments: Sequence[str], nproc: int, deadline: supervise.Deadline | None = None) -> int:
    """Run `python ARGUMENTS` in nproc ranks of this host under mpirun; its exit code, 5 where it or
    a rank was killed or stopped.

    Raises Refused where there is no mpirun.
    """
    if (command := find_mpirun()) is None:
        raise Refused(NO_MPIRUN)
    # Intel's mpirun is a script that takes the first mpiexec.hydra in PATH, be it another MPI's.
    # Open MPI's kills its ranks a second after Ctrl-C: too soon for them to store what they have.
    # Open MPI's search for libfabric's networks takes a second, and here no rank is beyond one.
    environ = {
        "OMPI_MCA_btl": "^ofi",
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

        def pass_on(received: int) -> None:
            passed_on.append(received)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, received)
            watch.ask()

        with passing_on(pass_on):
            with supervise.watched(watch):
                code = process.wait()
            # After a signal mpirun's own code depends on which rank left first; the ranks have
            # marked what else went wrong.
            return 130 if passed_on and code else watch.code(code)


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
    who = family.named("`mpirun --version`", process.pid)
    deadline.say(f"{who} {end}, and no rank was started")
    return None


STARTERS = {"torchrun": torchrun, "mpirun": mpirun}
