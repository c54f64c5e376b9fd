"""Memory: how a shortage is described."""

from __future__ import annotations

import pytest
import torch
from stored_steps import a_step_case

from ddpbench.measure import memory
from ddpbench.measure.step import advise_smaller

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


def test_the_options_that_help_are_the_sizes_of_the_workload() -> None:
    case = a_step_case(settings=("width=256", "depth=8"))
    assert advise_smaller(case) == "use a smaller --batch, --width or --depth"
