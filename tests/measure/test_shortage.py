"""Too little memory: a case is skipped in all ranks together, or the run ends with the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_lines import QUICK, read_stored_run, run_ddpbench
from frozen import Frozen
from stored_steps import a_step_case

from ddpbench.measure import memory
from ddpbench.measure.step import advise_smaller

# --- the sentence


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
            "CUDA out of memory (tried to allocate 20.00 MiB)",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), "CUDA error: CUBLAS_STATUS"),
        (RuntimeError("[alloc_cpu.cpp] can't allocate memory"), "[alloc_cpu.cpp] can't allocate"),
        (RuntimeError("NCCL error\nCuda failure 2 'out of memory'"), "Cuda failure 2"),
        (OSError(12, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (MemoryError(), "MemoryError"),
    ],
    ids=["CUDA", "cuBLAS", "torch", "NCCL", "kernel", "Python"],
)
def test_every_shortage_of_memory_is_recognised(error: Exception, detail: str) -> None:
    """torch on GPU and CPU, NCCL in its second line, the kernel, Python; and nothing else."""
    advice = advise_smaller(a_step_case(settings=("width=256", "depth=8")))
    sentence = str(memory.describe_shortage(error, "cpu", advice))
    assert sentence.startswith(f"not enough memory on the host: {detail}")
    assert "; use a smaller --batch, --width or --depth" in sentence
    assert ("NCCL_BUFFSIZE" in sentence) == ("NCCL" in str(error))
    assert memory.describe_shortage(RuntimeError("does not support alltoall"), "cpu", "") is None


# --- a sweep

WORDS = ("-n", "2", "--op", "all_reduce", "--sizes", "8,4K,64K,256K")
SHORT = "CUDA out of memory (tried to allocate 2.00 GiB)"
# Rank 1 cannot allocate the buffer of 4 KiB.
IN_RANK_1 = """
import os
import torch
zeros = torch.zeros
def zeros_or_error(count, **options):
    if os.environ.get("DDPBENCH_RANK") == "1" and (count, "dtype" in options) == (1024, True):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return zeros(count, **options)
torch.zeros = zeros_or_error
"""


def sweep(folder: Path, fault: str, *words: str) -> tuple[int, str, dict[int, str | None]]:
    """Run a sweep with a fault. Return its exit code, its messages, and size → why it was not
    measured."""
    faulty = ("--import", "faulty_backend", "--backend", "faulty", "--quiet", *QUICK)
    done = run_ddpbench(folder, "collectives", *faulty, *WORDS, *words, FAULT=fault)
    _, run = read_stored_run(folder)
    assert run.state == ("failed" if done.returncode else "complete")
    return done.returncode, done.stderr, {each.case.nbytes: each.reason for each in run.results}


@pytest.mark.thorough
def test_a_case_without_memory_is_skipped_in_all_ranks(tmp_path: Path, frozen: Frozen) -> None:
    """In the buffers of one rank: the row names the rank, the cause and what to change. In the
    first call of all ranks, in which a backend may allocate its own buffers: no rank has joined, so
    the group is as before. The sweep goes on after both."""
    (tmp_path / "in_rank_1.py").write_text(IN_RANK_1)
    code, error, found = sweep(tmp_path, "oom:-1:65536", "--import", "in_rank_1")
    assert code == 0, error
    frozen.facts(sorted(nbytes for nbytes, reason in found.items() if reason))
    assert "(rank 1)" in str(found[4096])
    assert str(found[4096]) == f"{found[65536]} (rank 1)"
    frozen.text(str(found[4096]))


@pytest.mark.thorough
def test_a_first_call_without_memory_in_one_rank_ends_the_run_with_the_cause(
    tmp_path: Path,
) -> None:
    """The other rank waits inside the backend, and nothing else would end that: the run ends before
    the deadline, names the rank, the cause and what to change, and does not accuse the other."""
    code, error, found = sweep(tmp_path, "oom:1:65536", "--timeout", "15")
    assert code == 5
    assert "ddpbench: rank 1: OutOfMemoryError: " in error
    assert SHORT in error
    assert "allreduce (faulty_" in error
    assert "deadline" not in error
    assert 65536 not in found


# --- a step ---------------------------------------------------------------------------------------

# The user's own workloads; rank 1 runs out of memory.
WORKLOADS = """
import torch

def fail(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has none.")

def workload(middle):
    model = torch.nn.Linear(6, 3)
    return model, lambda step: torch.ones(4, 6), lambda m, batch: middle(m(batch)).square().mean()

def build(rank, world_size, device):
    return fail() if rank == 1 else workload(lambda x: x)

def forward(rank, world_size, device):
    return workload(fail if rank == 1 else lambda x: x)
"""


@pytest.mark.thorough
def test_a_model_that_does_not_fit_in_one_rank_is_skipped_and_a_step_ends_the_run(
    tmp_path: Path,
) -> None:
    """One sentence names the rank, the memory and what helps. In a step, the other rank waits, so
    the run ends."""
    (tmp_path / "mine.py").write_text(WORKLOADS)
    few = ("--rounds", "1", "--steps-per-round", "1")
    done = run_ddpbench(tmp_path, "ddp", "-n", "2", "--workload", "mine:build,mine:forward", *few)
    assert done.returncode == 5
    assert "rank 1: OutOfMemoryError: " in done.stderr
    assert SHORT in done.stderr
    (skipped,) = read_stored_run(tmp_path)[1].steps
    assert SHORT in (skipped.reason or "")
    assert (skipped.reason or "").endswith("(rank 1)")
