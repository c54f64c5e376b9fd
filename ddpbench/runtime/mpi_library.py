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

from ddpbench.runtime import launch

# What runs before MPI is finalised; a sentence that comes back says why that could only hang.
BEFORE_END: list[Callable[[], str | None]] = []
_LENDING = threading.Lock()
_lenders, _before = 0, False
HUNG = 5  # the exit code of a job that hung


@cache
def mpi() -> Any:
    """mpi4py's MPI module; the first call starts MPI and arranges for its end."""
    try:
        from mpi4py import MPI
    except ImportError as error:  # the package, or a library for it
        text = f"mpi4py cannot start MPI ({error}): pip install 'ddpbench[mpi]' brings both"
        raise ImportError(text) from error

    atexit.register(_leave, os.getpid())
    return MPI


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


def meeting_point(local: bool, address: str | None = None, port: str | int | None = None) -> str:
    """Rank 0's "address:port" for a store, in every rank; `local`: all are on one host.

    What is given of the two is kept: rank 0's host and a free port of it stand in for the rest.
    """
    host = address or ("127.0.0.1" if local else socket.getfqdn())
    return broadcast_text(f"{host}:{port or launch.free_port()}" if world()[0] == 0 else None)


def abort(code: int, why: str = "") -> None:
    """End every process of the MPI job with this exit code, at once and without clean-up."""
    if why:
        print(f"mpi4py: {why}: aborting the job", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.2)  # MPICH's launcher passes on what was said only while the job lives
    mpi().COMM_WORLD.Abort(code)


def _leave(pid: int) -> None:
    """Before MPI is finalised: stop the workers, or abort where finalising could only hang."""
    if os.getpid() != pid:
        return  # a child by os.fork: the job goes on without it
    for stop in BEFORE_END:
        if why := stop():
            abort(HUNG, why)
    # The others may wait in a collective for a rank that dies of an exception, and MPI's end
    # would wait for them.
    if getattr(sys, "last_type", None) is not None and world()[1] > 1:
        abort(1)
