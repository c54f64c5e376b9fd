"""The replica check in situations of training, each healthy and with a planted fault.

Four ranks train in one set of processes. A healthy situation must give no error. After a fault, the
first error must name the right tensor and rank in the right step. `ddpbench.watch(verify=1)`
compares at the end of backward, before the optimizer steps, so the step there may be one later.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mesh_training
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

import ddpbench
from ddpbench.watch import proof

DDP = DistributedDataParallel
WORLD, WRONG, STEPS, FAULT = 4, 2, 5, 3  # ranks; the rank with the fault; steps; its step
DEADLINE_SECONDS = 480.0


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.between: nn.Module = nn.ReLU()

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(self.between(self.first(batch)))


@dataclass
class Job:
    """One training, seen by a Verifier or by a watch. `errors` are those that it reports."""

    rank: int
    faulty: bool
    watched: bool
    errors: list[dict[str, Any]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    verifiers: dict[nn.Module, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # of the situation itself

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(100 + self.rank)

    def batch(self) -> Tensor:
        """A batch of this rank's own."""
        return torch.randn(5, 6, generator=self.random)

    def plant(self, step: int, tensor: Tensor) -> None:
        """Change one element in the wrong rank at the step of the fault."""
        if self.faulty and step == FAULT and self.rank == WRONG:
            with torch.no_grad():
                tensor.detach()[(0,) * tensor.dim()] += 0.5

    def check(self, step: int, module: nn.Module, optimizer: Any) -> None:
        """Verify this replica, unless a watch does."""
        if not self.watched:
            if module not in self.verifiers:
                self.verifiers[module] = ddpbench.Verifier(module, optimizer)
            self.reports.append(self.verifiers[module].check(step))

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, wrong: Tensor) -> None:
        """Train for some steps; change `wrong` in one of them."""
        for step in range(STEPS):
            optimizer.zero_grad()
            model(self.batch()).square().mean().backward()
            optimizer.step()
            self.plant(step, wrong)
            self.check(step, model, optimizer)


Play = Callable[[Job], None]
PLAYS: dict[str, tuple[Play, str, tuple[int, ...], int]] = {}  # play, tensor, ranks, step


def situation(
    name: str, tensor: str, ranks: tuple[int, ...] = (WRONG,), step: int = FAULT
) -> Callable[[Play], Play]:
    """Add a situation; the fault must be found in this tensor, these ranks and this step."""

    def add(play: Play) -> Play:
        PLAYS[name] = play, tensor, ranks, step
        return play

    return add


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state."""
    return torch.optim.Adam(model.parameters(), 1e-2)


@situation("Join", "first.weight")
def _join(job: Job) -> None:
    from torch.distributed.algorithms.join import Join

    model = Net()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with Join([ddp]):
        for step in range(STEPS + job.rank):
            optimizer.zero_grad()
            ddp(job.batch()).square().mean().backward()
            optimizer.step()
            if job.watched:
                job.plant(step, model.first.weight)
    if not job.watched:
        job.plant(FAULT, model.first.weight)
    job.check(FAULT, ddp, optimizer)


@situation("sparse", "0.weight")
def _sparse(job: Job) -> None:
    model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"))
    ddp = DDP(model)
    optimizer = torch.optim.SparseAdam(list(ddp.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randint(20, (3, 5), generator=job.random)).square().mean().backward()
        optimizer.step()
        job.plant(step, model[0].weight)
        job.check(step, ddp, optimizer)


@situation("hooks", "second.bias")
def _hooks(job: Job) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = Net()
    ddp = DDP(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    job.train(ddp, adam(ddp), model.second.bias)


def _play_optimizer(make: Callable[..., torch.optim.Optimizer]) -> Play:
    def play(job: Job) -> None:
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False))
        ddp = DDP(model)
        optimizer = make(ddp.parameters())
        for step in range(STEPS):
            batch = job.batch()

            def closure() -> Any:
                optimizer.zero_grad()
                loss = ddp(batch).square().mean()  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)
            job.plant(step, model[1].weight)
            job.check(step, ddp, optimizer)

    return play


_sgd = torch.optim.SGD
PLAIN = "Adam AdamW Adamax NAdam RAdam Adagrad Adadelta ASGD RMSprop Rprop Adafactor"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: _sgd(p, 0.1),
    "SGD with momentum": lambda p: _sgd(p, 0.1, momentum=0.9, nesterov=True),
    **{name: getattr(torch.optim, name) for name in PLAIN.split()},
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=1),
}
for _name, _make in OPTIMIZERS.items():
    situation(f"optimizer {_name}", "1.weight")(_play_optimizer(_make))


@situation("ZeRO", "first.weight")
def _zero(job: Job) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Net()
    ddp = DDP(model)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-2)
    job.train(ddp, zero, model.first.weight)


@situation("GAN", "second.weight")
def _gan(job: Job) -> None:
    maker, judge = Net(), Net()
    judge.second, judge.first = nn.Linear(8, 1), nn.Linear(4, 8)
    ddps = DDP(maker), DDP(judge, broadcast_buffers=False)
    optimizers = adam(ddps[0]), adam(ddps[1])
    for step in range(STEPS):
        for turn in (1, 0):
            for optimizer in optimizers:
                optimizer.zero_grad()
            made = ddps[0](job.batch())
            output = ddps[1](made.detach() if turn else made)
            output.square().mean().backward()
            optimizers[turn].step()
        job.plant(step, judge.second.weight)
        for ddp, optimizer in zip(ddps, optimizers, strict=True):
            job.check(step, ddp, optimizer)


@situation("growth", "third.weight", ())
def _growth(job: Job) -> None:
    """A layer is added while the job trains; in the fault, without wrapping again."""
    model = Net()
    ddp = DDP(model)
    optimizer = adam(ddp)
    for step in range(STEPS):
        if step == FAULT:
            torch.manual_seed(7)
            model.third = nn.Linear(4, 4)
            model.between = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
            model.forward = lambda b: model.third(Net.forward(model, b))
            torch.manual_seed(job.rank)
            if not job.faulty:
                ddp = DDP(model)
            optimizer = adam(model)
        optimizer.zero_grad()
        ddp(job.batch()).square().mean().backward()
        optimizer.step()
        job.check(step, ddp, optimizer)


@situation("a fault behind another", "first.weight", (1,), 1)
def _second(job: Job) -> None:
    """Two tensors are wrong in rank 1; one is right again; then it is wrong in another rank."""
    model = Net()
    model.first.requires_grad_(False)
    ddp = DDP(model)
    optimizer = torch.optim.Adam(model.second.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(job.batch()).square().mean().backward()
        optimizer.step()
        if job.faulty and job.rank == 1 and step in (1, 2):
            model.first.weight.data[0, 0] *= 2.0 if step == 1 else 0.5
            model.second.bias.data[0] += float(step == 1)
        job.plant(step, model.first.weight)
        job.check(step, ddp, optimizer)
    if job.faulty:
        repeated = [report.repeated for report in job.reports]
        fresh = [f.place.get("tensor") for f in job.reports[FAULT].findings if "ranks" in f.place]
        if repeated != [False, False, True, False, True] or fresh != ["first.weight"]:
            job.problems.append(f"{repeated}, {fresh}")


# --- in a rank


def _run(name: str, by: str, faulty: bool, rank: int) -> dict[str, Any]:
    """Play a situation; return what was reported, and what went wrong."""
    job = Job(rank, faulty, by == "watch")
    gc.collect()  # a watch would find the models of the situation before
    torch.manual_seed(0)
    watch = ddpbench.watch(verify=1, output=None) if job.watched else None
    try:
        PLAYS[name][0](job)
        if watch is not None:
            _read_proof(job, watch._watcher.proof)
    except Exception as error:
        traceback.print_exc()
        job.problems.append(f"{type(error).__name__}: {str(error)[:80]}")
    finally:
        if watch is not None:
            watch.close()
    for report in job.reports:
        for found in report.findings:
            if found.severity == "error":
                place = {"step": report.step, "ranks": [*report.minority], "tensors": []}
                job.errors.append({**place, **found.place})
    return {"errors": job.errors, "problems": job.problems}


def _read_proof(job: Job, seen: Any) -> None:
    """Add the errors of the watch in rank 0, which reports for all."""
    found = [*seen.list_findings(job.rank, True)]
    for error in [*found, *(seen.conclude(found) if job.rank == 0 else ())]:
        if error.severity == "error" and error.code == proof.NOT_COMPARED:
            job.problems.append(error.sentence)  # never; once, on a busy host, is no fault
        elif error.severity == "error":
            job.errors.append({"step": 0, "ranks": [], "tensors": [], **error.place})


def job(folder: Path, rank: int, size: int) -> None:
    """Play what `orders.json` lists, each in a process group of its own."""
    proof.FREE_SECONDS = 20.0  # a busy host delays ranks
    results = []
    for number, order in enumerate(json.loads((folder / "orders.json").read_text())):
        part = folder / str(number)
        part.mkdir(exist_ok=True)
        mesh_training.start_group(part, rank, size, seconds=120)
        results.append(_run(*order, rank))
        with suppress(RuntimeError):  # after an error another rank may be gone
            dist.barrier()
        dist.destroy_process_group()
        (folder / f"{rank}.json").write_text(json.dumps({"results": results}))


# --- in the parent


def find_problem(results: tuple[dict[str, Any]], name: str, by: str, faulty: bool) -> Any:
    """Return what the ranks reported, if it is not what they should; else None."""
    _, tensor, ranks, step = PLAYS[name]
    problems = [problem for result in results for problem in result["problems"]]
    errors = results[0]["errors"]
    if problems or not (faulty and errors):
        return problems or errors or (["not found"] if faulty else None)
    first = [error for error in errors if error["step"] == errors[0]["step"]]
    named = {each for error in first for each in error["tensors"]}
    named_ranks = {rank for error in first for rank in error["ranks"]}
    is_late = errors[0]["step"] - step not in ((0, 1) if by == "watch" else (0,))
    is_wrong = is_late or tensor not in named or (ranks and named_ranks != {*ranks})
    return first if is_wrong else None


VERIFIER_ONLY = ["a fault behind another"]
MORE = [name for name in PLAYS if name not in VERIFIER_ONLY]


@pytest.mark.thorough
@pytest.mark.parametrize("names", [VERIFIER_ONLY, pytest.param(MORE, marks=pytest.mark.nightly)])
def test_situations_of_training(tmp_path: Path, names: list[str]) -> None:
    """Healthy ones give no error; a fault is found in its tensor, rank and step."""
    orders = [
        (name, by, faulty)
        for name in names
        for by in ("verifier", "watch")
        for faulty in (False, True)
        if by == "verifier" or name not in VERIFIER_ONLY
    ]
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    words = [*warm_python(), __file__]
    ranks = mesh_training.run_ranks(words, WORLD, tmp_path, DEADLINE_SECONDS)
    played = zip(*(rank["results"] for rank in ranks), strict=True)
    problems = [find_problem(one, *order) for order, one in zip(orders, played, strict=True)]
    assert not [(*one,) for one in zip(orders, problems, strict=True) if one[1]]


if __name__ == "__main__":
    job(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
