"""How faults of a set-up are made: each is a context in which a rank meets the others and is
examined, given the rank's place and the fault's settings; what was changed is undone at its end.
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

# Ends by itself when the rank that started it has, however that came.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
NO_INTERFACE, NO_VERSION = "nonesuch0", "1.0.0"
Settings = Mapping[str, float]


@contextlib.contextmanager
def slow_rank(place: Any, settings: Settings) -> Iterator[None]:
    """All threads of the rank, and those it will have, share one core with busy processes."""
    before = os.sched_getaffinity(0)
    _pin({max(before)})
    me = str(os.getpid())
    busy = [
        subprocess.Popen([sys.executable, "-c", BUSY, me]) for _ in range(int(settings["busy"]))
    ]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()
        _pin(before)


def _pin(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(task.name), cores)


def wrong_interface(place: Any, settings: Settings) -> AbstractContextManager[None]:
    """gloo is told an interface that the host does not have."""
    return _variable(network.GLOO, NO_INTERFACE)


def oversubscribed(place: Any, settings: Settings) -> AbstractContextManager[None]:
    """Several compute threads a core, in each rank."""
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
def mixed_versions(place: Any, settings: Settings) -> Iterator[None]:
    """The rank tells of another torch than it runs: a second one is not here to be run."""
    told: Any = environment
    versions = told._versions
    told._versions = lambda: {**versions(), "torch": NO_VERSION}
    try:
        yield
    finally:
        told._versions = versions


@contextlib.contextmanager
def full_disk(place: Any, settings: Settings) -> Iterator[None]:
    """No file that the rank writes may grow beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(settings["nbytes"]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
