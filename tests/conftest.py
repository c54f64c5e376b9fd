"""What several test modules share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
from rank_pool import RankPool
from simulated_hosts import Hosts, missing


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks on this host that stay for all tests."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Callable[..., Hosts]]:
    """Makes benches of hosts, arguments as of `Hosts`, which stay until the module's end."""
    if (why := missing()) is not None:
        if os.environ.get("DDPBENCH_TEST_ALL"):
            pytest.fail(f"no bench of hosts, and in CI there must be one: {why}")
        pytest.skip(f"no bench of hosts: {why}")
    with contextlib.ExitStack() as benches:
        yield lambda *args, **options: benches.enter_context(Hosts(*args, **options))
