"""The other ranks of a run on this host, as one of its ranks sees them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from ddpbench.launch import family
from ddpbench.launch.family import MARK, VERDICT, process_environ, read_text
from ddpbench.launch.placement import Refused, read_placement
from ddpbench.records.terminal_text import tell

WHO_STOPS = "Next: find what stopped it (a debugger, a batch system, kill -STOP), and start again"


def report_verdict(sentence: str) -> None:
    """Report to the process that started this rank that the ranks have printed a verdict."""
    if MARK in os.environ:
        with contextlib.suppress(OSError):
            (_family_folder() / VERDICT).write_text(sentence)


def _family_folder() -> Path:
    """Return the folder of this rank's run; one that does not exist if it belongs to none."""
    return Path(os.environ.get(MARK, "/nonexistent").split(":")[-1])


def end_if_stopped(rank: int, seconds: float, end: bool = True) -> bool:
    """Name the ranks that are stopped on this host, and end them and this process.

    seconds: how long this rank has waited for them. end=False: only name them, and return whether
    there are any.
    """
    pids = _find_siblings()
    stopped = {r: pid for r, pid in pids.items() if r != rank and is_stopped(pid)}
    if not stopped:
        return False
    if rank == min({rank, *pids} - {*stopped}):
        verb, them = ("is", "it") if len(stopped) == 1 else ("are", "them")
        names = "; ".join(describe_process(f"rank {r}", pid) for r, pid in sorted(stopped.items()))
        sentence = (
            f"{names} {verb} stopped (SIGSTOP): rank {rank} has waited for {them} longer than "
            f"{seconds:g} s (--timeout). {WHO_STOPS}"
        )
        if not read_text(_family_folder() / VERDICT):
            report_verdict(sentence)
            tell(sentence)
    elif end:
        time.sleep(family.CLEAN_SECONDS)  # a launcher ends all ranks when the first one ends
    if end:
        # Open MPI's launcher continues a stopped rank to end it; other launchers would wait.
        for pid in () if "PMIX_NAMESPACE" in os.environ else stopped.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        family.kill_descendants()
        os._exit(5)
    return True


def describe_process(name: str, pid: int) -> str:
    """Return "rank 1 (host, pid 7)", for a process on this host."""
    return f"{name} ({socket.gethostname()}, pid {pid})"


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _find_siblings() -> dict[int, int]:
    """Return rank → pid of the ranks on this host that this process can see."""
    if text := read_text(_family_folder() / "pids"):
        return {int(rank): pid for rank, pid in json.loads(text).items()}
    namespace = os.environ.get("PMIX_NAMESPACE")
    children = psutil.Process(os.getppid()).children()
    return {
        rank: process.pid
        for rank, process in find_ranks(children).items()
        if process_environ(process).get("PMIX_NAMESPACE") == namespace
    }


def find_ranks(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """Return rank → process of those that a launcher started; the first one of each rank."""
    ranks: dict[int, psutil.Process] = {}
    for process in processes:
        with contextlib.suppress(Refused):
            if (placement := read_placement(process_environ(process))) is not None:
                ranks.setdefault(placement.rank, process)
    return ranks
