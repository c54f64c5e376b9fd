"""The processes and files of a run: marked, found from outside, and removed at its end.

Each process of a run has the run's private folder in its environment and stores its temporary files
there, so files of other runs are never removed. If the process that started the run is killed, a
janitor removes everything: a process that only waits for this.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

MARK = "DDPBENCH_FAMILY"  # folders of the runs to which a process belongs, outermost first
SHARED = Path("/dev/shm")
# Where Open MPI puts the memory that ranks share; its session folder follows TMPDIR.
BACKING = tuple(f"OMPI_MCA_{name}_backing_directory" for name in ("btl_sm", "osc_sm", "osc_rdma"))
# They remove files that other processes left in shared memory, and end after these.
CLEANERS = ("resource_tracker", "torch_shm_manager")
CLEAN_SECONDS, KILL_SECONDS = 1.0, 5.0
VERDICT = "verdict"  # the file with a verdict that has been printed


@dataclass
class Family:
    """All processes of one run, and its folders."""

    folder: Path
    shared: Path | None  # for the memory that ranks share
    janitor: socket.socket  # it cleans up once no process has this open

    def environ(self) -> dict[str, str]:
        """Return the variables of a member; settings of the user for Open MPI are kept."""
        outer = [os.environ[MARK]] if MARK in os.environ else []
        # Keep compiled code: later runs reuse it.
        compiled = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        variables = {
            MARK: ":".join([*outer, str(self.folder)]),
            "TMPDIR": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or compiled,
        }
        if self.shared is not None:
            own = [name for name in BACKING if is_private(name, os.environ.get(name))]
            variables |= dict.fromkeys(own, str(self.shared))
        return variables

    def add(self, pid: int) -> None:
        """Count all processes in the session of this child as members."""
        with (self.folder / "sessions").open("a") as file:
            file.write(f"{pid}\n")

    def kill(self) -> None:
        """Kill all members of the run; those that clean up come last."""
        sessions = {int(line) for line in read_text(self.folder / "sessions").split()}
        began = time.monotonic()
        while members := list(_list_members(str(self.folder), sessions)):
            seconds = time.monotonic() - began
            for process in members:
                with contextlib.suppress(psutil.Error):
                    if seconds > CLEAN_SECONDS or not _is_cleaner(process):
                        process.kill()
            if seconds > KILL_SECONDS:
                break
            time.sleep(0.02)

    def remove(self) -> None:
        """Kill all members of the run, then remove its folders."""
        self.kill()
        for folder in filter(None, (self.folder, self.shared)):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def verdict(self) -> str:
        """Return the verdict that a rank has printed; "" if none has."""
        return read_text(self.folder / VERDICT)


def report_verdict(sentence: str) -> None:
    """Report to the process that started this rank that the ranks have printed a verdict."""
    if MARK in os.environ:
        with contextlib.suppress(OSError):
            (Path(os.environ[MARK].split(":")[-1]) / VERDICT).write_text(sentence)


@contextlib.contextmanager
def open_family() -> Iterator[Family]:
    """Create a new run's family; at the end, remove its processes and folders."""
    folder = Path(tempfile.mkdtemp(prefix="ddpbench-"))
    # The processes of a run inside a run share the memory folder of the outer one.
    base = Path(os.environ.get(BACKING[0], SHARED))
    base = base if is_private(BACKING[0], str(base)) else SHARED
    shared: Path | None = base / folder.name
    try:
        (base / folder.name).mkdir(0o700)
    except OSError:
        shared = None
    here, there = socket.socketpair()
    family = Family(folder, shared, here)
    with here:
        try:
            _start_janitor(family, there)
            yield family
        finally:
            family.remove()
            here.shutdown(socket.SHUT_WR)
            here.settimeout(CLEAN_SECONDS)
            with contextlib.suppress(OSError):
                here.recv(1)  # returns at the janitor's end


def is_private(name: str, value: str | None) -> bool:
    """Return whether a run may set this variable: the user has not set it."""
    return name in BACKING and (value is None or value.startswith(str(SHARED / "ddpbench-")))


def read_text(path: Path) -> str:
    """Return the content of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _start_janitor(family: Family, there: socket.socket) -> None:
    """Start a process that is no child of this one, so that it does not end with its children."""
    sys.stdout.flush()
    sys.stderr.flush()
    with there:
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                _clean_up(family, there.fileno())
            os._exit(0)
    os.waitpid(child, 0)


def _clean_up(family: Family, waits: int) -> NoReturn:
    """Wait until the run's first process ends, then remove its files and processes."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text("ddpbench-clean")
        # A reader of the run's output must not wait for this process.
        os.dup2(waits, 0)
        os.closerange(1, os.sysconf("SC_OPEN_MAX"))
        os.read(0, 1)  # returns once the first process has shut down the other end
        if family.folder.exists():
            family.remove()
    finally:
        os._exit(0)


def _list_members(mark: str, sessions: set[int]) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                marked = mark in process_environ(process).get(MARK, "").split(":")
                if marked or os.getsid(process.pid) in sessions:
                    yield process


def _is_cleaner(process: psutil.Process) -> bool:
    return any(name in word for word in process.cmdline() for name in CLEANERS)


def kill_descendants() -> None:
    """Kill all processes that this one and its children have started."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not _is_cleaner(process):
                process.kill()


def process_environ(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; empty if it cannot be read."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
