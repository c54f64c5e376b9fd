"""Subgroups: ranks that run an operation among themselves while other subgroups run the same one.

A partition divides the ranks: inside each host, between hosts (the first ranks of all hosts, the
second ones, …), or all as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

Hosts = Sequence[Sequence[int]]  # the ranks of each host
Members = tuple[tuple[int, ...], ...]  # the ranks of each subgroup
GROUPS = ("host", "cross", "world")


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


def divide_ranks(name: str, hosts: Hosts) -> Partition:
    """Return the partition of these hosts' ranks by one of GROUPS."""
    sizes, objection = [len(host) for host in hosts], None
    if name == "host" and min(sizes) < max(sizes):
        objection = (
            f"the hosts have {min(sizes)} to {max(sizes)} ranks, but groups must have equal sizes: "
            "start the same number of ranks on each host"
        )
    elif name == "host" and sizes[0] == 1:
        objection = "each host has one rank, and a host group needs two"
    elif name == "cross" and len(hosts) == 1:
        objection = "all ranks are on one host, and a cross group needs two"
    members: Members = (tuple(chain.from_iterable(hosts)),)
    if name == "host" and objection is None:
        members = tuple(map(tuple, hosts))
    elif name == "cross" and objection is None:
        members = tuple(zip(*hosts, strict=False))  # the smallest host limits their number
    # torch orders a group's ranks ascending.
    members = tuple(tuple(sorted(subgroup)) for subgroup in members)
    first = set(members[0])
    counts = [len(first & set(host)) for host in hosts]
    return Partition(name, members, tuple(count for count in counts if count), objection)
