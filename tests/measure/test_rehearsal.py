"""A step that does not fit in memory: found out by each rank alone, before the ranks step together.

The CPU's entry in the table of devices stands for a GPU, which refuses what does not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import read_stored_run, run_ddpbench
from frozen import Frozen
from stored_steps import a_step_case
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpbench.catalog.task import Task
from ddpbench.measure import rehearsal

CPU = torch.device("cpu")
CUDAS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.77 GiB of "
    "which 8.88 MiB is free. Including non-PyTorch memory, this process has 15.75 GiB in use."
)
# The user's own workloads; each runs out of memory elsewhere, in rank 1 alone.
WORKLOADS = f"""
import torch
from ddpbench.runtime import devices

devices.KINDS["cpu"].refuses = True

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError({CUDAS!r})

def fail(*_):
    raise torch.OutOfMemoryError({CUDAS!r})

def workload(middle):
    model = torch.nn.Linear(6, 3)
    return model, lambda step: torch.ones(4, 6), lambda m, batch: middle(m(batch)).square().mean()

def build(rank, world_size, device):
    return fail() if rank == 1 else workload(lambda x: x)

def forward(rank, world_size, device):
    return workload(fail if rank == 1 else lambda x: x)

def backward(rank, world_size, device):
    return workload(Backward.apply if rank == 1 else lambda x: x)

built = 0

def second(rank, world_size, device):
    global built
    built += 1
    return workload(fail if rank == 1 and built == 2 else lambda x: x)

def late(rank, world_size, device):
    devices.KINDS["cpu"].refuses = False
    return workload(fail)
"""
HIPS, NCCLS = "HIP out of memory.", "Cuda failure 2 'out of memory'"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"
SHORT = "CUDA out of memory (tried to allocate 20.00 MiB)"  # torch's words in every reason


FITS_NOT = ("build", "forward", "backward")


def run(cwd: Path, ranks: int, *functions: str) -> Any:
    """Measure these workloads of the user."""
    (cwd / "mine.py").write_text(WORKLOADS)
    names = ",".join(f"mine:{function}" for function in functions)
    few = ("--rounds", "1", "--steps-per-round", "1", "--timeout", "60")
    return run_ddpbench(cwd, "ddp", "-n", str(ranks), "--workload", names, *few)


@pytest.mark.thorough
def test_what_does_not_fit_in_one_rank_is_skipped_in_all(tmp_path: Path, frozen: Frozen) -> None:
    """Wherever memory runs out: one sentence names the rank and what helps, and the next case is
    tried. If only the second replica does not fit, the step is measured without a budget."""
    done = run(tmp_path, 2, *FITS_NOT, "second")
    assert done.returncode == 0, done.stdout + done.stderr
    results = {step.case.workload: step for step in read_stored_run(tmp_path)[1].steps}
    reasons = [results[f"mine:{function}"].reason or "" for function in FITS_NOT]
    for function, reason in zip(FITS_NOT, reasons, strict=True):
        assert SHORT in reason
        assert reason.endswith("(rank 1)")
        assert f"mine:{function} on gloo: {reason}" in " ".join(done.stdout.split())
    second = results["mine:second"]
    assert second.summary is not None
    frozen.text("\n".join([*reasons, *second.notes]))


@pytest.mark.thorough
def test_a_lack_that_is_found_too_late_says_what_helps(tmp_path: Path) -> None:
    """It ends the run, because other ranks would wait for this one."""
    done = run(tmp_path, 1, "late")
    assert done.returncode == 5
    assert "OutOfMemoryError: " in done.stderr
    assert SHORT in done.stderr


class Allocated(TorchDispatchMode):
    """Adds up the bytes of tensors made by empty_like."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default:
            self.nbytes += result.nbytes
        return result


def some_task() -> Task:
    """A net with buffers, random numbers and a frozen parameter."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).square().mean()
        return result

    return Task(model, lambda step: torch.ones(4, 6), loss)


@pytest.mark.parametrize("views", [False, True])
def test_a_rehearsal_leaves_no_trace(views: bool) -> None:
    """Parameters, buffers, gradients and random numbers are as before, and gradients stay again."""
    task, case = some_task(), a_step_case(optimizer="adam", gradient_as_bucket_view=views)
    before = {name: each.clone() for name, each in task.model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert rehearsal.find_shortage(task, case, CPU, 1) is None
    assert all(torch.equal(each, before[name]) for name, each in task.model.state_dict().items())
    assert all(parameter.grad is None for parameter in task.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    task.loss(task.model, task.batch(0)).backward()
    assert all((each.grad is not None) == each.requires_grad for each in task.model.parameters())


def test_a_loss_that_needs_ddp_is_left_to_the_first_step() -> None:
    """It fails without DDP, which says nothing about memory, and leaves no hook behind."""
    task = some_task()
    bare = task.loss

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = model.module(batch)
        return result

    task.loss = loss
    case = a_step_case(gradient_as_bucket_view=True)
    assert rehearsal.find_shortage(task, case, CPU, 1) is None
    bare(task.model, task.batch(0)).backward()
    assert all((each.grad is not None) == each.requires_grad for each in task.model.parameters())


@pytest.mark.parametrize(
    ("replicas", "optimizer", "views", "copies"),
    [(1, "sgd", False, 1), (1, "sgd", True, 1), (2, "adam", True, 5), (2, "adamw", False, 6)],
)
def test_a_rehearsal_holds_what_a_later_step_finds(
    replicas: int, optimizer: str, views: bool, copies: int
) -> None:
    """The buckets of this replica, the gradients of the other one unless they lie in its buckets,
    two states of Adam in each; nothing for parameters that are not trained."""
    task = some_task()
    task.model[2] = nn.Identity()  # a dropout allocates by itself
    trained = sum(each.nbytes for each in task.model.parameters() if each.requires_grad)
    case = a_step_case(optimizer=optimizer, gradient_as_bucket_view=views)
    with Allocated() as allocated:
        rehearsal.find_shortage(task, case, CPU, replicas)
    assert allocated.nbytes == copies * trained


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError(CUDAS), SHORT),
        (torch.OutOfMemoryError(HIPS), HIPS),
        (RuntimeError(CUBLAS), CUBLAS),
        (RuntimeError(f"NCCL error in x.cpp\nLast error:\n{NCCLS}"), NCCLS),
        (MemoryError(), "MemoryError"),
    ],
    ids=["CUDA", "HIP", "cuBLAS", "NCCL", "host"],
)
def test_a_lack_of_memory_is_told_with_the_options_that_help(
    error: Exception, told: str, frozen: Frozen
) -> None:
    """However it is raised: the short of torch's message, and --batch and the settings."""
    sentence = rehearsal.describe_shortage(error, a_step_case())
    assert sentence is not None
    assert f": {told}; " in sentence
    frozen.text(sentence.replace(told, "TOLD"))


def test_the_options_that_help_are_numbers(frozen: Frozen) -> None:
    """A setting that is a word makes no step smaller."""
    case = a_step_case(settings=("width=256", "gather=grad"))
    frozen.text(rehearsal.advise(case))


def test_other_errors_are_no_lack_of_memory() -> None:
    """They are described as what they are."""
    assert rehearsal.describe_shortage(RuntimeError("shapes differ"), a_step_case()) is None
