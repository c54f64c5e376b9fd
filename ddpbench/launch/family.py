"""The processes and files of a run: marked, found from outside, and removed at its end.

A private folder is the mark of a run: each of its processes has the folder in its environment, and
leaves its temporary files there. So what is removed can be no other run's. Where the process that
started the run is killed, a janitor removes all: a process that waits for nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from ddpbench.launch import placement
from ddpbench.records.visible import tell

MARK = "DDPBENCH_FAMILY"  # the folders of the runs that a process belongs to, outermost first
SHARED = Path("/dev/shm")
# Where Open MPI puts the memory that ranks share; its session folder follows TMPDIR.
BACKING = tuple(f"OMPI_MCA_{name}_backing_directory" for name in ("btl_sm", "osc_sm", "osc_rdma"))
# They remove what others have left in shared memory, and end when these have ended.
CLEANERS = ("resource_tracker", "torch_shm_manager")
CLEAN_SECONDS, KILL_SECONDS, TELL_SECONDS = 1.0, 5.0, 2.0
TOLD = "told"  # the file with a verdict that has been printed
WHO_STOPS = "Next: see who stops it (a debugger, a batch system, kill -STOP), and start again"
JOINS, MET, LEFT = "joins", "met", "left"  # the stages of a rank


@dataclass
class Family:
    """All processes of one run, and its folders."""

    folder: Path
    shared: Path | None  # for the memory that ranks share
    _janitor: int  # the end of a pipe, which closes with this process

    def environ(self) -> dict[str, str]:
        """What makes a process a member; what the user set for Open MPI is kept."""
        outer = [os.environ[MARK]] if MARK in os.environ else []
        found = {MARK: ":".join([*outer, str(self.folder)]), "TMPDIR": str(self.folder)}
        # Compiled code is worth keeping: it stays where torch puts it.
        name = "TORCHINDUCTOR_CACHE_DIR"
        found[name] = os.environ.get(name) or f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        if self.shared is not None:
            own = {name: str(self.shared) for name in BACKING}
            found |= {name: path for name, path in own.items() if _is_ours(os.environ.get(name))}
        return found

    def add(self, pid: int) -> None:
        """This child leads a session of its own: all processes in it are members."""
        with (self.folder / "sessions").open("a") as file:
            file.write(f"{pid}\n")

    def disown(self) -> None:
        """In a forked child: the janitor waits for its parent only."""
        os.close(self._janitor)

    def kill(self) -> None:
        """End all members."""
        _end(self.folder)

    def stage(self, rank: int) -> str:
        """What a rank has reported last, "" nothing."""
        return _read(self.folder / f"rank-{rank}")

    @property
    def told(self) -> str:
        """The verdict that a rank has printed, "" none."""
        return _read(self.folder / TOLD)

    def mark_told(self, sentence: str) -> None:
        """Keep the ranks from printing another verdict."""
        (self.folder / TOLD).write_text(sentence)

    def is_telling(self) -> bool:
        """Whether a rank has begun to print its verdict a moment ago, and so ends all by itself."""
        try:
            return time.time() - (self.folder / TOLD).stat().st_mtime < TELL_SECONDS
        except OSError:
            return False


@contextlib.contextmanager
def opened() -> Iterator[Family]:
    """A new run's processes and folders; none is left at the end."""
    folder = Path(tempfile.mkdtemp(prefix="ddpbench-"))
    backing = os.environ.get(BACKING[0])
    base = Path(backing) if backing and _is_ours(backing) else SHARED
    memory: Path | None = base / folder.name
    try:
        (base / folder.name).mkdir(0o700)
    except OSError:
        memory = None
    try:
        child, janitor, done = _janitor(folder, memory)
    except BaseException:  # no process can be had, or the user interrupts
        _remove(folder, memory)
        raise
    family = Family(folder, memory, janitor)
    try:
        yield family
    finally:
        family.kill()
        _remove(folder, memory)
        os.close(janitor)
        with contextlib.suppress(OSError):  # it has ended long ago, unless it was stopped
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        select.select([done], [], [], CLEAN_SECONDS)
        os.close(done)


def is_private(name: str, value: str) -> bool:
    """Whether a run has set this variable, to a folder of its own."""
    return name in BACKING and _is_ours(value)


def _is_ours(backing: str | None) -> bool:
    return backing is None or backing.startswith(str(SHARED / "ddpbench-"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _remove(*folders: Path | None) -> None:
    for folder in folders:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


# --- the janitor


def _janitor(folder: Path, memory: Path | None) -> tuple[int, int, int]:
    """Start it; the child that did so, the end of a pipe for which it waits, and one that ends with
    it."""
    waits, here = os.pipe()
    done, ending = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        child = os.fork()
    except BaseException:
        for end in (waits, here, done, ending):
            os.close(end)
        raise
    if child == 0:
        if os.fork() == 0:  # no child of this process: it is not ended with its children
            _clean_up(waits, ending, folder, memory)
        os._exit(0)
    os.close(waits)
    os.close(ending)
    return child, here, done


def _clean_up(waits: int, ending: int, folder: Path, memory: Path | None) -> NoReturn:
    """Wait for the end of the run's first process, and remove what it has left."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text("ddpbench-clean")
        # Whoever reads the run's output must not wait for this process.
        os.dup2(waits, 0)
        os.dup2(ending, 1)
        os.closerange(2, os.sysconf("SC_OPEN_MAX"))
        os.read(0, 1)  # nothing, at the end
        if folder.exists():
            _end(folder)
            _remove(folder, memory)
    finally:
        os._exit(0)


# --- ending processes


def _end(folder: Path) -> None:
    """Kill all members of the run with this folder; those that clean up come last."""
    sessions = {int(line) for line in _read(folder / "sessions").split()}
    began = time.monotonic()
    while found := list(_members(str(folder), sessions)):
        seconds = time.monotonic() - began
        for each in found:
            with contextlib.suppress(psutil.Error):
                if seconds > CLEAN_SECONDS or not _cleans(each):
                    each.kill()
        if seconds > KILL_SECONDS:
            break
        time.sleep(0.02)


def _members(mark: str, sessions: set[int]) -> Iterator[psutil.Process]:
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if each.pid != os.getpid() and each.status() != psutil.STATUS_ZOMBIE:
                marked = mark in _environ(each).get(MARK, "").split(":")
                if marked or os.getsid(each.pid) in sessions:
                    yield each


def _cleans(process: psutil.Process) -> bool:
    return any(name in word for word in process.cmdline() for name in CLEANERS)


def end_descendants() -> None:
    """End what this process has started, also what has lost its parent since.

    Such a process is known by the group: a launcher gives each rank its own, in which others are
    only where they are this process's siblings, as in a pipeline.
    """
    me = psutil.Process()
    family = {each.pid: each for each in me.children(recursive=True)}
    if os.getpgid(0) == me.pid:
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getpgid(each.pid) == me.pid and each.ppid() != me.ppid():
                    family[each.pid] = each
    family.pop(me.pid, None)
    for each in family.values():
        with contextlib.suppress(psutil.Error):
            if not _cleans(each):
                each.kill()


# --- in a rank


def report(stage: str) -> None:
    """Tell the process that started this rank how far it has come."""
    if (place := placement.read_placement()) is not None:
        _leave(f"rank-{place.rank}", stage)


def report_told(sentence: str) -> None:
    """Tell it that the ranks have printed a verdict."""
    _leave(TOLD, sentence)


def _leave(name: str, text: str) -> None:
    if MARK in os.environ:
        with contextlib.suppress(OSError):
            (_own_folder() / name).write_text(text)


def _own_folder() -> Path:
    """That of the run which this rank belongs to; one that does not exist where nobody watches."""
    return Path(os.environ.get(MARK, "/nonexistent").split(":")[-1])


def end_if_stopped(rank: int, seconds: float, end: bool = True) -> bool:
    """Where other ranks are seen to be stopped on this host, after this one has waited so long for
    them: name them, then end them and this process. end=False: only name them. Whether there are
    any."""
    pids = siblings()
    stopped = {r: pid for r, pid in pids.items() if r != rank and is_stopped(pid)}
    if not stopped:
        return False
    if rank == min({rank, *pids} - {*stopped}):
        verb, them = ("is", "it") if len(stopped) == 1 else ("are", "them")
        names = "; ".join(named(f"rank {r}", pid) for r, pid in sorted(stopped.items()))
        sentence = (
            f"{names} {verb} stopped (SIGSTOP): rank {rank} has waited for {them} longer than "
            f"{seconds:g} s (--timeout). {WHO_STOPS}"
        )
        if not _read(_own_folder() / TOLD):
            report_told(sentence)
            tell(sentence)
    elif end:
        time.sleep(CLEAN_SECONDS)  # a launcher ends all with the first that ends
    if end:
        # Open MPI's launcher continues who is stopped, to end it; others would wait for it.
        for pid in () if "PMIX_NAMESPACE" in os.environ else stopped.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        end_descendants()
        os._exit(5)
    return True


def named(what: str, pid: int) -> str:
    """ "rank 1 (host, pid 7)", of a process on this host."""
    return f"{what} ({socket.gethostname()}, pid {pid})"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def siblings() -> dict[int, int]:
    """The pids of the ranks on this host, as far as they can be seen: rank → pid."""
    if MARK in os.environ:
        text = _read(_own_folder() / "pids")
        if text:
            return {int(rank): pid for rank, pid in json.loads(text).items()}
    mine = os.environ.get("PMIX_NAMESPACE")
    children = psutil.Process(os.getppid()).children()
    return {
        rank: each.pid
        for rank, each in ranks_of(children).items()
        if _environ(each).get("PMIX_NAMESPACE") == mine
    }


def ranks_of(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """Those of the processes that a launcher has made ranks, the first of each."""
    found: dict[int, psutil.Process] = {}
    for each in processes:
        with contextlib.suppress(placement.Refused):
            if (place := placement.read_placement(_environ(each))) is not None:
                found.setdefault(place.rank, each)
    return found


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
