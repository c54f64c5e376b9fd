"""Gather the spans of all ranks in rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpbench.analysis.spans import Span, Timed
from ddpbench.runtime import control
from ddpbench.runtime.world import World

Kind = tuple[str, str, str, int]


def gather_timed(world: World, rounds: Sequence[Sequence[Span]]) -> Timed | None:
    """Gather the spans of the steps that were timed, one step per round, in rank 0.

    None on other ranks, and if the steps or the ranks differ in what they communicate.
    """
    first = rounds[0]
    kinds = [_kind(span) for span in first]
    own: list[tuple[Kind, tuple[int, ...]]] = [(_kind(span), span.ranks) for span in first]
    if any([_kind(span) for span in spans] != kinds for spans in rounds):
        own = []
    every = control.gather_values(world, own)
    same = [[tuple(kind) for kind, _ in each] for each in every]
    if not own or any(each != same[0] for each in same):
        return None
    times = [[(s.begin_ns, s.exposed_ns, s.end_ns) for s in spans] for spans in rounds]
    ns = control.gather_to_rank_0(world, np.array(times, np.int64))
    if ns is None:
        return None
    groups = [
        tuple(dict.fromkeys(tuple(each[number][1]) for each in every))
        for number in range(len(first))
    ]
    return Timed(tuple(first), groups, ns)


def _kind(span: Span) -> Kind:
    return span.operation, span.layers, span.phase, span.nbytes
