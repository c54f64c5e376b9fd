"""The ways of parallel training for `--parallel`. To add one, add an entry to WAYS.

A way arranges the ranks in a mesh. Along a dimension of data parallelism the ranks have different
batches; along `tp` they share one, and each has a part of every layer. Importing this module
imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpbench.records.wording import list_all

if TYPE_CHECKING:
    from torch import nn

REPLICATE, SHARD, TENSOR = "dp_replicate", "dp_shard", "tp"  # dimensions of a mesh

Hosts = Sequence[int]  # the number of ranks on each host


@dataclass(frozen=True)
class Way:
    """A way of parallel training.

    dimensions    of the mesh, the slowest first; empty: DDP, which needs no mesh
    default_mesh  ranks per host → ranks along each dimension
    default_help  the same in words
    """

    name: str
    help: str
    dimensions: tuple[str, ...]
    default_mesh: Callable[[Hosts], tuple[int, ...]]
    default_help: str = "all ranks"

    @property
    def shards(self) -> bool:
        """Whether fully_shard divides the parameters among ranks."""
        return SHARD in self.dimensions

    @property
    def splits(self) -> bool:
        """Whether layers are divided among ranks that share a batch."""
        return TENSOR in self.dimensions

    def lay_out(self, given: tuple[int, ...], hosts: Hosts) -> tuple[int, ...]:
        """Return the mesh: the given one, else the default; () for DDP.

        Raises ValueError with one sentence if it does not fit the way or the ranks.
        """
        ranks = sum(hosts)
        if not self.dimensions:
            if given:
                raise ValueError("--mesh does not apply to --parallel ddp: leave it out")
            return ()
        mesh = given or self.default_mesh(hosts)
        if len(mesh) != len(self.dimensions) or math.prod(mesh) != ranks:
            raise ValueError(
                f"--mesh {format_mesh(mesh)} does not fit --parallel {self.name} on {ranks} ranks: "
                f"give the sizes of {list_all(self.dimensions)}, whose product is {ranks}, as in "
                f"--mesh {format_mesh(self.default_mesh(hosts))}"
            )
        return mesh


def _halves(hosts: Hosts) -> tuple[int, int]:
    """Return hosts × ranks per host, which must be equal; on one host, 2 × half of its ranks."""
    ranks = sum(hosts)
    if len(hosts) > 1 and len(set(hosts)) == 1:
        return len(hosts), hosts[0]
    return (2, ranks // 2) if ranks % 2 == 0 else (1, ranks)


def _pairs(hosts: Hosts) -> tuple[int, int]:
    """Return ranks / 2 × 2; with an odd number of ranks, 1 × all."""
    ranks = sum(hosts)
    return (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks)


def _line(hosts: Hosts) -> tuple[int]:
    return (sum(hosts),)


WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("ddp", "every rank has the whole model", (), lambda _: ()),
        Way("fsdp", "fully_shard divides every parameter among all ranks", (SHARD,), _line),
        Way(
            "hsdp",
            "fully_shard divides every parameter among the ranks of a group, and the groups are "
            "replicas",
            (REPLICATE, SHARD),
            _halves,
            "hosts x ranks per host; on one host, 2 x half of its ranks",
        ),
        Way(
            "tp",
            "all ranks share a batch and divide each layer (tensor parallel)",
            (TENSOR,),
            _line,
        ),
        Way(
            "fsdp+tp",
            "ranks that share a batch divide each layer, and fully_shard divides it further",
            (SHARD, TENSOR),
            _pairs,
            "half of the ranks x 2, or 1 x all if their number is odd",
        ),
    )
}


def parse_mesh(text: str) -> tuple[int, ...]:
    """Parse "2x4". Raises ValueError with one sentence."""
    words = text.lower().split("x")
    if not all(word.isdecimal() and word.isascii() and int(word) > 0 for word in words):
        raise ValueError(f"invalid mesh {text!r}: write integers separated by x, as in 2x4")
    return tuple(map(int, words))


def format_mesh(mesh: Sequence[int]) -> str:
    """Return "2x4"."""
    return "x".join(map(str, mesh))


@dataclass(frozen=True)
class Plan:
    """How a workload's model is divided.

    layers     model → the modules that fully_shard gathers one at a time, in order of the forward;
               the rest of the model is one more group
    splits     model → name of a linear layer → "column" (its outputs are divided) or "row" (its
               inputs); all other parameters are the same in every rank
    objection  (settings of the workload, ranks along tp) → None, or why its layers cannot be
               divided among these ranks, in one sentence
    """

    layers: Callable[[nn.Module], list[nn.Module]]
    splits: Callable[[nn.Module], Mapping[str, str]]
    objection: Callable[[Mapping[str, Any], int], str | None]
