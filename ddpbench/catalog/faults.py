"""The faults that ddpbench can plant to show that it finds them, and those of a rank's set-up.

    ddp --inject bit-flip:step=7,rank=1        in a step: step_faults.py
    doctor --inject wrong-interface:rank=0     in the set-up of a rank: SET_UP_FAULTS, below

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ddpbench.catalog.planting import IN_SET_UP, IN_STEP, Fault, Planted, Settings
from ddpbench.catalog.step_faults import STEP_FAULTS
from ddpbench.records.wording import explain_unknown
from ddpbench.runtime import environment, network

COMMANDS = {IN_STEP: "ddp", IN_SET_UP: "doctor"}


def parse(text: str, kind: str = IN_STEP) -> Planted:
    """Parse a fault of this kind from "name" or "name:setting=value,…".

    Raises ValueError with one sentence.
    """
    name, _, rest = text.partition(":")
    fault = FAULTS[kind].get(name)
    if fault is None:
        for other, command in COMMANDS.items():
            if name in FAULTS[other]:
                raise ValueError(f"{name} is a fault of a {other}: use {command} --inject {name}")
        raise ValueError(explain_unknown("fault", name, FAULTS[kind]))
    settings = fault.defaults
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        try:
            if key not in settings:
                raise ValueError
            settings[key] = float(value)
        except ValueError:
            shown = ",".join(f"{k}={v:g}" for k, v in fault.defaults.items())
            raise ValueError(
                f"{name} has no setting {word!r}: choose from these settings (defaults): {shown}"
            ) from None
    return Planted(fault, settings)


def list_faults(kind: str) -> str:
    """List all faults of a kind, for a help text."""
    return "; ".join(f"{fault.name}: {fault.help}" for fault in FAULTS[kind].values())


# --- faults of a rank's set-up --------------------------------------------------------------------

# Each function is a context in which the rank runs. It takes the rank's placement and the fault's
# settings, and undoes its change at the end.

# This program ends once the rank that started it has ended, for any reason.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
NO_INTERFACE, NO_VERSION = "nonesuch0", "1.0.0"


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


def wrong_interface(placement: Any, settings: Settings) -> AbstractContextManager[Any]:
    """Set GLOO_SOCKET_IFNAME to an unknown interface in one rank."""
    return _variable(network.GLOO, NO_INTERFACE)


def oversubscribed(placement: Any, settings: Settings) -> AbstractContextManager[Any]:
    """Set OMP_NUM_THREADS to a multiple of the cores."""
    threads = int(settings["per_core"]) * len(os.sched_getaffinity(0))
    return _variable("OMP_NUM_THREADS", str(threads))


def _variable(name: str, value: str) -> AbstractContextManager[Any]:
    from unittest import mock  # loads asyncio

    return mock.patch.dict(os.environ, {name: value})


def mixed_versions(placement: Any, settings: Settings) -> AbstractContextManager[Any]:
    """Let one rank report another version of torch. A second torch is not installed here."""
    from unittest import mock

    versions = {**environment._versions(), "torch": NO_VERSION}
    return mock.patch.object(environment, "_versions", return_value=versions)


@contextlib.contextmanager
def full_disk(placement: Any, settings: Settings) -> Iterator[None]:
    """Limit the size of every file. Writing more fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(settings["nbytes"]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


SET_UP_FAULTS = (
    Fault(slow_rank, {"busy": 3}, kind=IN_SET_UP),
    Fault(wrong_interface, kind=IN_SET_UP),
    Fault(mixed_versions, kind=IN_SET_UP),
    Fault(oversubscribed, {"per_core": 2}, kind=IN_SET_UP, all_ranks=True),
    Fault(full_disk, {"nbytes": 4096}, kind=IN_SET_UP, all_ranks=True),
)
FAULTS: dict[str, dict[str, Fault]] = {
    IN_STEP: {fault.name: fault for fault in STEP_FAULTS},
    IN_SET_UP: {fault.name: fault for fault in SET_UP_FAULTS},
}
