"""Processes that a test left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def wait_for_left_processes(folder: Path) -> list[str]:
    """The command lines of the processes that were told a folder in this one, and are still there
    when the one that cleans up after a killed process has had time for it."""
    until = time.monotonic() + 10
    while found := _list_processes(folder):
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return found


def _list_processes(folder: Path) -> list[str]:
    lines = {p.pid: " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])}
    return [e for pid, e in lines.items() if f"{folder}{os.sep}" in e and pid != os.getpid()]
