"""Jobs that mpirun starts from a test module, and the dtypes and operations that they try.

A rank runs the test module itself: `mpirun -n 2 python test_mpi.py JOB FOLDER`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_lines import ROOT, TESTS
from patience import PATIENCE_SECONDS
from torch import Tensor
from warm_python import warm_python

from ddpbench import mpi
from ddpbench.launch import placement
from ddpbench.mpi_backend import library as mpi_library

Group = Any
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
HALF = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, torch.float64, *HALF]
OP = dist.ReduceOp
FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    OP.SUM: torch.add,
    OP.PRODUCT: torch.mul,
    OP.MIN: torch.minimum,
    OP.MAX: torch.maximum,
    OP.BAND: torch.bitwise_and,
    OP.BOR: torch.bitwise_or,
    OP.BXOR: torch.bitwise_xor,
}
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_group(backend: str, folder: Path, seconds: float = 60) -> None:
    """Make the default process group of a job's ranks, which meet over a file in `folder`."""
    rank, size = mpi_library.world()
    store = dist.FileStore(str(folder / "store"), size)
    deadline = timedelta(seconds=seconds)
    mpi.register()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}",
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_btl": "^ofi",  # the search for libfabric's networks takes a second
    "OMPI_MCA_mpi_yield_when_idle": "1",  # the ranks poll, and there may be fewer cores
    "I_MPI_THREAD_YIELD": "2",
}


def mpirun_command(
    job: Callable[..., None], ranks: int, folder: Path, python: Sequence[str] = (sys.executable,)
) -> list[str]:
    """Return the command that starts a job; skip the test where there is no MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if (mpirun := placement.find_mpirun()) is None:
        pytest.skip("mpirun is neither beside this Python nor in PATH")
    ENVIRONMENT["PATH"] = f"{Path(mpirun).parent}:{os.environ['PATH']}"  # Intel's looks there
    words = [mpirun, "-n", str(ranks)]
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    if "Open MPI" in version.stdout or "PRRTE" in version.stdout:
        words += ["--allow-run-as-root", "--oversubscribe"]
    return [*words, *python, inspect.getfile(job), job.__name__, str(folder)]


def run_job(
    job: Callable[..., None],
    ranks: int,
    folder: Path,
    python: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a job in `ranks` ranks until it ends; if it does not, end it and raise TimeoutExpired."""
    words = mpirun_command(job, ranks, folder, python or warm_python())
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | variables,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=3 * PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # mpirun takes its ranks along
        process.communicate(timeout=PATIENCE_SECONDS)
        raise
    return subprocess.CompletedProcess(words, process.returncode, *output)


def read_abort(output: str) -> str:
    """Return the sentence with which a rank has aborted its job."""
    return re.findall(r"mpi4py: (.*)", output)[0]  # type: ignore[no-any-return]
