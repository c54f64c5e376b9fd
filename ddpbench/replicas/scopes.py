"""Scopes: which ranks must hold equal bits of a tensor. Arithmetic on ranks, without torch.

A tensor on a mesh has the same shard in all ranks whose coordinates along its sharded mesh
dimensions are equal. Dimensions of the base that the tensor's own mesh does not span are
replication, too: parameters without a plan for tensor parallelism are on the mesh "dp" only, and
must be equal along "tp". A tensor without a mesh must be equal in all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from ddpbench.replicas.digest import of_bytes

PRIME = (1 << 61) - 1  # a Mersenne prime: two digests differ modulo it, but for a chance of 2^-61
LINE = ("rank",)  # the names of the dimensions if no mesh names the ranks


@dataclass(frozen=True)
class Grid:
    """The global ranks of a mesh in row-major order, and the names of its dimensions."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]

    @cached_property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """The coordinates of each rank."""
        return dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    def locate(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by the names of the dimensions."""
        return dict(zip(self.names, self.coordinates[rank], strict=True))


@dataclass(frozen=True)
class Layout:
    """The placements of a tensor on a mesh."""

    grid: Grid
    sharded: tuple[bool, ...]  # along each dimension of the mesh
    partial: tuple[str, ...]  # names of mesh dimensions along which each rank holds a summand
    text: str  # "Shard(dim=0) on dp_shard=4", the same in all ranks

    def locate_shard(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank along the sharded dimensions."""
        place = self.grid.coordinates[rank]
        return tuple(i for i, sharded in zip(place, self.sharded, strict=True) if sharded)

    def number_shard(self, rank: int) -> int:
        """Return the number of a rank's shard in the order of the mesh, from 1; 0 outside of it."""
        if rank not in self.grid.coordinates:
            return 0
        number = 0
        for size, coordinate in zip(self._sizes, self.locate_shard(rank), strict=True):
            number = number * size + coordinate
        return number + 1

    def count_shards(self) -> int:
        """Return the number of shards: 1 if the tensor is not sharded."""
        return prod(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [n for n, sharded in zip(self.grid.shape, self.sharded, strict=True) if sharded]


def name_shards(numbers: Collection[int], total: int) -> str:
    """Return "shard 2 of 4", "shards 1, 3 of 4" or "all 4 shards"; "" for a whole tensor."""
    if total == 1 or not numbers:
        return ""
    if len(numbers) == total:
        return f"all {total} shards"
    names = ", ".join(map(str, sorted(numbers)))
    return f"shard{'s' if len(numbers) > 1 else ''} {names} of {total}"


@dataclass(frozen=True)
class Base:
    """The ranks that a verification compares."""

    ranks: tuple[int, ...]
    grid: Grid  # covers all of `ranks`, perhaps more
    rank: int  # this process


@lru_cache(maxsize=1024)
def find_scope(base: Base, layout: Layout | None) -> tuple[int, ...]:
    """Return the ranks, ascending, that must hold what this rank holds of a tensor.

    layout: None for a plain tensor. A rank outside the tensor's mesh holds nothing of it, and is
    its own scope.
    """
    where, ranks = base.grid.coordinates, sorted(base.ranks)
    if layout is None:
        return tuple(ranks)
    if base.rank not in layout.grid.coordinates:
        return (base.rank,)
    members = [rank for rank in layout.grid.ranks if rank in where]
    spanned = [d for d in range(len(base.grid.shape)) if _spans(base, members, d)]

    def cut(rank: int) -> tuple[int, ...]:
        return tuple(where[rank][d] for d in spanned)

    shard = layout.locate_shard(base.rank)
    holders = {cut(rank) for rank in members if layout.locate_shard(rank) == shard}
    return tuple(rank for rank in ranks if cut(rank) in holders)


def _spans(base: Base, members: Sequence[int], dimension: int) -> bool:
    """Return whether another member has this rank's coordinates in all other dimensions."""
    where, others = base.grid.coordinates, [*range(len(base.grid.shape))]
    others.remove(dimension)
    return any(
        member != base.rank and all(where[member][d] == where[base.rank][d] for d in others)
        for member in members
    )


@lru_cache(maxsize=1024)
def weigh(ranks: tuple[int, ...], rank: int) -> int:
    """Return the weight of a rank within a scope, a number that no other scope has.

    Each rank multiplies its digest by its weight. The weights add up to 0 modulo PRIME, so the
    products add up to 0 if all digests are equal. Otherwise they add up to another number but for
    a chance of 2^-61, because the weights are pseudo-random. One sum over all ranks therefore
    compares within many scopes at once.
    """
    weights = [of_bytes(repr((ranks, r)).encode()) % PRIME or 1 for r in ranks[:-1]]
    weights.append(-sum(weights) % PRIME)
    return weights[ranks.index(rank)]
