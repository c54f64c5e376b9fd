"""Ranks forked from a process that has torch in memory: a launch in a fraction of a second.

The processes and their groups are fresh, as under a launcher, but none spends seconds on importing
torch. On the CPU only: a process that uses CUDA cannot be forked.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import psutil

from ddpbench.launch import family, sockets, supervise
from ddpbench.launch.placement import ORDERLY, PASSED_ON, forward_signals
from ddpbench.launch.supervise import Deadline, Watch
from ddpbench.records import redact

PRELOADED = (
    "torch.distributed",
    "scipy.special",
    "pandas",
    "pyarrow.parquet",
    "ddpbench.measure.pace",
)
LOOK_SECONDS = 0.2  # between looks at running ranks
GRACE_SECONDS = 30.0  # for the other ranks, once one has failed
RUNNING = -1  # in place of an exit code


def run(
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
    codes: dict[int, int] = {}  # pid → exit code
    with family.open_family() as kin, warnings.catch_warnings():
        watch = Watch(kin, nproc, deadline or Deadline())
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that idle in OpenBLAS

        def forward(received: int) -> None:
            _send_signal(codes, received)
            watch.request_end()

        with forward_signals(forward):
            for rank in range(nproc):
                pid = os.fork()
                if pid == 0:
                    os.close(opener)
                    kin.disown()
                    os.environ.update(kin.environ())
                    _become_rank(rank, nproc, gate, main)
                codes[pid], watch.ranks[rank] = RUNNING, psutil.Process(pid)
                kin.add(pid)
            os.close(gate)
            # The store's server and the watch are threads, so they start when all are forked.
            store = sockets.serve("127.0.0.1", 0, timedelta(minutes=5))
            with supervise.watch_ranks(watch):
                os.write(opener, store.port.to_bytes(4, "big") * nproc)
                os.close(opener)
                killed = _await_ranks(codes)
            del store
            if killed is not None:
                watch.report_killed(*killed)
    return max((code for code in codes.values() if code > 0), default=0)


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


def _await_ranks(codes: dict[int, int]) -> tuple[int, int] | None:
    """Wait for all ranks and note their exit codes.

    Returns the rank that a signal ended before any was asked to end, and the signal; else None.
    """
    deadline, killed = None, None
    while running := _running(codes):
        for pid in running:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                if deadline is not None and code in (-signal.SIGTERM, 130):
                    code = 0  # ended from here: the rank that failed reports why
                elif code < 0 and deadline is None:
                    killed = killed or (list(codes).index(pid), -code)
                codes[pid] = 5 if code < 0 else code
        if deadline is None and any(code not in (RUNNING, *ORDERLY) for code in codes.values()):
            deadline = time.monotonic() + GRACE_SECONDS
            _send_signal(codes, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            _send_signal(codes, signal.SIGKILL)
        _sleep_until_end(_running(codes))
    return killed


def _running(codes: dict[int, int]) -> list[int]:
    return [pid for pid, code in codes.items() if code == RUNNING]


def _sleep_until_end(pids: Sequence[int]) -> None:
    """Sleep until one of these processes ends, or for LOOK_SECONDS.

    Polling every few ms instead would take cores from the ranks while they measure.
    """
    ends = select.poll()
    with contextlib.ExitStack() as fds:
        for pid in pids:
            with contextlib.suppress(OSError):  # Linux before 5.3 has none
                fds.callback(os.close, fd := os.pidfd_open(pid))
                ends.register(fd, select.POLLIN)
        if pids:
            ends.poll(LOOK_SECONDS * 1000)


def _send_signal(codes: dict[int, int], number: int) -> None:
    for pid in _running(codes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
