"""Scopes and shards as arithmetic: which ranks must hold equal bits, and where a shard begins."""

from __future__ import annotations

from math import prod

import pytest
from frozen import Frozen

from ddpbench.replicas.findings import name_places
from ddpbench.replicas.report import Report
from ddpbench.replicas.scopes import (
    PRIME,
    Base,
    Grid,
    Layout,
    find_scope,
    name_shards,
    weigh,
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


def test_weights_of_a_scope_add_up_to_nothing() -> None:
    """Equal digests cancel; one that differs, or two that differ alike, do not."""
    for ranks in ((0, 1), (0, 3, 5), tuple(range(64))):
        weights = [weigh(ranks, rank) for rank in ranks]
        assert sum(weights) % PRIME == 0
        assert 0 not in weights
        digest = 0xDEADBEEF12345678
        assert sum(weight * digest for weight in weights) % PRIME == 0
        for other in (digest ^ 1, digest + PRIME // 2):
            wrong = [other, *[digest] * (len(ranks) - 1)]
            assert sum(w * d for w, d in zip(weights, wrong, strict=True)) % PRIME
            if len(ranks) > 2:
                wrong[1] = other
                assert sum(w * d for w, d in zip(weights, wrong, strict=True)) % PRIME
    assert weigh((7,), 7) == 0


def test_ranks_are_named_by_their_coordinates(frozen: Frozen) -> None:
    """A whole slice of the mesh by the dimensions that narrow it; other sets by their numbers."""

    coordinates = {rank: CUBE.locate(rank) for rank in CUBE.ranks}
    report = Report((), None, coordinates=coordinates)
    sets = ([5], [4, 5, 6, 7], [1, 3], [0, 7], range(8))
    frozen.facts([name_places(report, ranks) for ranks in sets])
    assert name_places(Report((), None), [1, 2]) == "ranks 1, 2"
