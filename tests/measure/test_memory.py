"""Memory: huge pages, the trial of a step, and how a shortage is described."""

from __future__ import annotations

import pytest
import torch
from stored_steps import a_step_case

from ddpbench.measure import memory
from ddpbench.measure.step import advise_smaller

CPU = torch.device("cpu")


def test_the_share_in_huge_pages_is_of_the_tensors_mappings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between none and all of what was written; unknown for no bytes or a silent kernel."""
    huge = memory.zeros(1 << 20, torch.float32, CPU, "huge").fill_(1)
    share = memory.huge_share([huge, huge])
    assert share is not None
    assert 0 <= share <= 1
    assert memory.huge_share([torch.empty(0)]) is None
    start = huge.data_ptr()
    mappings = [(start, 3072), (start + huge.nbytes, 0)]
    smaps = "".join(
        f"{low:x}-{low + huge.nbytes:x} rw-p 0 00:00 0 \nSize: 9 kB\nRss:  4096 kB\n"
        f"AnonHugePages:    {granted} kB\nVmFlags: rd\n"
        for low, granted in mappings
    )
    for text, expected in ((smaps, 0.75), (None, None)):
        monkeypatch.setattr(memory, "read", lambda _, text=text: text)
        assert memory.huge_share([huge]) == expected


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
