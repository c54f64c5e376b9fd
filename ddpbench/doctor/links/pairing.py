"""Who meets whom: rounds of disjoint pairs, in which all pairs can work at once."""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]
Halves = tuple[tuple[int, ...], tuple[int, ...]]


def circle(ends: Sequence[int]) -> list[list[Pair]]:
    """Rounds in which each meets each once: n - 1 of n ends, n where n is odd, as one then rests.

    The first stays in its place while the others go round a circle, and opposite ones meet.
    """
    ring: list[int | None] = [*ends, *([None] if len(ends) % 2 else [])]
    rounds = []
    for _ in ring[1:]:
        opposite = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        rounds.append([(a, b) for a, b in opposite if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def halved(ends: Sequence[int]) -> list[list[Halves]]:
    """All ends cut in halves, these in halves again, down to single ones: a list for each depth."""
    groups, depths = [tuple(ends)], []
    while groups := [group for group in groups if len(group) > 1]:
        cuts = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups]
        depths.append(cuts)
        groups = [half for halves in cuts for half in halves]
    return depths


def across(halves: Halves) -> list[Pair]:
    """The pairs that meet across a cut. Of an odd number one rests, which the next cut brings into
    a smaller half, where none does."""
    left, right = halves
    return list(zip(left, reversed(right), strict=False))
