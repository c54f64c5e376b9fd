"""Which end, or which link between two ends, is slow, from the rates of all pairs.

Rates are bytes a second by (sender, receiver), which are numbers of ranks. The slowest of sender,
link and receiver bounds a stream. So each end has two levels, the upper quartiles of its row and of
its column. An end is compared with the levels of all ends, a link with the lower level of its two
ends. A sum of effects, as in a median polish, would expect too little between two slow ends, and
would mistake one slow host of four for three slow links. A suspect must be measured again: `again`,
`Again`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median, median_high, median_low

Cell = tuple[int, int]  # sender, receiver
Rates = Mapping[Cell, float]
Pair = tuple[int, int]
Halves = tuple[tuple[int, ...], tuple[int, ...]]

SUSPICIOUS = 0.70  # of the expected rate; less is measured again
FAR = 5.0  # if it is at least this many spreads away from the rest,
WORTH = 0.25  # or if less than this is left, however the rest varies
LEAST_SPREAD = 0.03  # relative; few links may agree by chance
CONFIRMED = 0.75  # of the rate of healthy links, below which it is each time it is measured again
TIMES, MOST_TIMES = 5, 10  # how often that must count, and with those that do not count
MOST_AGAIN, MOST_BESIDE = 4, 2  # cells of one suspicion that are measured again; healthy ones
DEVIATION = 1.4826  # standard deviations in a median absolute deviation


@dataclass(frozen=True)
class Suspect:
    """A suspect: all links of one end, or the links between `one` and `other`."""

    one: tuple[int, ...]
    other: tuple[int, ...]  # empty: all others
    cells: tuple[Cell, ...]  # that are slow
    share: float  # of what is expected of them, median

    @property
    def ends(self) -> tuple[int, ...]:
        return (*self.one, *self.other)

    @property
    def ways(self) -> str:
        """Return the slow direction as seen from `one`: "sends", "receives" or "both"."""
        sends = {cell[0] in self.one for cell in self.cells}
        return "both" if len(sends) == 2 else "sends" if sends == {True} else "receives"


@dataclass(frozen=True)
class Again:
    """A suspect measured again and again, each time beside healthy links.

    The best rates of each time count, because other load makes a link slower, never faster. A time
    counts only if the healthy links, or the suspect, are about as fast as before.
    """

    suspect: Suspect
    usual: float  # rate of the healthy links before
    slow: tuple[tuple[float, ...], ...] = ()  # each time: the rates of its cells
    others: tuple[tuple[float, ...], ...] = ()  # each time: the rates of healthy cells

    def and_again(self, slow: Iterable[float], others: Iterable[float]) -> Again:
        return replace(self, slow=(*self.slow, tuple(slow)), others=(*self.others, tuple(others)))

    @property
    def times(self) -> list[tuple[float, float]]:
        """Return the best rate of its cells and of the healthy ones, for each time that counts."""
        best = zip(map(max, self.slow), map(max, self.others), strict=True)
        return [each for each in best if max(each) >= CONFIRMED * self.usual]

    @property
    def cleared(self) -> bool:
        """Tell whether it was about as fast as the others at least once."""
        return any(slow >= CONFIRMED * others for slow, others in self.times)

    @property
    def confirmed(self) -> bool:
        return len(self.times) >= TIMES and not self.cleared

    @property
    def decided(self) -> bool:
        """Tell whether nothing is left to measure."""
        return self.cleared or self.confirmed or len(self.slow) >= MOST_TIMES

    @property
    def bytes_per_second(self) -> float:
        return upper(rate for each in self.slow for rate in each)

    @property
    def others_bytes_per_second(self) -> float:
        return upper(rate for each in self.others for rate in each)


def upper(values: Iterable[float]) -> float:
    """Return the upper quartile, one of the values: of two or three the largest."""
    ordered = sorted(values)
    return ordered[math.ceil(0.75 * len(ordered)) - 1]


def suspects(rates: Rates, spread: float = 0.0) -> list[Suspect]:
    """Return the slow ends, then the other slow links, the slowest first.

    spread: relative, of repeated measurements of one cell. With two ends, only the two directions
    can be compared.
    """
    sends, receives = _levels(rates, 0), _levels(rates, 1)
    levels = [*sends.values(), *receives.values()]
    if not levels:
        return _one_way(rates, spread)
    usual = median_high(levels)
    expected = {(a, b): min(sends.get(a, usual), receives.get(b, usual)) for a, b in rates}
    logs = [math.log(rates[cell] / expected[cell]) for cell in rates]
    middle = median(logs)
    residual = DEVIATION * median(abs(each - middle) for each in logs)
    # How much the two directions of a pair differ; slow ends and links keep them equal.
    ratios = [abs(math.log(rates[a, b] / rates[b, a])) for a, b in rates if (b, a) in rates]
    both_ways = DEVIATION * median_low(ratios) / math.sqrt(2) if ratios else 0.0
    noise = max(LEAST_SPREAD, spread, residual, both_ways)
    # Of the levels only those above: as many as half may be slow.
    above = DEVIATION * median(math.log(level / usual) for level in levels if level >= usual)
    least = _least(max(noise, above)) * usual
    ends = []
    for end in dict.fromkeys([*sends, *receives]):
        slow = [side for side, its in enumerate((sends, receives)) if its.get(end, usual) < least]
        cells = tuple(cell for cell in rates if any(cell[side] == end for side in slow))
        if slow:
            ends.append(Suspect((end,), (), cells, median(rates[c] for c in cells) / usual))
    return sorted(ends, key=attrgetter("share")) + _slow_links(rates, expected, _least(noise))


def _slow_links(rates: Rates, expected: Rates, least: float) -> list[Suspect]:
    slow: dict[frozenset[int], list[Cell]] = {}
    for cell, rate in rates.items():
        if rate < least * expected[cell]:
            slow.setdefault(frozenset(cell), []).append(cell)
    found = []
    for pair, cells in slow.items():
        share = median(rates[cell] / expected[cell] for cell in cells)
        found.append(Suspect((min(pair),), (max(pair),), tuple(cells), share))
    return sorted(found, key=attrgetter("share"))


def between(rates: Rates, host: Mapping[int, int]) -> dict[Cell, float]:
    """Return the rates between hosts, each named by one of its ranks.

    A rate is the upper median over the ranks, so that one slow rank of two is no slow host.
    host: rank → a rank that names its host.
    """
    grouped: dict[Cell, list[float]] = {}
    for (a, b), rate in rates.items():
        if host[a] != host[b]:
            grouped.setdefault((host[a], host[b]), []).append(rate)
    return {cell: median_high(its) for cell, its in grouped.items()}


def shares(rates: Rates, host: Mapping[int, int]) -> dict[Cell, float]:
    """Return the rate of each pair of ranks relative to that of their hosts: 1 is as fast."""
    hosts = between(rates, host)
    return {
        (a, b): rate / hosts[host[a], host[b]]
        for (a, b), rate in rates.items()
        if host[a] != host[b]
    }


def merged(found: Sequence[Suspect], cuts: Iterable[Halves]) -> list[Suspect]:
    """Replace the suspects that together are all pairs across a cut by one: the cut is slow."""
    left = {frozenset(each.ends): each for each in found if each.other}
    whole = []
    for halves in cuts:
        pairs = [frozenset(pair) for pair in across(halves)]
        if len(pairs) > 1 and all(pair in left for pair in pairs):
            its = [left.pop(pair) for pair in pairs]
            cells = tuple(cell for each in its for cell in each.cells)
            whole.append(Suspect(*halves, cells, median(each.share for each in its)))
    return [each for each in found if not each.other] + whole + list(left.values())


def again(
    suspect: Suspect, rates: Rates, found: Sequence[Suspect]
) -> tuple[list[Cell], list[Cell]]:
    """Return the cells to measure again, and healthy cells to compare with.

    Healthy cells of the same ends come first. A link of a slow end is compared with the other links
    of that end. Without healthy cells there is nothing to compare with.

    found: all suspects, including this one.
    """
    ill = {end for each in found if not each.other for end in each.one}
    mine = ill & set(suspect.ends) if suspect.other else set[int]()
    accused = {frozenset(cell) for each in found if each.other for cell in each.cells}
    healthy = [
        cell
        for cell in rates
        if frozenset(cell) not in accused
        and ill & set(cell) <= mine
        and bool(ill & set(cell)) == bool(mine)
    ]
    if not healthy and suspect.other:  # of two hosts: the way back
        healthy = [cell[::-1] for cell in suspect.cells if cell[::-1] not in suspect.cells]
    others = {end for each in found if each is not suspect for end in each.ends}
    clear = sorted(suspect.cells, key=lambda cell: bool(others & set(cell) - set(suspect.ends)))
    both = [way for cell in clear for way in (cell, cell[::-1]) if way in suspect.cells]
    chosen = [*dict.fromkeys(both)][:MOST_AGAIN]
    ends = dict.fromkeys(end for cell in chosen for end in cell)
    near = [next((cell for cell in healthy if end in cell), None) for end in ends]
    beside = [cell for cell in dict.fromkeys([*near, *healthy]) if cell is not None]
    return chosen, beside[:MOST_BESIDE]


def _levels(rates: Rates, side: int) -> dict[int, float]:
    """Return the upper quartile of each end's rates as sender (0) or receiver (1).

    Only for ends with two partners at least: with one, the end and the link look the same.
    """
    grouped: dict[int, list[float]] = {}
    for cell, rate in rates.items():
        grouped.setdefault(cell[side], []).append(rate)
    return {end: upper(its) for end, its in grouped.items() if len(its) > 1}


def _one_way(rates: Rates, spread: float) -> list[Suspect]:
    least = _least(max(LEAST_SPREAD, spread))
    return [
        Suspect((a,), (b,), ((a, b),), rate / rates[b, a])
        for (a, b), rate in rates.items()
        if rate < least * rates.get((b, a), 0.0)
    ]


def _least(noise: float) -> float:
    """Return the share of the expected rate below which a cell is suspicious."""
    return min(SUSPICIOUS, max(WORTH, math.exp(-FAR * noise)))


# --- rounds of disjoint pairs, so that all pairs of a round can work at once ----------------------


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
