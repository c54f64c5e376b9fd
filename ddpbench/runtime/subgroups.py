"""Subgroups: ranks that run an operation among themselves while other subgroups run the same one.

A partition divides the ranks: inside each host, between hosts (the first ranks of all hosts, the
second ones, …), or all as one. One entry of GROUPS adds a way to divide them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

Hosts = Sequence[Sequence[int]]  # the ranks of each host
Members = tuple[tuple[int, ...], ...]  # the ranks of each subgroup


@dataclass(frozen=True)
class Partition:
    """The ranks divided into subgroups of equal size that work at once; a rank may be in none."""

    name: str
    subgroups: Members  # in the order of their ranks
    ranks_per_host: tuple[int, ...]  # of one subgroup
    objection: str | None = None  # why the ranks cannot be divided; then all are one subgroup

    @property
    def size(self) -> int:
        return len(self.subgroups[0])

    def subgroup_of(self, rank: int) -> tuple[int, ...]:
        """Return the subgroup that contains a rank; empty if none does."""
        return next((members for members in self.subgroups if rank in members), ())


@dataclass(frozen=True)
class Subgroup:
    """The part of a partition in which this rank measures."""

    partition: Partition
    world_group: dist.ProcessGroup  # all ranks, on the tested backend
    group: dist.ProcessGroup | None  # the subgroup's; None: this rank is in no subgroup
    number: int = 0  # of the subgroup in the partition
    rank: int = 0  # of this process in the subgroup


def _between(hosts: Hosts) -> Members:
    # The smallest host limits the number of subgroups. torch orders a group's ranks ascending.
    return tuple(tuple(sorted(members)) for members in zip(*hosts, strict=False))


def _all(hosts: Hosts) -> Members:
    return (tuple(sorted(rank for host in hosts for rank in host)),)


def _inside_objection(hosts: Hosts) -> str | None:
    sizes = [len(host) for host in hosts]
    if min(sizes) < max(sizes):
        return (
            f"the hosts have {min(sizes)} to {max(sizes)} ranks, but groups must have equal sizes: "
            "start the same number of ranks on each host"
        )
    return "each host has one rank, and a host group needs two" if sizes[0] == 1 else None


# name → (how to divide the ranks, why they cannot be divided)
GROUPS: dict[str, tuple[Callable[[Hosts], Members], Callable[[Hosts], str | None]]] = {
    "host": (lambda hosts: tuple(map(tuple, hosts)), _inside_objection),
    "cross": (
        _between,
        lambda hosts: (
            "all ranks are on one host, and a cross group needs two" if len(hosts) == 1 else None
        ),
    ),
    "world": (_all, lambda hosts: None),
}


def divide_ranks(name: str, hosts: Hosts) -> Partition:
    """Return the partition of these hosts' ranks by an entry of GROUPS."""
    divide, find_objection = GROUPS[name]
    objection = find_objection(hosts)
    members = (_all if objection else divide)(hosts)
    first = set(members[0])
    counts = [len(first & set(host)) for host in hosts]
    return Partition(name, members, tuple(count for count in counts if count), objection)
