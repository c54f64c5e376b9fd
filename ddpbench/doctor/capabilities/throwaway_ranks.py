"""Throwaway ranks: try code that may abort its process, or hang, in separate processes.

Each rank has a file. Its last line is what the rank is doing, or how it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from ddpbench.catalog import backends
from ddpbench.launch import placement, starters
from ddpbench.launch.placement import Placement, Refused
from ddpbench.launch.supervise import Deadline
from ddpbench.runtime import devices
from ddpbench.runtime.meeting import Rendezvous
from ddpbench.runtime.world import World, join_world

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

GRACE_SECONDS = 3.0  # for the ranks to end and MPI to remove its files
# Variables that launchers set in their ranks. The user's settings for Open MPI are kept.
LAUNCHERS = re.compile(
    r"(DDPBENCH_|GROUP_|ROLE_)?(LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|(MASTER_|TORCHELASTIC_|PMIX?_|"
    r"PMI2_|PRTE_|SLURM_|HYDRA_|HYDI_|MPI_LOCAL|OMPI_(?!MCA_)|OMPI_MCA_(ess|orte|pmix|prte)).*"
)
DEATHS = {
    "Aborted": "was aborted (SIGABRT)",
    "Segmentation fault": "crashed (SIGSEGV)",
    "Bus error": "crashed (SIGBUS)",
    "Illegal instruction": "crashed (SIGILL)",
    "Floating-point exception": "crashed (SIGFPE)",
}

RANKS = 2  # of a trial; two may share a GPU
Report = Callable[..., None]  # (kind, text): report what this rank is doing
Attempt = Callable[[World, Report], None]  # one rank's part


@dataclass(frozen=True)
class Request:
    """The ranks of a trial, sent to them as JSON. A subclass adds what to try."""

    backend: str
    device: str
    seconds: float  # longest wait of the ranks for each other
    modules: Sequence[str]  # imported first
    launcher: str  # as in starters.start
    ranks: int


class State(NamedTuple):
    """The last report of a rank."""

    rank: int
    kind: str  # "doing", "failed", "works", or a kind that the attempt adds
    text: str
    since: float  # time.time()


@dataclass(frozen=True)
class Trial:
    """Started ranks, and the folder of their files."""

    folder: Path
    process: subprocess.Popen[bytes]

    def states(self) -> list[State]:
        """Return the last report of each rank that has started, in the order of the ranks."""
        return states(self.folder)

    def end(self) -> int:
        """End the process and its descendants if they still run. Return its exit code."""
        process = self.process
        if process.poll() is None:
            started = psutil.Process(process.pid).children(recursive=True)
            process.terminate()  # launchers pass the signal on to their ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            for each in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.kill()
        return process.wait()


@contextlib.contextmanager
def started(module: str, request: Request) -> Iterator[Trial]:
    """Run `python -m MODULE FOLDER`, whose main is `run`. At the end, remove processes and files.

    Rank 0 of a running job may enter this while the other ranks wait. Raises OSError if the folder
    cannot be created.
    """
    with tempfile.TemporaryDirectory(prefix="ddpbench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "request").write_text(json.dumps(asdict(request)))
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, name],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        trial = Trial(folder, process)
        try:
            yield trial
        finally:
            trial.end()


def environment() -> dict[str, str]:
    """Return this environment without launcher variables, with the same modules for Python."""
    kept = {name: text for name, text in os.environ.items() if not LAUNCHERS.fullmatch(name)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONFAULTHANDLER": "1",  # reports the signal that ended a rank
        "OMP_NUM_THREADS": "1",
    }


def states(folder: Path) -> list[State]:
    """Read the last line of each rank that has started."""
    found = []
    for path in sorted(folder.glob("rank-*")):
        *_, last = path.read_text().splitlines() or ["doing its start"]
        kind, _, text = last.partition(" ")
        rank = int(path.name.removeprefix("rank-"))
        found.append(State(rank, kind, text, path.stat().st_mtime))
    return found


def output(folder: Path) -> list[str]:
    """Return the lines that the launcher and the ranks have printed."""
    return (folder / "output").read_text(errors="replace").splitlines()


def death(lines: Sequence[str]) -> str | None:
    """Describe the signal that ended a rank: "was aborted (SIGABRT): what(): …"; None without."""
    for i, line in enumerate(lines):
        died = re.search("Fatal Python error: (.*)", line)
        if died and died[1] in DEATHS:
            before = [each.strip() for each in lines[:i] if re.search(r"terminate|what\(\)", each)]
            return short(": ".join([DEATHS[died[1]], *before[-2:]]))
    return None


def last_words(lines: Sequence[str]) -> list[str]:
    """Return the last two lines that contain a word."""
    return [line.strip() for line in lines if re.search(r"\w", line)][-2:]


def short(text: str) -> str:
    """Shorten a text to 400 characters."""
    return text if len(text) <= 400 else f"{text[:399]}…"


def sentence(error: Exception) -> str:
    """Describe an error by type and first line, without the prefixes of torch's futures."""
    first = (str(error).strip() or "no text").splitlines()[0]
    through, _, text = first.rpartition("running the callback: ")
    return short(
        text if through or isinstance(error, Refused) else f"{type(error).__name__}: {text}"
    )


# --- in the throwaway processes -------------------------------------------------------------------


def run(
    module: str,
    folder: Path,
    request: Request,
    attempt: Attempt,
    preloaded: Sequence[str] = (),
) -> int:
    """Start the ranks, or make the attempt if this process is one of them.

    preloaded: modules that take long to import; forked ranks inherit them.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if placement.read_placement() is not None:
        return _rank(request, folder, attempt)
    # The parent may be killed while it waits. Then end this process, too.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError):  # a launcher may have bound rank 0 to one core
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    forked = partial(_rank, request, folder, attempt)
    return starters.start(
        request.launcher,
        ["-m", module, str(folder)],
        forked if devices.get(request.device).forks else None,
        request.ranks,
        Deadline(request.seconds),
        preloaded,
    )


def _rank(request: Request, folder: Path, attempt: Attempt) -> int:
    own = placement.read_placement()
    assert isinstance(own, Placement)
    with (folder / f"rank-{own.rank}").open("a", buffering=1) as file:

        def report(kind: str, text: str = "") -> None:
            file.write(f"{kind} {text}\n")

        report("doing", "its start")
        with _reported(report):
            for module in request.modules:
                import_module(module)
            rendezvous = Rendezvous(timeout_seconds=request.seconds)
            # Report an error before the group ends, which may end the process.
            with join_world(own, rendezvous, share_gpu=True) as world, _reported(report):
                attempt(world, report)
    return 0


@contextlib.contextmanager
def _reported(report: Report) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        report("failed", sentence(error))
        raise


@contextlib.contextmanager
def tested(request: Request, world: World) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """Yield a group of all ranks on the requested backend, and this rank's device."""
    backend = backends.get(request.backend)
    name = backend.register() if backend.register else backend.name
    device = world.agree_device(request.device)
    with world.agree_group(name, device=device) as group:
        yield group, device
