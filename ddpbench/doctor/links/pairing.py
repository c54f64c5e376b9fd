"""Rounds of disjoint pairs, so that all pairs of a round can work at once."""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]
Halves = tuple[tuple[int, ...], tuple[int, ...]]


def circle(ends: Sequence[int]) -> list[list[Pair]]:
    """Return rounds in which every end meets every other once.

    There are n - 1 rounds for n ends, or n if n is odd, because one end then rests. The first end
    stays in its place while the others go round a circle, and opposite ends meet.
    """
    ring: list[int | None] = [*ends, *([None] if len(ends) % 2 else [])]
    rounds = []
    for _ in ring[1:]:
        opposite = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        rounds.append([(a, b) for a, b in opposite if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def halved(ends: Sequence[int]) -> list[list[Halves]]:
    """Cut the ends into halves, these into halves again, down to single ends; a list a depth."""
    groups, depths = [tuple(ends)], []
    while groups := [group for group in groups if len(group) > 1]:
        cuts = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups]
        depths.append(cuts)
        groups = [half for halves in cuts for half in halves]
    return depths


def across(halves: Halves) -> list[Pair]:
    """Return the pairs across a cut.

    With an odd number one end rests. The next cut puts it into a smaller half, where none rests.
    """
    left, right = halves
    return list(zip(left, reversed(right), strict=False))
