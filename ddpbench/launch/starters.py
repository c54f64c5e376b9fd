"""Start the ranks of a launch on this host, forked or under mpirun, and watch them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ddpbench.launch import family, forks, supervise
from ddpbench.launch.placement import NO_MPIRUN, PATIENT, Refused, find_mpirun


def start(
    launcher: str,
    arguments: Sequence[str],
    main: Callable[[], int] | None,
    nproc: int,
    deadline: supervise.Deadline,
    preloaded: Sequence[str] = forks.PRELOADED,
) -> int:
    """Start nproc ranks of this host: under mpirun, else forked. Return the exit code.

    main: what forked ranks call; None: like ranks under mpirun, they run `python ARGUMENTS`.
    preloaded: as in `forks.run`.
    """
    if launcher == "mpirun":
        return mpirun(arguments, nproc, deadline)
    if main is not None:
        return forks.run(main, nproc, preloaded, deadline)
    line = [sys.executable, *arguments]
    return forks.run(lambda: os.execv(line[0], line), nproc, ("torch.distributed",), deadline)


def mpirun(arguments: Sequence[str], nproc: int, deadline: supervise.Deadline | None = None) -> int:
    """Run `python ARGUMENTS` in nproc ranks of this host under mpirun.

    Returns its exit code, 5 if it or a rank was killed or stopped. Raises Refused without mpirun.
    """
    if (command := find_mpirun()) is None:
        raise Refused(NO_MPIRUN)
    deadline = deadline or supervise.Deadline()
    with family.open_family() as kin:
        environ = _mpi_environ(command) | kin.environ()
        # In its own session: Ctrl-C reaches it once, from here, and this process remains to read
        # the results.
        process = subprocess.Popen(
            [command, "-n", str(nproc), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environ,
        )
        kin.add(process.pid)
        watch = supervise.Watch(kin, nproc, deadline, process.pid)

        def forward(number: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            watch.request_end()

        with supervise.forward_signals(forward) as received:
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
