"""The ranks of a run on one host: how to find them, and what they report to their starter."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from ddpbench.launch.family import MARK, VERDICT, process_environ
from ddpbench.launch.placement import Refused, read_placement

LATE_SECONDS = 6.0  # beyond the deadline, for the ranks to report by themselves before the starter
REPORTING_SECONDS = 4.0  # for the starter to end the ranks after that


def report_verdict(sentence: str) -> None:
    """Report to the process that started this rank that the ranks have printed a verdict."""
    if MARK in os.environ:
        with contextlib.suppress(OSError):
            (Path(os.environ[MARK].split(":")[-1]) / VERDICT).write_text(sentence)


def add_patience(seconds: float) -> float:
    """Return how long ranks that have not met wait for each other if their deadline is `seconds`.

    The process that started them names a rank that is stopped; ranks see only that it is missing.
    """
    return seconds + (LATE_SECONDS + REPORTING_SECONDS if MARK in os.environ else 0.0)


def describe_process(name: str, pid: int) -> str:
    """Return "rank 1 (host, pid 7)", for a process on this host."""
    return f"{name} ({socket.gethostname()}, pid {pid})"


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def find_ranks(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """Return rank → process of those that a launcher started; the first one of each rank."""
    ranks: dict[int, psutil.Process] = {}
    for process in processes:
        with contextlib.suppress(Refused):
            if (placement := read_placement(process_environ(process))) is not None:
                ranks.setdefault(placement.rank, process)
    return ranks
