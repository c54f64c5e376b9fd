"""Who a rank is, what can be seen of it from another, and what it says of itself."""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from ddpbench.analysis.hang import ALIVE, DIED, STOPPED, Words
from ddpbench.runtime.flight import Flight

STACK_FRAMES = 30  # the innermost, told in full


@dataclass(frozen=True)
class Who:
    """Where a rank runs, for naming it and for looking at it from its own host."""

    rank: int
    host: str
    pid: int
    boot_id: str  # names the machine
    network: str = ""  # names the network namespace: hosts to each other, even on one machine
    processes: str = ""  # names the namespace in which the pid means something

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def sees(self, other: Who) -> bool:
        """Whether the other's process can be looked at from this rank's."""
        return (self.boot_id, self.processes) == (other.boot_id, other.processes)


def whoami(rank: int) -> Who:
    """This process as a rank."""
    host, pid = socket.gethostname(), os.getpid()
    return Who(rank, host, pid, _boot_id(), _namespace("net"), _namespace("pid"))


def _boot_id() -> str:
    """Names this machine and its clock: two network namespaces of it share one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace(kind: str) -> str:
    """Names this process's namespace of a kind: "net", "pid"."""
    try:
        return str(Path(f"/proc/self/ns/{kind}").stat().st_ino)
    except OSError:
        return ""


def state_of(who: Who, me: Who) -> str:
    """What can be seen of a silent rank from here, as the end of "rank 3 (host, pid 7) …"."""
    if not me.sees(who):
        return "did not answer (stopped, dead or cut off)"
    try:
        status = psutil.Process(who.pid).status()
    except psutil.NoSuchProcess:
        return DIED
    except psutil.Error:
        return ALIVE
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return DIED
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED
    return ALIVE


def heartbeat(flight: Flight, phase: str = "") -> Words:
    """What is told while all is well: where the main thread is, numbers of collectives."""
    frame = main_frame()
    inside = called(frame)
    return Words(place(frame), inside, flight.logs(inside, whole=False), phase)


def last_words(
    flight: Flight, phase: str = "", cause: str = "", late: bool = False, at: str = ""
) -> Words:
    """All there is to say, with the latest collectives and the main thread's stack.

    at: the place, where an error has unwound the stack already.
    """
    frame = main_frame()
    inside = "" if at else called(frame)
    stack = "" if at else "".join(traceback.format_stack(frame)[-STACK_FRAMES:])
    logs = flight.logs(inside, whole=True)
    return Words(at or place(frame), inside, logs, phase, cause, late, stack=stack)


def main_frame() -> FrameType:
    """The innermost frame of the main thread."""
    return sys._current_frames()[threading.main_thread().ident or 0]


def place_of(frame: FrameType) -> str:
    """A line of code as "function (file:line)"."""
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def place(frame: FrameType) -> str:
    """The innermost line of the program's own code, else of a library's, else of any."""
    return place_of(min(_outwards(frame), key=lambda each: _distance(each.f_code.co_filename)))


def place_of_error(trace: TracebackType) -> str:
    """Like `place`, of where an error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)][::-1]
    return place_of(min(frames, key=lambda each: _distance(each.f_code.co_filename)))


def called(frame: FrameType) -> str:
    """The function of torch.distributed that the program has called and that runs, "" none."""
    names = ""
    for each in _outwards(frame):
        path = each.f_code.co_filename
        if path.endswith("distributed_c10d.py"):
            names = each.f_code.co_name  # the outermost of those that call each other
        elif names and _distance(path) == 0:
            break
    return names


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _distance(path: str) -> int:
    """0: the program's own code, 1: a library's, 2: Python's or torch's, or what calls for them."""
    if path.startswith((_folder("torch"), str(Path(__file__).parent), "<frozen ")):
        return 2
    packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    if path.startswith(tuple(packages)) or "/dist-packages/" in path:
        return 1
    return 2 if path.startswith(sysconfig.get_path("stdlib")) else 0


def _folder(package: str) -> str:
    module = sys.modules.get(package)
    return str(Path(module.__file__).parent) if module and module.__file__ else "<no such folder>"
