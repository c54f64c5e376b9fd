"""Scopes and shards as arithmetic: which ranks must hold equal bits, and where a shard begins."""

from __future__ import annotations

from math import prod

import pytest

from ddpbench.replicas.scopes import (
    Base,
    Grid,
    Layout,
    find_scope,
    name_shards,
)

Sharded = tuple[bool, ...]


def make_grid(**sizes: int) -> Grid:
    """A mesh of ranks from 0 on."""
    return Grid(tuple(sizes.values()), tuple(sizes), tuple(range(prod(sizes.values()))))


def part(grid: Grid, *names: str, rank: int) -> Grid:
    """The submesh of these dimensions that contains a rank."""
    where = grid.coordinates
    fixed = [d for d, name in enumerate(grid.names) if name not in names]
    ranks = [r for r in grid.ranks if all(where[r][d] == where[rank][d] for d in fixed)]
    shape = tuple(n for n, name in zip(grid.shape, grid.names, strict=True) if name in names)
    return Grid(shape, names, tuple(ranks))


HSDP = make_grid(dp_replicate=2, dp_shard=2)
CUBE = make_grid(dp_replicate=2, dp_shard=2, tp=2)


@pytest.mark.parametrize(
    ("base", "names", "sharded", "rank", "scope", "shard"),
    [
        # fully_shard: each rank alone
        (make_grid(dp=4), ["dp"], (True,), 2, [2], "shard 3 of 4"),
        # HSDP: the same shard in each replica
        (HSDP, ["dp_replicate", "dp_shard"], (False, True), 1, [1, 3], "shard 2 of 2"),
        # fully_shard on the mesh of the shards alone: dp_replicate is replication, too
        (HSDP, ["dp_shard"], (True,), 1, [1, 3], "shard 2 of 2"),
        # tensor parallelism: replicated and sharded parameters
        (make_grid(tp=4), ["tp"], (False,), 3, [0, 1, 2, 3], ""),
        (make_grid(tp=4), ["tp"], (True,), 3, [3], "shard 4 of 4"),
        # fully_shard and tensor parallelism; without a plan the mesh "dp_shard" alone
        (CUBE, ["dp_shard", "tp"], (True, True), 5, [1, 5], "shard 2 of 4"),
        (CUBE, ["dp_shard"], (True,), 6, [2, 3, 6, 7], "shard 2 of 2"),
        (CUBE, [*CUBE.names], (False, True, False), 6, [2, 3, 6, 7], "shard 2 of 2"),
        # a plain tensor beside DTensors
        (HSDP, [], None, 1, [0, 1, 2, 3], ""),
    ],
)  # fmt: skip
def test_ranks_of_a_scope(
    base: Grid, names: list[str], sharded: Sharded | None, rank: int, scope: list[int], shard: str
) -> None:
    """A tensor is compared along replicating dimensions, of its own mesh and of the root mesh."""
    layout = None
    if sharded is not None:
        layout = Layout(part(base, *names, rank=rank), sharded, (), "")
        assert name_shards([layout.number_shard(rank)], layout.count_shards()) == shard
    assert find_scope(Base(base.ranks, base, rank), layout) == tuple(scope)


MESH = make_grid(dp=2, tp=2)
ALONG_TP = Layout(part(MESH, "tp", rank=3), (True,), (), "")
FLAT = Grid((4,), ("dp",), CUBE.ranks[1::2])  # dp_replicate and dp_shard of CUBE as one
PAIR = Layout(Grid((2,), ("tp",), (0, 1)), (False,), (), "")
MIXED = Grid((2, 2), ("a", "b"), (3, 1, 0, 2))


@pytest.mark.parametrize(
    ("base", "layout", "scope"),
    [
        # a flattened mesh is compared along the others
        (Base(CUBE.ranks, CUBE, 5), Layout(FLAT, (True,), (), ""), [4, 5]),
        (Base(CUBE.ranks, CUBE, 5), Layout(FLAT, (False,), (), ""), [*CUBE.ranks]),
        # a group of some ranks of the mesh, as DDP's ranks along dp
        (Base((1, 3), MESH, 3), ALONG_TP, [1, 3]),
        (Base((1, 3), Grid((2,), ("rank",), (1, 3)), 3), ALONG_TP, [1, 3]),
        (Base((2, 3), MESH, 3), ALONG_TP, [3]),
        # a rank outside a tensor's mesh has nothing that others have
        (Base((0, 1, 2, 3), make_grid(world=4), 1), PAIR, [0, 1]),
        (Base((0, 1, 2, 3), make_grid(world=4), 3), PAIR, [3]),
        # coordinates count, not the order of ranks
        (Base(MIXED.ranks, MIXED, 0), Layout(MIXED, (True, False), (), ""), [0, 2]),
    ],
)
def test_ranks_of_rare_scopes(base: Base, layout: Layout, scope: list[int]) -> None:
    assert find_scope(base, layout) == tuple(scope)
