"""Which end, or which link between two ends, is slow, from the rates of all pairs; what is found.

Rates are bytes a second by (sender, receiver), which are numbers of ranks. The slowest of sender,
link and receiver bounds a stream. So each end has two levels, the upper quartiles of its row and of
its column. An end is compared with the levels of all ends, a link with the lower level of its two
ends. A sum of effects, as in a median polish, would expect too little between two slow ends, and
would mistake one slow host of four for three slow links. A suspect must be measured again:
`choose_cells`, `Again`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median, median_high, median_low

from ddpbench.analysis.rates import upper_quartile
from ddpbench.records.schema import Finding
from ddpbench.records.wording import format_rate

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
    kind: str = "rank"  # of the ends: "host", "rank" (of different hosts), "neighbour" (of one)

    @property
    def ends(self) -> tuple[int, ...]:
        return (*self.one, *self.other)

    @property
    def ways(self) -> str:
        """Return the slow direction as seen from `one`: "sends", "receives" or "both"."""
        sends = {cell[0] in self.one for cell in self.cells}
        return "both" if len(sends) == 2 else "sends" if sends == {True} else "receives"


@dataclass
class Again:
    """A suspect that is measured again and again, each time beside healthy links.

    The best rates of each time count, because other load makes a link slower, never faster. A time
    counts only if the healthy links, or the suspect, are about as fast as before.
    """

    suspect: Suspect
    cells: Sequence[Cell]  # of the suspect
    healthy: Sequence[Cell]
    usual: float  # rate of the healthy cells before
    slow: list[list[float]] = field(default_factory=list)  # each time: the rates of `cells`
    others: list[list[float]] = field(default_factory=list)  # each time: those of `healthy`

    def add(self, rates: Rates) -> None:
        """Add the rates of one time."""
        self.slow.append([rates[cell] for cell in self.cells])
        self.others.append([rates[cell] for cell in self.healthy])

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
    def slow_rate(self) -> float:
        """Return the bytes a second of its cells."""
        return upper_quartile(rate for each in self.slow for rate in each)

    @property
    def others_rate(self) -> float:
        """Return the bytes a second of the healthy cells."""
        return upper_quartile(rate for each in self.others for rate in each)


def find_suspects(rates: Rates, spread: float = 0.0) -> list[Suspect]:
    """Return the slow ends, then the other slow links, the slowest first.

    spread: relative, of repeated measurements of one cell. With two ends, only the two directions
    can be compared.
    """
    sends, receives = _levels(rates, 0), _levels(rates, 1)
    levels = [*sends.values(), *receives.values()]
    if not levels:
        ways_back = {(a, b): rates.get((b, a), 0.0) for a, b in rates}
        return _slow_links(rates, ways_back, _least(max(LEAST_SPREAD, spread)))
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


def combine_hosts(rates: Rates, host: Mapping[int, int]) -> dict[Cell, float]:
    """Return the rates between hosts, each named by one of its ranks.

    A rate is the upper median over the ranks, so that one slow rank of two is no slow host.
    host: rank → a rank that names its host.
    """
    grouped: dict[Cell, list[float]] = {}
    for (a, b), rate in rates.items():
        if host[a] != host[b]:
            grouped.setdefault((host[a], host[b]), []).append(rate)
    return {cell: median_high(its) for cell, its in grouped.items()}


def compare_with_hosts(rates: Rates, host: Mapping[int, int]) -> dict[Cell, float]:
    """Return the rate of each pair of ranks relative to that of their hosts: 1 is as fast."""
    hosts = combine_hosts(rates, host)
    return {
        (a, b): rate / hosts[host[a], host[b]]
        for (a, b), rate in rates.items()
        if host[a] != host[b]
    }


def merge_cuts(found: Sequence[Suspect], cuts: Iterable[Halves]) -> list[Suspect]:
    """Replace the suspects that together are all pairs across a cut by one: the cut is slow."""
    left = {frozenset(each.ends): each for each in found if each.other}
    whole = []
    for halves in cuts:
        pairs = [frozenset(pair) for pair in pair_across(halves)]
        if len(pairs) > 1 and all(pair in left for pair in pairs):
            its = [left.pop(pair) for pair in pairs]
            cells = tuple(cell for each in its for cell in each.cells)
            whole.append(Suspect(*halves, cells, median(each.share for each in its)))
    return [each for each in found if not each.other] + whole + list(left.values())


def choose_cells(
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
    return {end: upper_quartile(its) for end, its in grouped.items() if len(its) > 1}


def _least(noise: float) -> float:
    """Return the share of the expected rate below which a cell is suspicious."""
    return min(SUSPICIOUS, max(WORTH, math.exp(-FAR * noise)))


# --- rounds of disjoint pairs, so that all pairs of a round can work at once ----------------------


def plan_circle(ends: Sequence[int]) -> list[list[Pair]]:
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


def halve(ends: Sequence[int]) -> list[list[Halves]]:
    """Cut the ends into halves, these into halves again, down to single ends; a list a depth."""
    groups, depths = [tuple(ends)], []
    while groups := [group for group in groups if len(group) > 1]:
        cuts = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups]
        depths.append(cuts)
        groups = [half for halves in cuts for half in halves]
    return depths


def pair_across(halves: Halves) -> list[Pair]:
    """Return the pairs across a cut.

    With an odd number one end rests. The next cut puts it into a smaller half, where none rests.
    """
    left, right = halves
    return list(zip(left, reversed(right), strict=False))


# --- what is found --------------------------------------------------------------------------------

# A full frame adds preamble, header, checksum and gap to its MTU; the MTU contains the headers of
# IP and of TCP with time stamps.
FRAME_NBYTES, HEADERS_NBYTES = 38, 52
MTU_NBYTES = 1500
ENOUGH = 0.5  # of the interfaces' nominal speed
NEXT = {
    "slow-host": "on {one}: the negotiated speed (ethtool), errors and drops (ethtool -S, "
    "ip -s link) of its interface, its cable and port of the switch, and what else uses them",
    "slow-link": "the hosts' other links are fine, so look at what lies between these two: route "
    "(traceroute both ways), cabling, ports and limits of the switches; else keep them apart",
    "slow-rank-link": "compare its cores, NUMA node, GPU and interface with those of the other "
    "ranks of its host",
    "two-hosts": "measure with a third host, to tell the link from the hosts; until then check "
    "both: ethtool, ethtool -S, ip -s link, cables and ports",
}
WAYS = {"both": "sends and receives", "sends": "sends", "receives": "receives"}


@dataclass(frozen=True)
class Places:
    """Names of the ends of links, and facts about the network between them, by rank."""

    host: Mapping[int, str]
    ethernet: bool = False  # whether TCP carries it
    mtu_nbytes: int = MTU_NBYTES
    nominal: Mapping[int, float | None] = field(default_factory=dict)  # bytes a second

    def names(self, ends: Sequence[int], kind: str) -> str:
        """Name hosts or ranks; of many the first and the last."""
        names = [self.host[e] if kind == "host" else f"rank {e} ({self.host[e]})" for e in ends]
        return " and ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"

    def line_rate(self, bytes_per_second: float, kind: str = "host") -> float | None:
        """Return bits a second of the Ethernet on which TCP in full frames carries that rate.

        With the usual MTU, 1448 of 1538 bytes of a frame are data. None without TCP.
        """
        if not self.ethernet or kind == "neighbour":
            return None
        share = (self.mtu_nbytes - HEADERS_NBYTES) / (self.mtu_nbytes + FRAME_NBYTES)
        return bytes_per_second * 8 / share

    def carries(self, bytes_per_second: float, kind: str) -> str:
        """Format a rate together with the Ethernet on which TCP carries as much."""
        bits = self.line_rate(bytes_per_second, kind)
        if bits is None:
            return format_rate(bytes_per_second)
        line = f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
        return f"{format_rate(bytes_per_second)}, as an Ethernet of {line} does"


def describe_slow(seen: Again, places: Places, two_hosts: bool = False) -> Finding:
    """Return the finding for a confirmed suspect. two_hosts: whether there are only two."""
    suspect, kind = seen.suspect, seen.suspect.kind
    slow, others = (places.carries(r, kind) for r in (seen.slow_rate, seen.others_rate))
    one, other = (places.names(ends, kind) for ends in (suspect.one, suspect.other))
    each_time = f"in each of {len(seen.slow)} measurements beside them"
    two_hosts = two_hosts and kind == "host"
    code, severity = "slow-rank-link", "warning"
    place: dict[str, object] = {"ranks": list(suspect.ends)}
    if kind == "host":
        code = "slow-link" if suspect.other else "slow-host"
        place = {"hosts": [places.host[end] for end in suspect.ends], **place}
    if suspect.other:
        if kind == "neighbour":  # may be due to the topology
            severity = "note"
        first, second = (other, one) if suspect.ways == "receives" else (one, other)
        way = f"between {one} and {other}"
        way = way if suspect.ways == "both" else f"from {first} to {second}"
        beside = "the way back it is" if two_hosts else "other links carry"
        sentence = f"slow link: the link {way} carries {slow}; {beside} {others} ({each_time})"
    else:
        sentence = (
            f"slow {'host' if kind == 'host' else 'rank'}: {one} {WAYS[suspect.ways]} {slow}, "
            f"with every other; the others carry {others} among themselves ({each_time})"
        )
    next_step = NEXT["two-hosts" if two_hosts else code].format(one=one)
    return Finding(severity, code, sentence, next_step, place)


def find_below_nominal(rates: Rates, places: Places) -> list[Finding]:
    """Return a note if no link between hosts carries half of its interfaces' nominal speed.

    Nothing if the nominal speed of an interface is unknown.
    """
    nominal = {cell: min(places.nominal.get(end) or 0.0 for end in cell) for cell in rates}
    if not rates or not all(nominal.values()):
        return []
    best = max(rates, key=lambda cell: rates[cell] / nominal[cell])
    if rates[best] >= ENOUGH * nominal[best]:
        return []
    sender, receiver = (places.names([end], "rank") for end in best)
    return [
        Finding(
            "note",
            "below-nominal",
            f"no link between hosts carries half of the nominal speed of its interfaces: the best, "
            f"from {sender} to {receiver}, {format_rate(rates[best])} "
            f"of {format_rate(nominal[best])} nominal",
            "one stream may not fill a fast link (compare all at once, with several ranks a host); "
            "else check its MTU, the limits of the switch or of a virtual network, and whether "
            "this is the right interface",
            {"ranks": list(best)},
        )
    ]
