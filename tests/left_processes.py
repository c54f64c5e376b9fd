"""Processes that a test left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
from patience import PATIENCE_SECONDS


def wait_for_left_processes(folder: Path) -> list[str]:
    """Return the command lines of processes that name a path in this folder and do not end.

    The process that cleans up after a killed one needs some time.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while command_lines := _list_processes(folder):
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return command_lines


def _list_processes(folder: Path) -> list[str]:
    command_lines = {
        p.pid: " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])
    }
    return [
        line
        for pid, line in command_lines.items()
        if f"{folder}{os.sep}" in line and pid != os.getpid()
    ]
