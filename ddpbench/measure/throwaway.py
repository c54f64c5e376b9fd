"""Ranks to throw away: what may abort its process, or never end, is tried in processes of its own,
on this host.

What a rank does, or how it ended, stands in the last line of a file of its own.
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
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from ddpbench.catalog import backends
from ddpbench.launch import forks, placement, starters
from ddpbench.launch.placement import Placement, Refused
from ddpbench.launch.supervise import Deadline
from ddpbench.runtime.meeting import Rendezvous
from ddpbench.runtime.world import World, join_world

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

GRACE_SECONDS = 3.0  # for the ranks to leave, and MPI to clear its files away
# What launchers tell their ranks. A user's settings for Open MPI stay: what works depends on them.
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

Tell = Callable[..., None]  # (kind, text): what this rank does now


@dataclass(frozen=True)
class Request:
    """Where something is tried; goes to the ranks as JSON. Who adds what is tried, inherits."""

    backend: str
    device: str
    seconds: float  # of a wait of the ranks for each other
    modules: Sequence[str]  # imported first
    launcher: str  # of starters.STARTERS
    ranks: int


def ranks_for(backend: str) -> int:
    """How many ranks try something: two; on nccl one a GPU."""
    if backend != "nccl":
        return 2
    import torch

    return max(1, min(2, torch.cuda.device_count()))


class State(NamedTuple):
    """What a rank told last."""

    rank: int
    kind: str  # "doing", "failed", "works", or what the attempt has besides
    text: str
    since: float  # time.time()


@dataclass(frozen=True)
class Trial:
    """A set of ranks, started; its files lie in the folder while it is entered."""

    folder: Path
    process: subprocess.Popen[bytes]

    def states(self) -> list[State]:
        """Of each rank that has started, in order of their ranks."""
        return states(self.folder)

    def end(self) -> int:
        """End the process and all that it has started, if it has not ended by itself; its exit
        code."""
        process = self.process
        if process.poll() is None:
            started = psutil.Process(process.pid).children(recursive=True)
            process.terminate()  # which launchers pass on to their ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            for each in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.kill()
        return process.wait()


@contextlib.contextmanager
def started(module: str, request: Request) -> Iterator[Trial]:
    """Run `python -m MODULE FOLDER`, whose main is `run`; at the end nothing of it is left.

    Rank 0 of a running job may enter it while the others wait. Raises OSError where the folder
    cannot be made.
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
    """This environment without what makes a process a rank; one that finds what this one finds."""
    mine = {name: text for name, text in os.environ.items() if not LAUNCHERS.fullmatch(name)}
    return {
        **mine,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONFAULTHANDLER": "1",  # says which signal ended a rank
        "OMP_NUM_THREADS": "1",
    }


def states(folder: Path) -> list[State]:
    """Of each rank that has started, as the last line that it wrote tells."""
    found = []
    for path in sorted(folder.glob("rank-*")):
        *_, last = path.read_text().splitlines() or ["doing its start"]
        kind, _, text = last.partition(" ")
        rank = int(path.name.removeprefix("rank-"))
        found.append(State(rank, kind, text, path.stat().st_mtime))
    return found


def output(folder: Path) -> list[str]:
    """The lines that launcher and ranks have printed."""
    return (folder / "output").read_text(errors="replace").splitlines()


def death(lines: Sequence[str]) -> str | None:
    """How a signal ended a rank, with what was said before: "was aborted (SIGABRT): what(): …"."""
    for i, line in enumerate(lines):
        died = re.search("Fatal Python error: (.*)", line)
        if died and died[1] in DEATHS:
            before = [each.strip() for each in lines[:i] if re.search(r"terminate|what\(\)", each)]
            return short(": ".join([DEATHS[died[1]], *before[-2:]]))
    return None


def last_words(lines: Sequence[str]) -> list[str]:
    """The last two lines in which there is a word."""
    return [line.strip() for line in lines if re.search(r"\w", line)][-2:]


def short(text: str) -> str:
    """At most 400 characters of it."""
    return text if len(text) <= 400 else f"{text[:399]}…"


def sentence(error: Exception) -> str:
    """Its type and first line, without what torch puts before it for each future on its way."""
    first = (str(error).strip() or "no text").splitlines()[0]
    through, _, text = first.rpartition("running the callback: ")
    return short(
        text if through or isinstance(error, Refused) else f"{type(error).__name__}: {text}"
    )


# --- in the processes to throw away


def run(module: str, folder: Path, request: Request, attempt: Callable[[World, Tell], None]) -> int:
    """The main of such a module: start the ranks; in one of them, make the attempt."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if placement.read_placement() is not None:
        return _rank(request, folder, attempt)
    # Whoever asked may be killed while it waits: then nobody wants to know any more.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError):  # not only on the core that a launcher gave rank 0
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    deadline = Deadline(request.seconds)
    if request.device == "cpu" and request.launcher == "torchrun":
        return forks.run(lambda: _rank(request, folder, attempt), request.ranks, (), deadline)
    return starters.STARTERS[request.launcher](["-m", module, str(folder)], request.ranks, deadline)


def _rank(request: Request, folder: Path, attempt: Callable[[World, Tell], None]) -> int:
    """One rank's part; what it does, and how it ended, stands in the last line of its file."""
    place = placement.read_placement()
    assert isinstance(place, Placement)
    with (folder / f"rank-{place.rank}").open("a", buffering=1) as file:

        def tell(kind: str, text: str = "") -> None:
            file.write(f"{kind} {text}\n")

        tell("doing", "its start")
        try:
            for module in request.modules:
                import_module(module)
            meeting = Rendezvous(timeout_seconds=request.seconds)
            with join_world(place, meeting, share_gpu=True) as world:
                _told(lambda: attempt(world, tell), tell)
        except Exception as error:
            tell("failed", sentence(error))
            raise
    return 0


def _told(attempt: Callable[[], None], tell: Tell) -> None:
    """Tell an error before the group's end: that may end the process."""
    try:
        attempt()
    except Exception as error:
        tell("failed", sentence(error))
        raise


@contextlib.contextmanager
def tested(request: Request, world: World) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """A group of all ranks on the backend asked for, and this rank's device."""
    backend = backends.get(request.backend)
    name = backend.register() if backend.register else backend.name
    device = world.agree_device(request.device)
    with world.agree_group(name) as found:
        yield found, device
