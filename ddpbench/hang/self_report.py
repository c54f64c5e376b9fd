"""Who a rank is, what can be seen of it from another, and what it says of itself."""

from __future__ import annotations

import os
import socket
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddpbench.hang.flight import Flight
from ddpbench.hang.places import called, handled, main_frame, peers, place
from ddpbench.hang.status import ALIVE, DIED, STOPPED, Log, RankStatus

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


def heartbeat(flight: Flight, phase: str = "") -> RankStatus:
    """What is told while all is well: where the main thread is, numbers of collectives."""
    frame = main_frame()
    inside = called(frame)
    logs = flight.logs(inside, whole=False)
    return RankStatus(place(frame), inside, logs, phase, destroyed=_destroyed(logs))


def last_words(flight: Flight, phase: str = "", at: str = "") -> RankStatus:
    """All there is to say, with the latest collectives and the main thread's stack.

    at: the place, where an error has unwound the stack already.
    """
    if at:
        logs = flight.logs("", whole=True)
        return RankStatus(at, "", logs, phase, destroyed=_destroyed(logs))
    frame = main_frame()
    inside = called(frame)
    logs = flight.logs(inside, whole=True)
    stack = "".join(traceback.format_stack(frame)[-STACK_FRAMES:])
    source, destination = peers(frame, inside) if inside else (-1, -1)
    return RankStatus(
        place(frame), inside, logs, phase, stack=stack, source=source, destination=destination,
        destroyed=_destroyed(logs), handles=handled(),
    )  # fmt: skip


def _destroyed(logs: tuple[Log, ...]) -> bool:
    """Whether there have been process groups and are none any more."""
    import torch.distributed as dist

    return bool(logs) and not dist.is_initialized()
