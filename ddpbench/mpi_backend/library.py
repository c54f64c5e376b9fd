"""The MPI library: its start, its features, its end. No torch in here.

MPI starts with the first call of a function below, not with the import of this module.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from ddpbench.launch.placement import free_port, read_placement
from ddpbench.records.terminal_text import tell
from ddpbench.records.wording import install_extra

NAME = "mpi4py"  # of the backend
HUNG = 5  # the exit code of a job that hung
LATE_SECONDS = 30.0  # beyond the deadline of ddpbench's own ranks
_deadline: float | None = None  # of ddpbench's own ranks


def start(seconds: float) -> None:
    """Start MPI on all ranks; end this process if some do not come within these seconds."""
    global _deadline
    _deadline = seconds
    mpi()


@cache
def mpi() -> Any:
    """Return mpi4py's MPI module; the first call starts MPI and arranges for its end."""
    try:
        import mpi4py

        # mpi4py starts MPI with the interpreter's lock: no thread could name a missing rank.
        ours = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize is True
        if ours:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, mpi4py.rc.finalize is not False
        from mpi4py import MPI
    except ImportError as error:  # the package, or a library for it
        text = f"mpi4py cannot start MPI ({error}): {install_extra('mpi')} installs both"
        raise ImportError(text) from error

    if ours and not MPI.Is_initialized():
        _initialise(MPI)
    atexit.register(_leave, os.getpid(), ours and mpi4py.rc.finalize is True)
    return MPI


def _initialise(module: Any) -> None:
    """Start MPI like mpi4py, but let other threads run meanwhile."""
    from mpi4py import rc

    level = getattr(module, f"THREAD_{rc.thread_level.upper()}" if rc.threads else "THREAD_SINGLE")
    with _watch_wait("MPI_Init"):
        initialise = ctypes.CDLL(module.__file__).MPI_Init_thread
        initialise(None, None, level, ctypes.byref(ctypes.c_int()))
    if rc.errors == "exception":
        for comm in (module.COMM_SELF, module.COMM_WORLD):
            comm.Set_errhandler(module.ERRORS_RETURN)


@contextlib.contextmanager
def _watch_wait(call: str) -> Iterator[None]:
    """End this process if this MPI call never returns, in ddpbench's own ranks."""
    placement, over = read_placement(), threading.Event()

    def watch(rank: int, seconds: float) -> None:
        if not over.wait(seconds):
            tell(
                f"{call} has not ended within {seconds:g} s in rank {rank}: check that all ranks "
                "started, and that none is stopped"
            )
            os._exit(HUNG)

    with contextlib.suppress(RuntimeError):  # no thread is started at an interpreter's very end
        if _deadline is not None and placement is not None and placement.world_size > 1:
            arguments = (placement.rank, _deadline + LATE_SECONDS)
            threading.Thread(target=watch, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def library() -> str:
    """Return name and version of the MPI library, such as "Open MPI 5.0.11"."""
    first = mpi().Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0]
    return " ".join(re.sub(r"\bv(?=\d)|\bVersion:|\bfor .*", "", first).split())


@cache
def cuda_aware() -> bool:
    """Return whether this MPI accepts addresses of CUDA memory."""
    # A look-up in mpi4py's extension also finds symbols of the MPI library that it has loaded.
    query = getattr(ctypes.CDLL(mpi().__file__), "MPIX_Query_cuda_support", None)
    return bool(query is not None and query())


@cache
def find_yield_switch() -> tuple[Callable[[bool], Any], bool]:
    """Return Open MPI's switch for whether a waiting thread yields its core, and its first state.

    Yielding adds a microsecond to a small call. With one core per rank, a DDP step whose calls
    yield is 17 % faster.
    """
    switch = getattr(ctypes.CDLL(mpi().__file__), "opal_progress_set_yield_when_idle", bool)
    first = bool(switch(True) & 1)
    switch(first)
    return switch, first


def world() -> tuple[int, int]:
    """This process's rank in MPI's COMM_WORLD and the number of ranks there."""
    return mpi().COMM_WORLD.Get_rank(), mpi().COMM_WORLD.Get_size()


def broadcast_meeting_point(
    local: bool, address: str | None = None, port: str | int | None = None
) -> str:
    """Rank 0's "address:port" for a store, on every rank; `local`: all are on one host.

    A missing address or port is filled in with rank 0's host or a free port there.
    """
    host = address or ("127.0.0.1" if local else socket.getfqdn())
    point = f"{host}:{port or free_port()}" if world()[0] == 0 else ""
    return str(mpi().COMM_WORLD.bcast(point))


def abort(code: int, reason: str = "") -> None:
    """End every process of the MPI job with this exit code, at once and without clean-up."""
    if reason:
        print(f"mpi4py: {reason}: aborting the job", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.2)  # MPICH's launcher forwards output only while the job runs
    mpi().COMM_WORLD.Abort(code)


def _leave(pid: int, finalise: bool) -> None:
    """Finalise MPI; abort if finalising would hang."""
    if os.getpid() != pid:
        return  # a child by os.fork: the job continues without it
    # Other ranks may wait in a collective for a rank that dies of an exception, and MPI_Finalize
    # would wait for them.
    if getattr(sys, "last_type", None) is not None and world()[1] > 1:
        abort(1)
    if finalise and not mpi().Is_finalized():
        with _watch_wait("MPI_Finalize"):
            ctypes.CDLL(mpi().__file__).MPI_Finalize()
