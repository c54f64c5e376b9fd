"""Which links are measured, in which order, and how long that takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ddpbench.doctor.links import pairing
from ddpbench.doctor.links.pairing import Halves, Pair
from ddpbench.doctor.links.suspects import Cell
from ddpbench.records.wording import counted

SHARE = 0.7  # of the time of the examination; the rest is for suspects
LEAST_SECONDS, MOST_SECONDS = 0.02, 0.2  # of one way of a pair
FEW = 4  # with fewer ends a round has one pair, so all at once is the same as alone


@dataclass(frozen=True)
class Schedule:
    """The pairs to measure, in rounds."""

    ends: tuple[int, ...]
    host: dict[int, int]  # end → first rank of its host
    rounds: tuple[tuple[Pair, ...], ...]  # disjoint pairs in each
    cuts: tuple[Halves, ...]  # empty: every pair is measured, all at once and alone
    seconds: float  # of one way of a pair
    unchecked: tuple[str, ...] = ()

    @property
    def hosts(self) -> list[int]:
        """Return the first rank of each host."""
        return sorted(set(self.host.values()))

    @property
    def kind(self) -> str:
        """Return what the ends stand for: "hosts" or "ranks"."""
        return "hosts" if 1 < len(self.hosts) == len(self.ends) else "ranks"

    @property
    def pairs(self) -> int:
        return sum(map(len, self.rounds))

    def connecting(self) -> list[list[Cell]]:
        """Return steps in which each pair sends once in one direction."""
        return [list(pairs) for pairs in self.rounds]

    def at_once(self) -> list[list[Cell]]:
        """Return steps in which the pairs of a round send together, one way, then the other."""
        if len(self.ends) < FEW and not self.cuts:
            return []
        return [way for pairs in self.rounds for way in (list(pairs), [(b, a) for a, b in pairs])]

    def alone(self, seed: int) -> list[list[Cell]]:
        """Return steps of one direction of one pair, shuffled so that drift favours no end."""
        if self.cuts:
            return []
        steps = [[way] for pairs in self.rounds for a, b in pairs for way in ((a, b), (b, a))]
        random.Random(seed).shuffle(steps)
        return steps

    @property
    def cost(self) -> str:
        """Describe the links, the order and the time in one line."""
        how = [f"all at once in {counted(len(self.rounds), 'round')}"] if self.at_once() else []
        how += [] if self.cuts else ["one by one"]
        seconds = (len(self.at_once()) + len(self.alone(0))) * self.seconds * 1.2 + 0.5
        return (
            f"{len(self.ends)} {self.kind}, {counted(self.pairs, 'link')}, {' and '.join(how)}, "
            f"both ways, {self.seconds * 1e3:.0f} ms each: about {max(1.0, seconds):.0f} s"
        )


def plan_schedule(
    hosts: Sequence[Sequence[int]], by: str, max_pairs: int, seconds: float, most_seconds: float
) -> Schedule:
    """Plan the links between all ranks of these hosts or, with by "host", the first of each.

    With more pairs than max_pairs only one rank of each host is measured; if these are still too
    many, only pairs across the cuts of their halves. seconds: of everything, approximately;
    most_seconds: of one direction of a pair.
    """
    ends = tuple(rank for ranks in hosts for rank in ranks)
    unchecked = []
    if by == "host":
        ends = tuple(ranks[0] for ranks in hosts)
    elif 1 < len(hosts) < len(ends) and _pairs(ends) > max_pairs:
        unchecked.append(
            f"only one rank of each host was measured: {len(ends)} ranks have {_pairs(ends)} "
            f"links, more than --max-pairs {max_pairs}"
        )
        ends = tuple(ranks[0] for ranks in hosts)
    depths = pairing.halved(ends) if _pairs(ends) > max_pairs else []
    rounds = [[pair for cut in cuts for pair in pairing.across(cut)] for cuts in depths]
    rounds = rounds or pairing.circle(ends)
    pairs = sum(map(len, rounds))
    if pairs < _pairs(ends):
        unchecked.append(
            f"{_pairs(ends) - pairs} of {_pairs(ends)} links were not measured, and a slow one "
            f"among them would not be seen (--max-pairs {_pairs(ends)} measures all)"
        )
    steps = 2 * (len(rounds) + (0 if depths else pairs))
    each = max(LEAST_SECONDS, min(SHARE * seconds / max(1, steps), most_seconds))
    return Schedule(
        ends,
        {rank: ranks[0] for ranks in hosts for rank in ranks if rank in set(ends)},
        tuple(map(tuple, rounds)),
        tuple(cut for cuts in depths for cut in cuts),
        each,
        tuple(unchecked),
    )


def _pairs(ends: Sequence[int]) -> int:
    return len(ends) * (len(ends) - 1) // 2
