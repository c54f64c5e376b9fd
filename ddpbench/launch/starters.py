"""Start the ranks of a launch on this host, forked or under mpirun, and watch them.

Forked from a process that has torch in memory, ranks start in a fraction of a second: fresh
processes and groups, as under a launcher, but none spends seconds on importing torch. On the CPU
only: a process that uses CUDA cannot be forked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from ddpbench.launch import sockets, supervise
from ddpbench.launch.cleanup import open_family
from ddpbench.launch.placement import NO_MPIRUN, PASSED_ON, PATIENT, Refused, find_mpirun
from ddpbench.launch.supervise import Deadline, Watch
from ddpbench.records import redact

PRELOADED = (
    "torch.distributed",
    "scipy.special",
    "pandas",
    "pyarrow.parquet",
    "ddpbench.measure.repetitions",
)
ENDED = (-signal.SIGTERM, 130)  # codes of a rank that was asked to end


def start(
    launcher: str,
    arguments: Sequence[str],
    main: Callable[[], int] | None,
    nproc: int,
    deadline: Deadline,
    preloaded: Sequence[str] = PRELOADED,
) -> int:
    """Start nproc ranks of this host: under mpirun, else forked. Return the exit code.

    main: what forked ranks call; None: like ranks under mpirun, they run `python ARGUMENTS`.
    preloaded: as in `run_forked`.
    """
    if launcher == "mpirun":
        return mpirun(arguments, nproc, deadline)
    if main is not None:
        return run_forked(main, nproc, preloaded, deadline)
    line = [sys.executable, *arguments]
    return run_forked(lambda: os.execv(line[0], line), nproc, ("torch.distributed",), deadline)


@dataclass
class Fork:
    """A forked rank."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, below 0 if a signal ended the rank; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def run_forked(
    main: Callable[[], int],
    nproc: int,
    preloaded: Sequence[str] = PRELOADED,
    deadline: Deadline | None = None,
) -> int:
    """Call main in nproc forked ranks of this host, and return the highest exit code.

    preloaded: modules that all ranks need, imported once. The code is 5 if a rank was killed or
    stopped. When one fails, the others are asked to end, then killed.
    """
    for name in preloaded:
        import_module(name)
    gate, opener = os.pipe()
    ranks: list[Fork] = []
    with open_family() as kin, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that idle in OpenBLAS
        with supervise.forward_signals(ranks) as received:
            watch = Watch(kin, nproc, deadline or Deadline(), received)
            for rank in range(nproc):
                if (pid := os.fork()) == 0:
                    os.close(opener)
                    kin.janitor.close()  # it waits for the parent only
                    os.environ.update(kin.environ())
                    _become_rank(rank, nproc, gate, main)
                ranks.append(Fork(pid))
                watch.pids[rank] = pid
                kin.add(pid)
            os.close(gate)
            # The store's server is a thread, so it starts when all are forked.
            store = sockets.serve("127.0.0.1", 0, timedelta(minutes=5))
            os.write(opener, store.port.to_bytes(4, "big") * nproc)
            os.close(opener)
            failed = supervise.await_children(ranks, watch.wait)
            del store
        return _conclude(watch, ranks, failed)


def _conclude(watch: Watch, ranks: Sequence[Fork], failed: Sequence[int]) -> int:
    """Name a rank that was killed; return the exit code of the launch.

    failed: the ranks that failed first. The others were asked to end, so their codes do not count.
    """
    codes = [rank.returncode or 0 for rank in ranks]
    if killed := [rank for rank in failed if codes[rank] < 0]:
        name = supervise.describe_process(f"rank {killed[0]}", ranks[killed[0]].pid)
        watch.report_death(name, -codes[killed[0]])
    if failed:
        codes = [code for i, code in enumerate(codes) if i in failed or code not in ENDED]
    return max((5 if code < 0 else code for code in codes), default=0)


def _become_rank(rank: int, nproc: int, gate: int, main: Callable[[], int]) -> NoReturn:
    """Turn this forked process into a rank, until it ends."""
    code = 5
    try:
        os.setsid()  # Ctrl-C reaches it once, from its parent
        with contextlib.suppress(OSError):  # name the ranks in `ps` and `top`
            Path("/proc/self/comm").write_text(f"ddpbench-r{rank}")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in PASSED_ON[1:]:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        tempfile.tempdir = None  # look it up again: now a folder of this run
        if not (port := int.from_bytes(os.read(gate, 4), "big")):
            os._exit(code)  # the parent has ended
        numbers = {"RANK": rank, "WORLD_SIZE": nproc, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": nproc}
        os.environ.update({f"DDPBENCH_{name}": str(value) for name, value in numbers.items()})
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # the store is not rank 0's
            TORCHELASTIC_RESTART_COUNT="0",
        )
        code = main() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.stderr.write(redact.text(traceback.format_exc()))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)  # without the parent's clean-up


def mpirun(arguments: Sequence[str], nproc: int, deadline: Deadline | None = None) -> int:
    """Run `python ARGUMENTS` in nproc ranks of this host under mpirun.

    Returns its exit code, 5 if it or a rank was killed or stopped. Raises Refused without mpirun.
    """
    if (command := find_mpirun()) is None:
        raise Refused(NO_MPIRUN)
    with open_family() as kin:
        # In its own session: Ctrl-C reaches it once, from here, and this process remains to read
        # the results.
        process = subprocess.Popen(
            [command, "-n", str(nproc), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=_mpi_environ(command) | kin.environ(),
        )
        kin.add(process.pid)
        with supervise.forward_signals([process], send=os.killpg) as received:
            watch = Watch(kin, nproc, deadline or Deadline(), received, process.pid)
            code = watch.await_mpirun(process)
        # After a signal, mpirun's own code depends on which rank ended first; the ranks have
        # marked other errors.
        return 130 if received and code else code


def _mpi_environ(command: str) -> dict[str, str]:
    return {
        # For more ranks than cores, and for root, in Open MPI 5 and 4.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Open MPI's search for libfabric's networks takes a second; ranks of one host need none.
        "OMPI_MCA_btl": "^ofi",
        # Open MPI kills its ranks a second after Ctrl-C: too soon to store results.
        PATIENT: "15",
        **os.environ,
        # Intel's mpirun is a script that takes the first mpiexec.hydra in PATH, of any MPI.
        "PATH": f"{Path(command).parent}:{os.environ.get('PATH', '')}",
    }
