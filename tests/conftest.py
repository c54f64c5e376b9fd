"""Fixtures of several test modules."""

from __future__ import annotations

import contextlib
import json
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

# Expression after -m → test file → its seconds; files that are missing there come last.
SECONDS = Path(__file__).parent / "seconds.json"
ATTEMPTS = 3  # of a test that asserts a measured time; pytest prints which needed more than one


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites texts; frozen facts have none."""
    parser.addoption("--rewrite-text", action="store_true", help="rewrite tests/golden/text")


@pytest.fixture
def frozen(request: pytest.FixtureRequest) -> Frozen:
    """Return the frozen facts and texts of this test."""
    rewrite = request.config.getoption("--rewrite-text")
    return Frozen(request.node.path.stem, request.node.name, rewrite)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note all tests before some are deselected; put the files that take longest first."""
    measures = {item: bool(item.get_closest_marker("measures_time")) for item in items}
    config.stash[COLLECTED] = {(each.path.stem, each.name): measures[each] for each in items}
    seconds = json.loads(SECONDS.read_text()).get(config.option.markexpr, {})
    items.sort(key=lambda item: -seconds.get(item.path.stem, 0.0))
    for item in filter(measures.get, items):
        item.add_marker(pytest.mark.flaky(reruns=ATTEMPTS - 1))
    if not os.environ.get("DDPBENCH_TEST_NIGHTLY"):
        skip = pytest.mark.skip(reason="long: .ci/nightly runs it")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(skip)


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


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """Simulate a GPU: device="cuda" works in the test."""
    from simulated_gpu import PretendedKind, SimulatedGpu, load_guard

    from ddpbench.runtime import devices

    load_guard()
    with SimulatedGpu() as gpu:
        monkeypatch.setitem(devices.KINDS, "cuda", PretendedKind(gpu))
        yield gpu
