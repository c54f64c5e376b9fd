"""Jobs that mpirun starts from a test module.

A rank runs the test module itself: `mpirun -n 2 python test_mpi.py JOB FOLDER`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from command_lines import ROOT, TESTS
from patience import PATIENCE_SECONDS
from warm_python import warm_python

from ddpbench import mpi
from ddpbench.launch import placement, starters
from ddpbench.mpi_backend import library as mpi_library

Group = Any
OP = dist.ReduceOp
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
    "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}",
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # the ranks poll, and there may be fewer cores
    "I_MPI_THREAD_YIELD": "2",
}


def run_job(
    job: Callable[..., None],
    ranks: int,
    folder: Path,
    python: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a job in `ranks` ranks until it ends; if it does not, end it and raise TimeoutExpired.

    Skips the test where there is no MPI.
    """
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if (mpirun := placement.find_mpirun()) is None:
        pytest.skip("mpirun is neither beside this Python nor in PATH")
    words = [*(python or warm_python()), inspect.getfile(job), job.__name__, str(folder)]
    process = subprocess.Popen(
        [mpirun, "-n", str(ranks), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=starters._mpi_environ(mpirun) | ENVIRONMENT | variables,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=3 * PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # mpirun takes its ranks along
        process.communicate(timeout=PATIENCE_SECONDS)
        raise
    return subprocess.CompletedProcess(words, process.returncode, *output)
