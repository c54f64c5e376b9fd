"""Identify a rank, observe another rank's process, and read this rank's own status."""

from __future__ import annotations

import os
import socket
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ddpbench.hang.flight_recorder import Flight
from ddpbench.hang.places import (
    describe_handled_error,
    find_distributed_call,
    find_main_frame,
    find_peer,
    find_place,
)
from ddpbench.hang.status import ALIVE, DIED, STOPPED, RankStatus
from ddpbench.launch import family

STACK_FRAMES = 30  # the innermost frames of a reported stack


@dataclass(frozen=True)
class RankIdentity:
    """The process of a rank: its name in messages, and how to observe it from its own host."""

    rank: int
    host: str
    pid: int
    boot_id: str  # identifies the machine
    network: str = ""  # identifies the network namespace: each is a host, even on one machine
    processes: str = ""  # identifies the namespace of the pid

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def sees(self, other: RankIdentity) -> bool:
        """Return whether this rank's process can observe the other's."""
        return (self.boot_id, self.processes) == (other.boot_id, other.processes)


def identify(rank: int) -> RankIdentity:
    """Return this process's identity as a rank."""
    host = socket.gethostname()
    boot_id = family.read_text(Path("/proc/sys/kernel/random/boot_id")).strip() or host
    return RankIdentity(rank, host, os.getpid(), boot_id, _namespace("net"), _namespace("pid"))


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").stat().st_ino)
    except OSError:
        return ""


def observe_state(identity: RankIdentity, own: RankIdentity) -> str:
    """Return the state of another rank's process, as the end of "rank 3 (host, pid 7) …"."""
    if not own.sees(identity):
        return "did not answer (stopped, dead or cut off)"
    try:
        status = psutil.Process(identity.pid).status()
    except psutil.NoSuchProcess:
        return DIED
    except psutil.Error:
        return ALIVE
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return DIED
    stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return STOPPED if stopped else ALIVE


def read_status(
    flight: Flight, phase: str = "", place: str = "", heartbeat: bool = False
) -> RankStatus:
    """Return this rank's status.

    place: the line of an error that has unwound the stack already; heartbeat: only the place of the
    main thread and the numbers of collectives.
    """
    if place:
        return RankStatus(place, "", flight.read_logs("", whole=True), phase)
    frame = find_main_frame()
    inside, call = find_distributed_call(frame)
    logs = flight.read_logs(inside, whole=not heartbeat)
    status = RankStatus(find_place(frame), inside, logs, phase, call=call)
    if heartbeat:
        return status
    sends, peer = find_peer(frame, inside) if inside else (False, -1)
    return replace(
        status,
        stack="".join(traceback.format_stack(frame)[-STACK_FRAMES:]),
        sends=sends,
        peer=peer,
        handles=describe_handled_error(),
    )
