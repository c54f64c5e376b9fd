"""Run many kinds of jobs bare and watched, and compare them bit for bit.

    python tests/watch/jobs.py                                 # all, about ten minutes
    python tests/watch/jobs.py --only "plain DDP" ZeRO

Each kind runs in ranks that are started by hand, once as `python jobs.py` and once as
`python -m ddpbench.watch --timeout 100 jobs.py`. Every rank's exit code and stdout, which holds all
losses in hexadecimal, and every file written must be equal. Prints a table in Markdown; the exit
code is 1 if a job differs, with the difference on stderr, or if its stored end is wrong.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpbench.launch.placement import free_port

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parents[1]
DDP = DistributedDataParallel
STEPS, DEADLINE_SECONDS = 20, 240
WATCH = ["-m", "ddpbench.watch", "--timeout", "100"]
Play = Callable[[int], object]
KINDS: dict[str, tuple[Play, int, bool]] = {}  # play, ranks, whether the group is made before


def kind(name: str, ranks: int = 2, init: bool = True) -> Callable[[Play], Play]:
    """Add a kind of job: a function of the rank."""

    def add(play: Play) -> Play:
        KINDS[name] = play, ranks, init
        return play

    return add


def net() -> nn.Module:
    """The same model in every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def batches(rank: int, count: int = STEPS) -> Iterator[Tensor]:
    """Batches of this rank's own."""
    random = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(5, 6, generator=random)


def train(
    model: nn.Module, data: Any, optimizer: Any = None, after: Callable[[int], object] = id
) -> None:
    """Train with these batches; call `after` with the number of each step."""
    optimizer = optimizer or sgd(model)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)
        after(step)


kind("plain DDP")(lambda rank: train(DDP(net()), batches(rank, 1000)))  # for some reports
kind("torch.compile")(lambda rank: train(torch.compile(DDP(net()), backend="eager"), batches(rank)))
kind("no training at all", init=False)(lambda rank: print("hello"))
kind("reading stdin")(lambda rank: print(sys.stdin.read()))


@kind("training in 2 of 4 ranks", 4)
def _subgroup(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        train(DDP(net(), process_group=group), batches(rank))
    dist.barrier()


@kind("fully_shard")
def _shard(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    train(model, batches(rank))


@kind("ZeRO")
def _zero(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    train(model, batches(rank), optimizer)


@kind("Join with uneven inputs")
def _join(rank: int) -> None:
    from torch.distributed.algorithms.join import Join

    model = DDP(net())
    with Join([model]):
        train(model, batches(rank, STEPS + 5 * rank))


@kind("training in a thread")
def _thread(rank: int) -> None:
    thread = threading.Thread(target=lambda: train(DDP(net()), batches(rank)))
    thread.start()
    thread.join()


def _at(step: int, function: Callable[[], object], ranks: tuple[int, ...] = (0, 1)) -> Play:
    """Train, and call the function at a step of these ranks."""

    def play(rank: int) -> None:
        atexit.register(print, "atexit")
        with Path(f"log-{rank}").open("w") as file:  # buffered
            file.write("written")
            hook = lambda number: number == step and rank in ranks and function()  # noqa: E731
            train(DDP(net()), batches(rank), after=hook)

    return play


def _fail() -> None:
    raise ValueError("planted")


kind("sys.exit('text') after the last step")(_at(STEPS - 1, lambda: sys.exit("text"), (1,)))
kind("exception in one rank")(_at(5, _fail, (1,)))


@kind("handler of SIGTERM")
def _terminate(rank: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (print("saving"), sys.exit(9)))
    _at(5, lambda: os.kill(os.getpid(), signal.SIGTERM))(rank)


class Tee:
    """A stream that also writes into a file, and has no other attribute of a stream."""

    def __init__(self, stream: Any, path: str) -> None:
        self.stream, self.file = stream, Path(path).open("w")  # noqa: SIM115

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.file.write(text if self.stream is sys.__stdout__ else "")

    def flush(self) -> None:
        self.stream.flush()
        self.file.flush()


@kind("stdout and stderr through a tee")
def _tee(rank: int) -> None:
    sys.stdout, sys.stderr = Tee(sys.stdout, f"out-{rank}"), Tee(sys.stderr, f"err-{rank}")
    train(DDP(net()), batches(rank))


class LastOwner:
    """Keeps the store of rank 1, in `builtins`, until the process of rank 0 has ended.

    If both ranks give their FileStore up at once, torch itself may leave the file: a rank counts
    the ranks that are through first, then the references, and each may miss the other's part.
    """

    def __init__(self, pid: int) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        self.wait = partial(select.select, [os.pidfd_open(pid)], [], [], DEADLINE_SECONDS)

    def __del__(self) -> None:
        self.wait()


def _meet(rank: int, times: int) -> None:
    """Train in one group after another. At one port, a rank may still find the store before."""
    for number in range(times):
        place = f"file://{Path.cwd()}/meeting-{number}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
        train(DDP(net()), batches(rank))
        pid = torch.tensor([os.getpid()])
        dist.broadcast(pid, 0)
        if rank == 1:
            setattr(builtins, f"kept_{number}", LastOwner(int(pid)))
        dist.barrier()
        dist.destroy_process_group()


kind("init_method file://", init=False)(lambda rank: _meet(rank, 1))
kind("group destroyed and made again", init=False)(lambda rank: _meet(rank, 2))


# --- in the parent


def run_ranks(
    name: str, ranks: int, folder: Path, python: list[str], words: list[str]
) -> dict[str, Any]:
    """Run a job; return each rank's exit code, stdout and stderr, and the files written."""
    folder.mkdir()
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = f"{ROOT}{os.pathsep}{TESTS}"
    environ |= {"PYTHONPATH": path, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [*python, *words, __file__, "--rank-of", name]

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["timeout", "-s", "KILL", str(DEADLINE_SECONDS), *command],
            cwd=folder,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            input=f"for rank {rank}",
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(ranks) as pool:
        done = list(pool.map(run, range(ranks)))
    paths = [path for path in sorted(folder.rglob("*")) if "results" not in path.parts]
    return {
        "exit codes": [each.returncode for each in done],
        "stdout": [each.stdout for each in done],
        "files": {path.name: path.read_bytes() for path in paths if path.is_file()},
        "stderr": [each.stderr for each in done],
    }


def find_differences(bare: dict[str, Any], watched: dict[str, Any], folder: Path) -> list[str]:
    """Return in what a watched job differs, and what is wrong with its stored end."""
    wrong = [key for key in ("exit codes", "stdout", "files") if bare[key] != watched[key]]
    if "the job continues" in "".join(watched["stderr"]):
        wrong.append("the watch failed")
    ends = [json.loads(path.read_text())["state"] for path in folder.glob("results/*/run.json")]
    codes = watched["exit codes"]
    allowed = ["complete"] if not any(codes) else ["failed", "interrupted"]
    if any(end not in allowed for end in ends):
        wrong.append(f"stored as {ends}")
    return wrong


def main(words: list[str], python: Sequence[str] = (sys.executable,)) -> int:
    """Run the jobs in this Python; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args(words)
    print("| job | exit codes of its ranks | lines of stdout | files | watched |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    count = 0
    for name in options.only:
        with tempfile.TemporaryDirectory() as place:
            bare, watched = (
                run_ranks(name, KINDS[name][1], Path(place) / way, [*python], start)
                for way, start in (("bare", []), ("watched", WATCH))
            )
            wrong = find_differences(bare, watched, Path(place) / "watched")
        codes = ", ".join(map(str, bare["exit codes"]))
        lines = "".join(bare["stdout"]).count("\n")
        result = ", ".join(wrong) or "the same"
        print(f"| {name} | {codes} | {lines} | {len(bare['files'])} | {result} |", flush=True)
        count += not wrong
        if wrong:
            print(json.dumps([bare, watched], indent=1, default=str), file=sys.stderr)
    print(f"\n{count} of {len(options.only)} are the same")
    return 0 if count == len(options.only) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        from patience import be_patient  # the parent may have another path

        be_patient()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        play, _, init = KINDS[sys.argv[2]]
        if init:
            dist.init_process_group("gloo")
        play(int(os.environ["RANK"]))
        if dist.is_initialized():
            dist.destroy_process_group()
    else:
        sys.exit(main(sys.argv[1:]))
