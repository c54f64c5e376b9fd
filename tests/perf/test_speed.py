"""Tests of ddpbench's speed: 6 launches of 2 ranks on this host each.

./run_bench.sh test tests/perf --ddpbench-compare --benchmark-autosave
./run_bench.sh test tests/perf -k all_reduce --ddpbench-launches 12
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from ddpbench.launch import placement

Benchmark = Callable[..., Any]
HAS_MPI = placement.find_mpirun() is not None and importlib.util.find_spec("mpi4py") is not None

pytestmark = pytest.mark.timeout(1800)  # seconds a test, on a busy machine


@pytest.mark.parametrize("size", ["4K", "1M"])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "broadcast"])
def test_gloo(collective_benchmark: Benchmark, operation: str, size: str) -> None:
    """The collectives of DDP on gloo, latency and bandwidth."""
    collective_benchmark(operation, size, backend="gloo", ranks=2, case_time=1)


@pytest.mark.skipif(not HAS_MPI, reason="there is no mpirun or no mpi4py")
@pytest.mark.parametrize("size", ["4K", "1M"])
def test_mpi(collective_benchmark: Benchmark, size: str) -> None:
    """ddpbench's own process group over mpi4py."""
    collective_benchmark("all_reduce", size, backend="mpi", ranks=2, case_time=1)


def test_step(ddp_benchmark: Benchmark) -> None:
    """A DDP step, its replicas proved equal."""
    ddp_benchmark("mlp", width=256, depth=2, backend="gloo", ranks=2, case_time=3)
