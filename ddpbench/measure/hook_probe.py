"""Whether a communication hook of DDP works on a backend here: really tried, in processes to throw
away, as one that does not may abort its process or never end.

A hook that waits inside a callback, as PowerSGD's does, holds a thread of the backend for every
bucket in flight. gloo has two such threads, and takes calls from several in another order in each
rank: with one bucket PowerSGD works there, with more it hangs or aborts. So the probe's model has
several.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ddpbench.catalog import backends
from ddpbench.catalog.hooks import HOOKS
from ddpbench.runtime import agree, group, launch
from ddpbench.runtime.group import Group, Rendezvous
from ddpbench.runtime.launch import Placement, Refused

STEPS = 5
STEP_SECONDS = 10.0  # for one that is not the first: a few ms of work
GRACE_SECONDS = 3.0  # for the ranks to leave, and MPI to clear its files away
# What launchers tell their ranks. A user's settings for Open MPI stay: what works depends on them.
LAUNCHERS = re.compile(
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|(MASTER_|TORCHELASTIC_|PMIX?_|PMI2_|PRTE_|"
    r"SLURM_|HYDRA_|HYDI_|MPI_LOCAL|OMPI_(?!MCA_)|OMPI_MCA_(ess|orte|pmix|prte)).*"
)
DEATHS = {
    "Aborted": "was aborted (SIGABRT)",
    "Segmentation fault": "crashed (SIGSEGV)",
    "Bus error": "crashed (SIGBUS)",
    "Illegal instruction": "crashed (SIGILL)",
    "Floating-point exception": "crashed (SIGFPE)",
}


@dataclass(frozen=True)
class Request:
    """What the ranks are to try; goes to them as JSON."""

    hook: str
    backend: str
    device: str
    seconds: float
    options: Mapping[str, Any]
    modules: Sequence[str]
    buckets: int
    launcher: str
    ranks: int


def refusal(
    hook: str, backend: str, device: str, timeout_seconds: float, options: Mapping[str, object],
    modules: Sequence[str] = (), buckets: int = 4,
) -> str | None:  # fmt: skip
    """None where the hook works on this backend and device; else one sentence: why not.

    Two ranks of this host (nccl: one a GPU) train a small model for a few steps; its gradients must
    be finite and its replicas equal. Takes a few seconds, never much more than timeout_seconds.
    Rank 0 of a running job may call it while the others wait.

    options: as DistributedDataParallel takes them, which JSON can carry; bucket_cap_mb is replaced.
    modules: imported first in the ranks. buckets: how many the model has, at most 8.
    """
    ranks = 2
    if backend == "nccl":
        import torch

        ranks = max(1, min(2, torch.cuda.device_count()))
    request = Request(
        hook, backend, device, timeout_seconds, dict(options), list(modules),
        min(buckets, 8), backends.get(backend).launcher, ranks,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ddpbench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "request").write_text(json.dumps(asdict(request)))
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ddpbench.measure.hook_probe", name],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            late = _await(process, folder, timeout_seconds)
        finally:
            _end(process)
        reason = _reason(folder, ranks, process.returncode, late)
    return None if reason is None else f"{hook} on {backend}: {reason}"


def _environment() -> dict[str, str]:
    """This environment without what makes a process a rank; one that finds what this one finds."""
    mine = {name: text for name, text in os.environ.items() if not LAUNCHERS.fullmatch(name)}
    return {
        **mine,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONFAULTHANDLER": "1",  # says which signal ended a rank
        "OMP_NUM_THREADS": "1",
    }


def _await(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> str | None:
    """None once the process has ended; a reason where a step, or all, takes too long."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        busy = [state for state in _states(folder) if state.kind == "doing"]
        if time.monotonic() > deadline:
            if not busy:
                return f"its trial was not over after {seconds:g} s"
            return f"it did not end within {seconds:g} s: rank {busy[0].rank} was in {busy[0].text}"
        for rank, _, text, since in busy:
            # The first step loads what the others have.
            if text in map(_step, range(2, STEPS + 1)) and time.time() - since > STEP_SECONDS:
                return f"it hung: rank {rank} was in {text} for over {STEP_SECONDS:g} s"
        time.sleep(0.02)
    return None


class _State(NamedTuple):
    rank: int
    kind: str  # "doing", "failed" or "works"
    text: str
    since: float


def _states(folder: Path) -> list[_State]:
    """Of each rank that has started, as the last line that it wrote tells."""
    states = []
    for path in sorted(folder.glob("rank-*")):
        *_, last = path.read_text().splitlines() or ["doing its start"]
        kind, _, text = last.partition(" ")
        rank = int(path.name.removeprefix("rank-"))
        states.append(_State(rank, kind, text, path.stat().st_mtime))
    return states


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started, if it has not ended by itself."""
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()  # which launchers pass on to their ranks
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()


def _reason(folder: Path, ranks: int, code: int, late: str | None) -> str | None:
    """None where every rank found that it works; else why not, the first cause of it."""
    states = _states(folder)
    if code == 0 and [state.kind for state in states] == ["works"] * ranks:
        return None
    lines = (folder / "output").read_text(errors="replace").splitlines()
    for i, line in enumerate(lines):
        died = re.search("Fatal Python error: (.*)", line)
        if died and died[1] in DEATHS:
            before = [each.strip() for each in lines[:i] if re.search(r"terminate|what\(\)", each)]
            return _short(": ".join([f"the process {DEATHS[died[1]]}", *before[-2:]]))
    failed = [state for state in states if state.kind == "failed"]
    if failed:
        return min(failed, key=lambda state: state.since).text
    if late is not None:
        return late
    busy = [f", rank {state.rank} in {state.text}" for state in states if state.kind == "doing"]
    last = [line.strip() for line in lines if re.search(r"\w", line)][-2:]
    return _short(": ".join([f"its trial ended with exit code {code}{''.join(busy)}", *last]))


def _short(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:399]}…"


def _step(number: int) -> str:
    return f"step {number} of {STEPS}"


# --- in the processes to throw away


def main(folder: Path) -> int:
    """Start the ranks; in one of them, try the hook."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = Request(**json.loads((folder / "request").read_text()))
    place = launch.placement()
    if place is not None:
        _rank(request, place, folder / f"rank-{place.rank}")
        return 0
    # Whoever asked may be killed while it waits: then nobody wants to know any more.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError):  # not only on the core that a launcher gave rank 0
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    starter = launch.STARTERS[request.launcher]
    return starter(["-m", "ddpbench.measure.hook_probe", str(folder)], request.ranks)


def _rank(request: Request, place: Placement, path: Path) -> None:
    """One rank's trial; what it does, and how it ended, stands in the last line of the file."""
    with path.open("a", buffering=1) as file:

        def tell(kind: str, text: str = "") -> None:
            file.write(f"{kind} {text}\n")

        tell("doing", "its start")
        try:
            for module in request.modules:
                import_module(module)
            meeting = Rendezvous(timeout_seconds=request.seconds)
            with group.opened(place, meeting, share_gpu=True) as ranks:
                _told(lambda: _try(request, ranks, tell), tell)
        except Exception as error:
            tell("failed", _sentence(error))
            raise


def _told(attempt: Callable[[], None], tell: Callable[..., None]) -> None:
    """Tell an error before the group's end: that may end the process."""
    try:
        attempt()
    except Exception as error:
        tell("failed", _sentence(error))
        raise


def _sentence(error: Exception) -> str:
    """Its type and first line, without what torch puts before it for each future on its way."""
    first = (str(error).strip() or "no text").splitlines()[0]
    through, _, text = first.rpartition("running the callback: ")
    return _short(
        text if through or isinstance(error, Refused) else f"{type(error).__name__}: {text}"
    )


def _try(request: Request, ranks: Group, tell: Callable[..., None]) -> None:
    """Train a small model with the hook. Raises what that raises; Refused for a wrong outcome."""
    tell("doing", "the set-up of the group")
    backend = backends.get(request.backend)
    name = backend.register() if backend.register else backend.name
    device = ranks.device(request.device)
    with ranks.tested(name) as tested:
        parameters = _train(request, tested, device, ranks.rank, tell)
        tell("doing", "the comparison of the replicas")
        if len(set(agree.everyones(ranks, _digest(parameters)))) > 1:
            raise Refused(f"the replicas' parameters differ after {STEPS} steps")
    tell("works")


def _train(
    request: Request, tested: Any, device: Any, rank: int, tell: Callable[..., None]
) -> list[Any]:
    """The parameters after all steps, of a model with one layer a bucket."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    # Of different shapes: calls that match up wrongly fail then, instead of adding up nonsense.
    widths = [64 + 8 * i for i in range(request.buckets + 1)]
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers).to(device),
        device_ids=[device] if device.type == "cuda" else None,
        process_group=tested,
        **{**request.options, "bucket_cap_mb": 0.001 if request.buckets > 1 else 25},
    )
    make = HOOKS[request.hook].make
    if make is not None:
        model.register_comm_hook(*make(tested))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    for number in range(1, STEPS + 1):
        tell("doing", _step(number))
        optimizer.zero_grad()
        model(torch.randn(8, widths[0], device=device)).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise Refused(f"a gradient is not finite after {_step(number)}")
        optimizer.step()
    return list(model.parameters())


def _digest(parameters: list[Any]) -> str:
    """The same only for tensors of the same bits."""
    import hashlib

    data = (p.detach().cpu().numpy().tobytes() for p in parameters)
    return hashlib.sha256(b"".join(data)).hexdigest()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
