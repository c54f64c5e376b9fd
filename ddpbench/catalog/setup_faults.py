"""Faults of a rank's set-up. Each function is a context in which the rank runs.

It takes the rank's placement and the fault's settings, and undoes its change at the end. The first
sentence of each docstring is the fault's help text.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ddpbench.runtime import environment, network

# Ends by itself once the rank that started it has ended, for any reason.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
NO_INTERFACE, NO_VERSION = "nonesuch0", "1.0.0"
Settings = Mapping[str, float]


@contextlib.contextmanager
def slow_rank(placement: Any, settings: Settings) -> Iterator[None]:
    """Let one rank share a core with busy processes."""
    before = os.sched_getaffinity(0)
    _pin({max(before)})
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    processes = [subprocess.Popen(command) for _ in range(int(settings["busy"]))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        _pin(before)


def _pin(cores: set[int]) -> None:
    """Pin all threads of this process; later threads inherit it."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(task.name), cores)


def wrong_interface(placement: Any, settings: Settings) -> AbstractContextManager[None]:
    """Set GLOO_SOCKET_IFNAME to an unknown interface in one rank."""
    return _variable(network.GLOO, NO_INTERFACE)


def oversubscribed(placement: Any, settings: Settings) -> AbstractContextManager[None]:
    """Set OMP_NUM_THREADS to a multiple of the cores."""
    threads = int(settings["per_core"]) * len(os.sched_getaffinity(0))
    return _variable("OMP_NUM_THREADS", str(threads))


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def mixed_versions(placement: Any, settings: Settings) -> Iterator[None]:
    """Let one rank report another version of torch. A second torch is not installed here."""
    module: Any = environment
    versions = module._versions
    module._versions = lambda: {**versions(), "torch": NO_VERSION}
    try:
        yield
    finally:
        module._versions = versions


@contextlib.contextmanager
def full_disk(placement: Any, settings: Settings) -> Iterator[None]:
    """Limit the size of every file. Writing more fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(settings["nbytes"]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
