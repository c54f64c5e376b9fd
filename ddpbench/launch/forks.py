"""Ranks forked from a process that has torch in memory: a launch in a fraction of a second.

Fresh processes in fresh groups, like a launcher's, but without the seconds in which each of them
imports torch; what a launch costs then is measuring. On the CPU only: a process that uses CUDA
cannot be forked.
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

from ddpbench.launch import family, rendezvous, supervise
from ddpbench.launch.placement import PASSED_ON
from ddpbench.launch.processes import ORDERLY, passing_on
from ddpbench.launch.supervise import Deadline, Watch
from ddpbench.records import redact

PRELOADED = (
    "torch.distributed", "scipy.special", "pandas", "pyarrow.parquet", "ddpbench.measure.pace",
)  # fmt: skip
LOOK_SECONDS = 0.2  # between looks at ranks that go on
GRACE_SECONDS = 30.0  # for the other ranks, once one has failed
RUNNING = -1  # in place of an exit code


def run(
    main: Callable[[], int],
    nproc: int,
    preloaded: Sequence[str] = PRELOADED,
    deadline: Deadline | None = None,
) -> int:
    """Call main in nproc forked ranks of this host, placed as launch.placement reads it.

    preloaded: modules that all ranks need, imported once. Returns the highest exit code; 5 where a
    rank was killed or stopped. When one fails the others are told to end, and killed where they do
    not.
    """
    for name in preloaded:
        import_module(name)
    gate, opener = os.pipe()
    ranks: dict[int, int] = {}  # pid → exit code
    with family.opened() as kin, warnings.catch_warnings():
        watch = Watch(kin, nproc, deadline or Deadline())
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that idle in OpenBLAS

        def pass_on(received: int) -> None:
            _send(ranks, received)
            watch.ask()

        with passing_on(pass_on):
            for rank in range(nproc):
                pid = os.fork()
                if pid == 0:
                    os.close(opener)
                    kin.disown()
                    os.environ.update(kin.environ())
                    _become(rank, nproc, gate, main)
                ranks[pid], watch.ranks[rank] = RUNNING, psutil.Process(pid)
                kin.add(pid)
            os.close(gate)
            # The store's server has a thread, as the watch is one: they begin when all are forked.
            store = rendezvous.serve("127.0.0.1", 0, timedelta(minutes=5))
            with supervise.watched(watch):
                os.write(opener, store.port.to_bytes(4, "big") * nproc)
                os.close(opener)
                killed = _await(ranks)
            if killed is not None:
                watch.killed(*killed)
    return max((code for code in ranks.values() if code > 0), default=0)


def _become(rank: int, nproc: int, gate: int, main: Callable[[], int]) -> NoReturn:
    """This forked process is a rank from here to its end."""
    code = 5
    try:
        os.setsid()  # Ctrl-C reaches it once, from its parent
        with contextlib.suppress(OSError):  # for `ps` and `top`: else all ranks look like it
            Path("/proc/self/comm").write_text(f"ddpbench-r{rank}")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in PASSED_ON[1:]:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        tempfile.tempdir = None  # looked up anew: a folder of this run
        if not (port := int.from_bytes(os.read(gate, 4), "big")):
            os._exit(code)  # the parent has gone
        here = {"RANK": rank, "WORLD_SIZE": nproc, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": nproc}
        os.environ.update({f"DDPBENCH_{name}": str(value) for name, value in here.items()})
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
        os._exit(code)  # what the parent would do at its end is not this process's


def _await(ranks: dict[int, int]) -> tuple[int, int] | None:
    """Wait for all; note their exit codes. Returns the rank that a signal has ended before any was
    told to end, and the signal."""
    until, killed = None, None
    while running := _running(ranks):
        for pid in running:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                if until is not None and code == -signal.SIGTERM:
                    code = 0  # told to end from here: the one that failed says why
                elif code < 0 and until is None:
                    killed = killed or (list(ranks).index(pid), -code)
                ranks[pid] = 5 if code < 0 else code
        if until is None and any(code not in (RUNNING, *ORDERLY) for code in ranks.values()):
            until = time.monotonic() + GRACE_SECONDS
            _send(ranks, signal.SIGTERM)
        if until is not None and time.monotonic() > until:
            _send(ranks, signal.SIGKILL)
        _rest(_running(ranks))
    return killed


def _running(ranks: dict[int, int]) -> list[int]:
    return [pid for pid, code in ranks.items() if code == RUNNING]


def _rest(pids: Sequence[int]) -> None:
    """Sleep until one of these ends, or for a moment. Who looked every few ms instead would take
    cores from the ranks while they measure."""
    ends = select.poll()
    with contextlib.ExitStack() as fds:
        for pid in pids:
            with contextlib.suppress(OSError):  # Linux before 5.3 has none
                fds.callback(os.close, fd := os.pidfd_open(pid))
                ends.register(fd, select.POLLIN)
        if pids:
            ends.poll(LOOK_SECONDS * 1000)


def _send(ranks: dict[int, int], number: int) -> None:
    for pid in _running(ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
