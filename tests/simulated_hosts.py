"""The bench of hosts that ddpbench has for its self-test, and what tests need besides.

In tests use the fixture `hosts`, which takes the arguments of `Hosts`, skips with the reason where
there can be no such hosts, and fails for it in CI.
"""

from __future__ import annotations

from collections.abc import Sequence

from command_lines import clean_environment
from rank_pool import RankPool, start_rank

from ddpbench.selftest import hosts
from ddpbench.selftest.hosts import PORT, missing, payload

__all__ = ["PORT", "Hosts", "missing", "payload"]


class Hosts(hosts.Hosts):
    """Some hosts on one switch, in which the tests' own modules are found."""

    environment = staticmethod(clean_environment)

    def __enter__(self) -> Hosts:
        super().__enter__()
        return self

    def pool(self, ranks: Sequence[int]) -> RankPool:
        """Ranks that stay, as many in each host as `ranks` says; `call` is `ask` for them."""
        placed = [host for host, count in enumerate(ranks) for _ in range(count)]
        return RankPool([start_rank(self.into(host)) for host in placed])
