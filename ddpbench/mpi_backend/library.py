"""The MPI library underneath: starting it, asking it, ending it. No torch in here.

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
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from ddpbench.launch import placement, siblings
from ddpbench.records.visible import tell

# What runs before MPI is finalised; a sentence that comes back says why that could only hang.
BEFORE_END: list[Callable[[], str | None]] = []
_LENDING = threading.Lock()
_lenders, _before = 0, False
HUNG = 5  # the exit code of a job that hung
# Until a script is told who is stopped; for ddpbench's ranks to come where none is, beyond theirs.
TOLD_SECONDS, LATE_SECONDS = 60.0, 30.0


_deadline: float | None = None  # of ddpbench's own ranks


def start(seconds: float) -> None:
    """Start MPI, for which all ranks must come within these seconds: else the process ends."""
    global _deadline
    _deadline = seconds
    mpi()


@cache
def mpi() -> Any:
    """mpi4py's MPI module; the first call starts MPI and arranges for its end."""
    try:
        import mpi4py

        # mpi4py starts MPI with the interpreter's lock held: no thread could tell who is missing.
        mine = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize is True
        if mine:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, mpi4py.rc.finalize is not False
        from mpi4py import MPI
    except ImportError as error:  # the package, or a library for it
        text = f"mpi4py cannot start MPI ({error}): pip install 'ddpbench[mpi]' brings both"
        raise ImportError(text) from error

    if mine and not MPI.Is_initialized():
        _initialise(MPI)
    atexit.register(_leave, os.getpid(), mine and mpi4py.rc.finalize is True)
    return MPI


def _initialise(module: Any) -> None:
    """As mpi4py does it, while other threads run."""
    from mpi4py import rc

    level = getattr(module, f"THREAD_{rc.thread_level.upper()}" if rc.threads else "THREAD_SINGLE")
    with _waiting("MPI_Init"):
        code = ctypes.CDLL(module.__file__).MPI_Init_thread(
            None, None, level, ctypes.byref(ctypes.c_int())
        )
    if code != module.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread failed: error {code}")
    if rc.errors == "exception":
        for comm in (module.COMM_SELF, module.COMM_WORLD):
            comm.Set_errhandler(module.ERRORS_RETURN)


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Meanwhile all ranks wait for each other: one that is stopped is named in time. In ddpbench's
    own ranks it is the end then, as it is later where nobody is stopped."""
    place, over = placement.read_placement(), threading.Event()

    def watch(rank: int) -> None:
        began, seconds = time.monotonic(), _deadline or TOLD_SECONDS
        over.wait(seconds)
        while not over.wait(0.5):
            if siblings.end_if_stopped(rank, seconds, _deadline is not None):
                return
            if _deadline is not None and time.monotonic() > began + seconds + LATE_SECONDS:
                end = f"{what} has not ended within {seconds + LATE_SECONDS:g} s in rank {rank}"
                tell(f"{end}: see whether all ranks started")
                os._exit(HUNG)

    with contextlib.suppress(RuntimeError):  # no thread is started at an interpreter's very end
        if place is not None and place.world_size > 1:
            threading.Thread(target=watch, args=(place.rank,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def library() -> str:
    """The MPI library in one line, such as "Open MPI 5.0.11"."""
    first = mpi().Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0]
    return " ".join(re.sub(r"\bv(?=\d)|\bVersion:|\bfor .*", "", first).split())


def thread_level() -> str:
    """The thread support that MPI granted: SINGLE, FUNNELED, SERIALIZED or MULTIPLE."""
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return {getattr(mpi(), f"THREAD_{name}"): name for name in names}[mpi().Query_thread()]


@cache
def cuda_aware() -> bool:
    """Whether this MPI says that it takes the addresses of CUDA memory."""
    # Looked up in mpi4py's extension, a symbol is also found in the library that it has loaded.
    ask = getattr(ctypes.CDLL(mpi().__file__), "MPIX_Query_cuda_support", None)
    return bool(ask is not None and ask())


@cache
def _set_yield() -> Any:
    """Open MPI's own switch, where this is Open MPI: whether a waiting thread lends its core."""
    switch = getattr(ctypes.CDLL(mpi().__file__), "opal_progress_set_yield_when_idle", None)
    if switch is not None:
        switch.argtypes, switch.restype = [ctypes.c_bool], ctypes.c_bool
    return switch


@contextlib.contextmanager
def lending() -> Iterator[None]:
    """Calls made meanwhile lend their core while they wait: for threads beside one that computes.

    It costs a small call a microsecond, and made a DDP step 1.2 times as fast where each rank has
    one core (tests/perf/mpi_step.py).
    """
    global _lenders, _before
    if (switch := _set_yield()) is None:
        yield
        return
    with _LENDING:
        _lenders += 1
        if _lenders == 1:
            _before = switch(True)
    try:
        yield
    finally:
        with _LENDING:
            _lenders -= 1
            if _lenders == 0:
                switch(_before)


def world() -> tuple[int, int]:
    """This process's rank in MPI's COMM_WORLD and the number of ranks there."""
    return mpi().COMM_WORLD.Get_rank(), mpi().COMM_WORLD.Get_size()


def broadcast_text(text: str | None) -> str:
    """The text of MPI rank 0, in every rank of COMM_WORLD; all of them must call."""
    data = bytearray((text or "").encode() if world()[0] == 0 else b"")
    length = array("q", [len(data)])
    mpi().COMM_WORLD.Bcast(length)
    data = data or bytearray(length[0])
    mpi().COMM_WORLD.Bcast(data)
    return data.decode()


def broadcast_meeting_point(
    local: bool, address: str | None = None, port: str | int | None = None
) -> str:
    """Rank 0's "address:port" for a store, in every rank; `local`: all are on one host.

    What is given of the two is kept: rank 0's host and a free port of it stand in for the rest.
    """
    host = address or ("127.0.0.1" if local else socket.getfqdn())
    return broadcast_text(f"{host}:{port or placement.free_port()}" if world()[0] == 0 else None)


def abort(code: int, why: str = "") -> None:
    """End every process of the MPI job with this exit code, at once and without clean-up."""
    if why:
        print(f"mpi4py: {why}: aborting the job", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.2)  # MPICH's launcher passes on what was said only while the job lives
    mpi().COMM_WORLD.Abort(code)


def _leave(pid: int, finalise: bool) -> None:
    """Stop the workers, or abort where finalising could only hang; then finalise MPI."""
    if os.getpid() != pid:
        return  # a child by os.fork: the job goes on without it
    for stop in BEFORE_END:
        if why := stop():
            abort(HUNG, why)
    # The others may wait in a collective for a rank that dies of an exception, and MPI's end
    # would wait for them.
    if getattr(sys, "last_type", None) is not None and world()[1] > 1:
        abort(1)
    if finalise and not mpi().Is_finalized():
        with _waiting("MPI_Finalize"):
            ctypes.CDLL(mpi().__file__).MPI_Finalize()
