"""Too little memory: a case is skipped in all ranks together, or the run ends with the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_lines import QUICK, read_stored_run, run_ddpbench
from frozen import Frozen

from ddpbench.records.schema import Run

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


def sweep(folder: Path, fault: str, *words: str) -> tuple[int, str, Run]:
    """Run a sweep with a fault. Return its exit code, its messages, and what it stored."""
    faulty = ("--import", "faulty_backend", "--backend", "faulty", "--quiet", *QUICK)
    done = run_ddpbench(folder, "collectives", *faulty, *WORDS, *words, FAULT=fault)
    return done.returncode, done.stderr, read_stored_run(folder)[1]


def reasons(run: Run) -> dict[int, str | None]:
    """Size → why it was not measured; None if it was."""
    return {result.case.nbytes: result.reason for result in run.results}


@pytest.mark.thorough
def test_a_case_without_memory_is_skipped_in_all_ranks(tmp_path: Path, frozen: Frozen) -> None:
    """In the buffers of one rank: the row names the rank, the cause and what to change. In the
    first call of all ranks, in which a backend may allocate its own buffers: no rank has joined, so
    the group is as before. The sweep goes on after both."""
    (tmp_path / "in_rank_1.py").write_text(IN_RANK_1)
    code, error, run = sweep(tmp_path, "oom:-1:65536", "--import", "in_rank_1")
    assert code == 0, error
    found = reasons(run)
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
    code, error, run = sweep(tmp_path, "oom:1:65536", "--timeout", "15")
    assert code == 5
    assert "ddpbench: rank 1: OutOfMemoryError: " in error
    assert SHORT in error
    assert "allreduce (faulty_" in error
    assert "deadline" not in error
    assert run.state == "failed"
    assert 65536 not in reasons(run)


# --- a step: each rank first tries alone ---

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
STEP_SHORT = "CUDA out of memory (tried to allocate 20.00 MiB)"
FITS_NOT = ("build", "forward", "backward")


def run_steps(cwd: Path, ranks: int, *functions: str) -> Any:
    """Measure these workloads of the user."""
    (cwd / "mine.py").write_text(WORKLOADS)
    names = ",".join(f"mine:{function}" for function in functions)
    few = ("--rounds", "1", "--steps-per-round", "1", "--timeout", "60")
    return run_ddpbench(cwd, "ddp", "-n", str(ranks), "--workload", names, *few)


@pytest.mark.thorough
def test_what_does_not_fit_in_one_rank_is_skipped_in_all(tmp_path: Path, frozen: Frozen) -> None:
    """Wherever memory runs out: one sentence names the rank and what helps, and the next case is
    tried. If only the second replica does not fit, the step is measured without a budget."""
    done = run_steps(tmp_path, 2, *FITS_NOT, "second")
    assert done.returncode == 0, done.stdout + done.stderr
    results = {step.case.workload: step for step in read_stored_run(tmp_path)[1].steps}
    reasons = [results[f"mine:{function}"].reason or "" for function in FITS_NOT]
    for function, reason in zip(FITS_NOT, reasons, strict=True):
        assert STEP_SHORT in reason
        assert reason.endswith("(rank 1)")
        assert f"mine:{function} on gloo: {reason}" in " ".join(done.stdout.split())
    second = results["mine:second"]
    assert second.summary is not None
    frozen.text("\n".join([*reasons, *second.notes]))
