"""Fixtures of several test modules."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from frozen import COLLECTED, Frozen
from rank_pool import RankPool
from simulated_hosts import Hosts, missing

if TYPE_CHECKING:
    from simulated_gpu import SimulatedGpu

# The files that take longest, the slowest first: so no process is left alone with one at the end.
SLOW = (
    "test_collectives", "test_ddp", "test_slurm", "test_planted_faults", "test_scripts",
    "test_run_bench", "test_mpi_matrix", "test_mpi", "test_mesh_scenarios", "test_guard", "test_ab",
    "test_links", "test_rendezvous", "test_hosts", "test_hooks", "test_cli", "test_report_browser",
    "test_replicas", "test_terminal_text", "test_watched_hosts", "test_observer",
    "test_stragglers", "test_training", "test_layers",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes frozen texts again; facts have none."""
    parser.addoption("--rewrite-text", action="store_true", help="rewrite tests/golden/text")


@pytest.fixture
def frozen(request: pytest.FixtureRequest) -> Frozen:
    """What is frozen of this test."""
    rewrite = request.config.getoption("--rewrite-text")
    return Frozen(request.node.path.stem, request.node.name, rewrite)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note all tests, before some are deselected; move those of the slow files to the front."""
    config.stash[COLLECTED] = {(item.path.stem, item.name) for item in items}
    ranks = {name: rank for rank, name in enumerate(SLOW)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(SLOW)))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Rank processes on this host that all tests share."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Callable[..., Hosts]]:
    """Return a function that makes simulated hosts, which stay until the end of the module."""
    if (why := missing()) is not None:
        if os.environ.get("DDPBENCH_TEST_ALL"):
            pytest.fail(f"no simulated hosts, and CI must have them: {why}")
        pytest.skip(f"no simulated hosts: {why}")
    with contextlib.ExitStack() as benches:
        yield lambda *args, **options: benches.enter_context(Hosts(*args, **options))


@pytest.fixture(scope="session")
def cuda_guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that a CPU build of torch lacks for simulated CUDA tensors; it is loaded."""
    from simulated_gpu import load_guard

    return load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def simulated_gpu(cuda_guard: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """A GPU that torch simulates: device="cuda" works in the test, without a GPU."""
    from simulated_gpu import PretendedKind, SimulatedGpu

    from ddpbench.runtime import devices

    with SimulatedGpu() as gpu:
        monkeypatch.setitem(devices.KINDS, "cuda", PretendedKind(gpu))
        yield gpu
