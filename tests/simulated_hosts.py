"""Hosts made of network namespaces, as in ddpbench's self-test, with ranks of the tests in them.

Tests use the fixture `hosts`: it takes the arguments of `Hosts`. Where this machine cannot have
such hosts it skips the test with the reason; in CI the test fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from command_lines import clean_environment
from rank_pool import RankPool, start_rank

from ddpbench.selftest import hosts
from ddpbench.selftest.hosts import PORT, missing, payload

__all__ = ["PORT", "Hosts", "missing", "payload"]


class Hosts(hosts.Hosts):
    """Hosts on one switch, in which Python finds the helper modules of the tests."""

    environment = staticmethod(clean_environment)

    def __enter__(self) -> Hosts:
        super().__enter__()
        return self

    def pool(self, ranks: Sequence[int]) -> RankPool:
        """Return a pool of rank processes, `ranks[i]` of them on host i; use `ask`, not `call`."""
        placed = [host for host, count in enumerate(ranks) for _ in range(count)]
        return RankPool([start_rank(self.into(host)) for host in placed])
