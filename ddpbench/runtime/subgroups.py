"""Teams: ranks that run an operation among themselves, while other teams run the same one.

Inside each host, between hosts (the first ranks of all hosts, the second ones, …), or all as one.
One entry of GROUPS adds a way to divide them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

Hosts = Sequence[Sequence[int]]  # the ranks of each host


@dataclass(frozen=True)
class Partition:
    """The ranks divided into teams of one size that work at once; a rank may be in none."""

    name: str
    teams: tuple[tuple[int, ...], ...]  # the ranks of each, in their order
    ranks_per_host: tuple[int, ...]  # of one team
    objection: str | None = None  # why these ranks cannot be divided so; `teams` is then all as one

    @property
    def size(self) -> int:
        """How many ranks a team has."""
        return len(self.teams[0])

    def of(self, rank: int) -> tuple[int, ...]:
        """The team in which a rank is; empty: in none."""
        return next((team for team in self.teams if rank in team), ())


@dataclass(frozen=True)
class Subgroup:
    """What a rank must know to measure in its team."""

    split: Partition
    everyone: dist.ProcessGroup  # all ranks, on the tested backend
    group: dist.ProcessGroup | None  # the team's; None: this rank is in none
    number: int = 0  # of the team among the teams
    rank: int = 0  # this rank's place in the team


def _inside(hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(host) for host in hosts)


def _between(hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    # As many teams as the smallest host has ranks. torch has a group's ranks in ascending order.
    return tuple(tuple(sorted(team)) for team in zip(*hosts, strict=False))


def _all(hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    return (tuple(sorted(rank for host in hosts for rank in host)),)


def _inside_objection(hosts: Hosts) -> str | None:
    sizes = [len(host) for host in hosts]
    if min(sizes) < max(sizes):
        return (
            f"the hosts have {min(sizes)} to {max(sizes)} ranks, and only groups of one size are "
            "measured at once"
        )
    return "each host has one rank: there is nothing inside it" if sizes[0] == 1 else None


def _between_objection(hosts: Hosts) -> str | None:
    return "all ranks are on one host: there is nothing between hosts" if len(hosts) == 1 else None


# name → (who works together, why they cannot)
GROUPS: dict[
    str,
    tuple[Callable[[Hosts], tuple[tuple[int, ...], ...]], Callable[[Hosts], str | None]],
] = {
    "host": (_inside, _inside_objection),
    "cross": (_between, _between_objection),
    "world": (_all, lambda hosts: None),
}


def split(name: str, hosts: Hosts) -> Partition:
    """The ranks of these hosts divided as GROUPS says."""
    divide, objects = GROUPS[name]
    objection = objects(hosts)
    teams = (_all if objection else divide)(hosts)
    first = set(teams[0])
    counts = [len(first & set(host)) for host in hosts]
    return Partition(name, teams, tuple(count for count in counts if count), objection)
