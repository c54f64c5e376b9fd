"""Scopes: which ranks must hold equal bits of a tensor. Arithmetic on ranks, without torch.

A tensor on a mesh has the same shard in all ranks whose coordinates along its sharded mesh
dimensions are equal. Dimensions of the base that the tensor's own mesh does not span are
replication, too: parameters without a plan for tensor parallelism lie on the mesh "dp" only, and
must be equal along "tp". A tensor without a mesh must be equal in all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from ddpbench.replicas.digest import of_bytes

PRIME = (1 << 61) - 1  # a Mersenne prime: two digests differ modulo it, but for a chance of 2^-61


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

    def describe(self, rank: int) -> str:
        """Return the coordinates of a rank: "dp_replicate=1, dp_shard=0"."""
        pairs = zip(self.names, self.coordinates[rank], strict=True)
        return ", ".join(f"{name}={coordinate}" for name, coordinate in pairs)


@dataclass(frozen=True)
class Layout:
    """The placements of a tensor on a mesh."""

    grid: Grid
    # Per mesh dimension: the dimension of the tensor that it shards, and the split factor of a
    # _StridedShard (0: a plain Shard). None: not sharded.
    splits: tuple[tuple[int, int] | None, ...]
    partial: tuple[str, ...]  # names of mesh dimensions along which each rank holds a summand
    text: str  # "Shard(dim=0) on dp_shard=4", the same in all ranks

    def locate_shard(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank along the sharded dimensions."""
        place = self.grid.coordinates[rank]
        return tuple(i for i, split in zip(place, self.splits, strict=True) if split is not None)

    def name_shard(self, rank: int) -> str:
        """Return "shard 2 of 4", in the order of the mesh; "" if the tensor is not sharded."""
        if self.count_shards() == 1 or rank not in self.grid.coordinates:
            return ""
        number = 0
        for size, coordinate in zip(self._sizes, self.locate_shard(rank), strict=True):
            number = number * size + coordinate
        return f"shard {number + 1} of {self.count_shards()}"

    def count_shards(self) -> int:
        """Return the number of shards: 1 if the tensor is not sharded."""
        return prod(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [n for n, split in zip(self.grid.shape, self.splits, strict=True) if split]


@dataclass(frozen=True)
class Base:
    """The ranks that a verification compares."""

    ranks: tuple[int, ...]
    grid: Grid  # covers all of `ranks`, perhaps more
    rank: int  # this process
    stages: tuple[int, ...] = ()  # dimensions of `grid` along which ranks hold other layers

    def locate_stage(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank along the dimensions that hold other layers."""
        return tuple(self.grid.coordinates[rank][d] for d in self.stages)


@dataclass(frozen=True)
class Scope:
    """The ranks that must hold the bits that this rank holds."""

    ranks: tuple[int, ...]  # ascending, with this rank
    weight: int  # of this rank; the weights of a scope add up to 0 modulo PRIME


@lru_cache(maxsize=1024)
def find_scope(base: Base, layout: Layout | None) -> Scope:
    """Return the scope of a tensor in this rank; of a plain tensor without a layout.

    A rank outside the tensor's mesh holds nothing of it, and is its own scope. Ranks of other
    pipeline stages are never in it.
    """
    kept: Sequence[int] = range(len(base.grid.shape))
    starts: Sequence[int] = base.ranks
    if layout is not None and base.rank not in layout.grid.coordinates:
        starts = [base.rank]
    elif layout is not None:
        members = [r for r in layout.grid.ranks if r in base.grid.coordinates]
        shard = layout.locate_shard(base.rank)
        starts = [r for r in members if layout.locate_shard(r) == shard]
        kept = [d for d in kept if _spans(base, members, d)]

    def cut(rank: int) -> tuple[int, ...]:
        return tuple(base.grid.coordinates[rank][d] for d in kept)

    own, stage = set(map(cut, starts)), base.locate_stage(base.rank)
    ranks = (r for r in base.ranks if cut(r) in own and base.locate_stage(r) == stage)
    return weigh_scope(tuple(sorted(ranks)), base.rank)


def _spans(base: Base, members: Sequence[int], dimension: int) -> bool:
    """Return whether another member has this rank's coordinates in all other dimensions."""
    where, others = base.grid.coordinates, [*range(len(base.grid.shape))]
    others.remove(dimension)
    return any(
        member != base.rank and all(where[member][d] == where[base.rank][d] for d in others)
        for member in members
    )


@lru_cache(maxsize=1024)
def weigh_scope(ranks: tuple[int, ...], rank: int) -> Scope:
    """Return a scope with this rank's weight, which no other scope has.

    Each rank multiplies its digest by its weight. The products add up to 0 modulo PRIME if all
    digests are equal, and else to another number but for a chance of 2^-61, because the weights
    are pseudo-random. So one sum over all ranks compares within many scopes at once.
    """
    weights = [of_bytes(repr((ranks, r)).encode()) % PRIME or 1 for r in ranks[:-1]]
    weights.append(-sum(weights) % PRIME)
    return Scope(ranks, weights[ranks.index(rank)])


def find_offsets(
    layout: Layout, rank: int, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape and offsets of a rank's shard within a tensor of this global shape.

    Each mesh dimension cuts what it gets into parts of ceil(n / ranks) elements, the last ones
    smaller or empty. Plain shards cut first, in the order of the mesh; then _StridedShard, which
    fully_shard uses for what tensor parallelism has cut before it. Returns None if a _StridedShard
    does not follow such cuts: its elements do not lie together.
    """
    if rank not in layout.grid.coordinates:
        return None
    sizes, offsets, cuts = list(shape), [0] * len(shape), [1] * len(shape)
    rows = list(zip(layout.splits, layout.grid.shape, layout.grid.coordinates[rank], strict=True))
    plain = [row for row in rows if row[0] is not None and not row[0][1]]
    strided = [row for row in reversed(rows) if row[0] is not None and row[0][1]]
    for split, parts, coordinate in [*plain, *strided]:
        assert split is not None
        dim, factor = split
        if factor and cuts[dim] != factor:
            return None
        part = -(-sizes[dim] // parts)
        start = min(coordinate * part, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(part, sizes[dim] - start)
        cuts[dim] *= parts
    return tuple(sizes), tuple(offsets)
