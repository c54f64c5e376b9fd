"""Memory: huge pages, the trial of a step, and how a shortage is described."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stored_steps import a_step_case
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpbench.catalog.task import Task
from ddpbench.measure import memory
from ddpbench.measure.step import find_shortage

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
            "CUDA out of memory (tried to allocate 20.00 MiB)",
        ),
        (torch.OutOfMemoryError("HIP out of memory."), "HIP out of memory."),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        ),
        (RuntimeError("[alloc_cpu.cpp] can't allocate memory"), "[alloc_cpu.cpp] can't allocate"),
        (RuntimeError("NCCL error\nCuda failure 2 'out of memory'"), "Cuda failure 2"),
        (OSError(12, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("ProcessGroupGloo does not support alltoall"), None),
    ],
    ids=["CUDA", "HIP", "cuBLAS", "torch", "NCCL", "kernel", "Python", "another error"],
)
def test_every_shortage_of_memory_is_recognised(error: Exception, detail: str | None) -> None:
    """torch on GPU and CPU, NCCL in its second line, the kernel, Python; and nothing else."""
    sentence = memory.describe_shortage(error, "cpu", "use smaller --sizes")
    if detail is None:
        assert sentence is None
        return
    assert sentence is not None
    assert sentence.startswith(f"not enough memory on the host: {detail}")
    assert "; use smaller --sizes" in sentence
    assert ("NCCL_BUFFSIZE" in sentence) == ("NCCL" in str(error))


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
def test_a_trial_leaves_no_trace(views: bool) -> None:
    """Parameters, buffers, gradients and random numbers are as before, and gradients stay again."""
    task, case = some_task(), a_step_case(optimizer="adam", gradient_as_bucket_view=views)
    before = {name: each.clone() for name, each in task.model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert find_shortage(task, case, CPU, 1) is None
    assert all(torch.equal(each, before[name]) for name, each in task.model.state_dict().items())
    assert all(parameter.grad is None for parameter in task.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    task.loss(task.model, task.batch(0)).backward()
    assert all((each.grad is not None) == each.requires_grad for each in task.model.parameters())


@pytest.mark.parametrize(
    ("replicas", "optimizer", "views", "copies"),
    [(1, "sgd", False, 1), (1, "sgd", True, 1), (2, "adam", True, 5), (2, "adamw", False, 6)],
)
def test_a_trial_holds_the_memory_of_a_later_step(
    replicas: int, optimizer: str, views: bool, copies: int
) -> None:
    """The buckets of this replica, the gradients of the other one unless they lie in its buckets,
    two states of Adam in each; nothing for parameters that are not trained."""
    task = some_task()
    task.model[2] = nn.Identity()  # a dropout allocates by itself
    trained = sum(each.nbytes for each in task.model.parameters() if each.requires_grad)
    case = a_step_case(optimizer=optimizer, gradient_as_bucket_view=views)
    with Allocated() as allocated:
        find_shortage(task, case, CPU, replicas)
    assert allocated.nbytes == copies * trained
