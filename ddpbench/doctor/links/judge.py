"""Which end, or which link between two ends, is slow, from the rates of all pairs.

Rates are bytes a second by (sender, receiver), which are numbers of ranks. The slowest of sender,
link and receiver bounds a stream. So each end has two levels, the upper quartiles of its row and of
its column. An end is compared with the levels of all ends, a link with the lower level of its two
ends. A sum of effects, as in a median polish, would expect too little between two slow ends, and
would mistake one slow host of four for three slow links.

A suspect must be measured again: `choose_cells`, `Suspect.is_slow`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median, median_high, median_low
from typing import Any

from ddpbench.analysis.rates import upper_quartile
from ddpbench.present.examinations import name_ends
from ddpbench.records.schema import Finding
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.wording import format_rate

Cell = tuple[int, int]  # sender, receiver
Rates = Mapping[Cell, float]

SUSPICIOUS = 0.70  # of the expected rate; less is measured again
FAR = 5.0  # if it is at least this many spreads away from the rest,
WORTH = 0.25  # or if less than this is left, however the rest varies
LEAST_SPREAD = 0.03  # relative; few links may agree by chance
CONFIRMED = 0.75  # of the rate of healthy links; a slow link is below it in each measurement
TIMES = 5  # measurements that must agree
MOST_AGAIN, MOST_BESIDE = 4, 2  # cells of one suspect that are measured again; healthy ones
DEVIATION = 1.4826  # standard deviations in a median absolute deviation


@dataclass
class Suspect:
    """An end, or a link between two ends, that looks slow, and further measurements of it."""

    one: int
    other: int | None  # None: all other ends
    cells: Sequence[Cell]  # that are slow
    share: float  # of the rate that is expected of them, median
    kind: str = "host"  # of the ends: "host", "rank" (of different hosts), "neighbour" (of one)
    healthy: Sequence[Cell] = ()  # measured beside the cells
    usual: float = 0.0  # rate of the healthy cells so far
    measured: list[tuple[float, float]] = field(
        default_factory=list
    )  # best rate of both, each time

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.one,) if self.other is None else (self.one, self.other)

    @property
    def ways(self) -> str:
        """Return the slow direction as seen from `one`: "sends", "receives" or "both"."""
        sends = {sender == self.one for sender, _ in self.cells}
        return "both" if len(sends) == 2 else "sends" if sends == {True} else "receives"

    @property
    def is_slow(self) -> bool | None:
        """Return whether it was slow each time, after TIMES times; None: undecided.

        Other load makes a link slower, never faster. So the best rates count, and only the times at
        which the healthy links, or the suspect, are about as fast as before.
        """
        times = [both for both in self.measured if max(both) >= CONFIRMED * self.usual]
        if any(slow >= CONFIRMED * healthy for slow, healthy in times):
            return False
        return True if len(times) >= TIMES else None

    @property
    def rates(self) -> tuple[float, float]:
        """Return the bytes a second of its cells and of the healthy ones."""
        slow, healthy = zip(*self.measured, strict=True)
        return upper_quartile(slow), upper_quartile(healthy)


def find_suspects(rates: Rates, spread: float = 0.0) -> list[Suspect]:
    """Return the slow ends, then slow links between other ends, the slowest first.

    spread: relative, of repeated measurements of one cell.
    """
    sends, receives = _levels(rates, 0), _levels(rates, 1)
    levels = [*sends.values(), *receives.values()]
    if not levels:  # no end has two links to compare
        return []
    usual = median_high(levels)
    expected = {(a, b): min(sends.get(a, usual), receives.get(b, usual)) for a, b in rates}
    noise = max(spread, _estimate_noise(rates, expected))
    # Of the levels only those above: as many as half may be slow.
    above = DEVIATION * median(math.log(level / usual) for level in levels if level >= usual)
    least = _least(max(noise, above)) * usual
    sides = {
        end: [side for side, own in enumerate((sends, receives)) if own.get(end, usual) < least]
        for end in {**sends, **receives}
    }
    ends, links = [], dict[frozenset[int], list[Cell]]()
    for end, slow_sides in sides.items():
        cells = [cell for cell in rates if any(cell[side] == end for side in slow_sides)]
        if cells:
            ends.append(Suspect(end, None, cells, median(rates[c] for c in cells) / usual))
    for cell, rate in rates.items():
        if rate < _least(noise) * expected[cell] and not any(sides.get(end) for end in cell):
            links.setdefault(frozenset(cell), []).append(cell)
    pairs = [
        Suspect(min(pair), max(pair), cells, median(rates[c] / expected[c] for c in cells))
        for pair, cells in links.items()
    ]
    by_share = attrgetter("share")
    return [*sorted(ends, key=by_share), *sorted(pairs, key=by_share)]


def _estimate_noise(rates: Rates, expected: Rates) -> float:
    """Return how much rates vary around what is expected of them, relative."""
    logs = [math.log(rates[cell] / expected[cell]) for cell in rates]
    middle = median(logs)
    residual = median(abs(each - middle) for each in logs)
    # How much the two directions of a pair differ; slow ends and links keep them equal.
    ratios = [abs(math.log(rates[a, b] / rates[b, a])) for a, b in rates if (b, a) in rates]
    both_ways = median_low(ratios) / math.sqrt(2) if ratios else 0.0
    return max(LEAST_SPREAD, DEVIATION * residual, DEVIATION * both_ways)


def _levels(rates: Rates, side: int) -> dict[int, float]:
    """Return the upper quartile of each end's rates as sender (0) or receiver (1).

    Only for ends with two partners at least: with one, the end and the link look the same.
    """
    grouped: dict[int, list[float]] = {}
    for cell, rate in rates.items():
        grouped.setdefault(cell[side], []).append(rate)
    return {end: upper_quartile(own) for end, own in grouped.items() if len(own) > 1}


def _least(noise: float) -> float:
    """Return the share of the expected rate below which a cell is suspicious."""
    return min(SUSPICIOUS, max(WORTH, math.exp(-FAR * noise)))


def combine_hosts(rates: Rates, host: Mapping[int, int]) -> dict[Cell, float]:
    """Return the rates between hosts, each named by one of its ranks.

    A rate is the upper median over the ranks, so that one slow rank of two is no slow host.
    host: rank → a rank that names its host.
    """
    grouped: dict[Cell, list[float]] = {}
    for (a, b), rate in rates.items():
        if host[a] != host[b]:
            grouped.setdefault((host[a], host[b]), []).append(rate)
    return {cell: median_high(own) for cell, own in grouped.items()}


def compare_with_hosts(rates: Rates, host: Mapping[int, int]) -> dict[Cell, float]:
    """Return the rate of each pair of ranks relative to that of their hosts: 1 is as fast."""
    hosts = combine_hosts(rates, host)
    return {
        (a, b): rate / hosts[host[a], host[b]]
        for (a, b), rate in rates.items()
        if host[a] != host[b]
    }


def choose_cells(suspect: Suspect, rates: Rates, suspects: Sequence[Suspect]) -> None:
    """Choose the cells of a suspect to measure again, and healthy cells to compare with.

    Healthy cells of the same ends come first. Without healthy cells there is nothing to compare
    with. suspects: all of them, including this one.
    """
    slow_ends = {each.one for each in suspects if each.other is None}
    slow_links = {frozenset(cell) for each in suspects for cell in each.cells}
    healthy = [
        cell for cell in rates if frozenset(cell) not in slow_links and not slow_ends & set(cell)
    ]
    others = {end for each in suspects if each is not suspect for end in each.ends}
    others -= set(suspect.ends)
    suspect.cells = sorted(suspect.cells, key=lambda cell: bool(others & set(cell)))[:MOST_AGAIN]
    ends = {end for cell in suspect.cells for end in cell}
    suspect.healthy = sorted(healthy, key=lambda cell: not ends & set(cell))[:MOST_BESIDE]


# --- findings -------------------------------------------------------------------------------------

NEXT = {
    "slow-host": "on {one}: check the negotiated speed (ethtool), errors and drops (ethtool -S, "
    "ip -s link) of its interface, its cable and switch port, and what else uses them",
    "slow-link": "other links of these hosts are fine, so check what connects these two: route "
    "(traceroute both ways), cabling, ports and limits of the switches",
    "slow-rank-link": "compare its cores, NUMA node, GPU and interface with those of the other "
    "ranks of its host",
}
WAYS = {"both": "sends and receives", "sends": "sends", "receives": "receives"}


def name_suspect_ends(suspect: Suspect, host: Mapping[int, str]) -> list[str]:
    """Return the name of each end of a suspect. host: name of the host of each rank."""
    if suspect.kind == "host":
        return [host[end] for end in suspect.ends]
    return [f"rank {end} ({host[end]})" for end in suspect.ends]


def describe_slow(suspect: Suspect, host: Mapping[int, str]) -> Finding:
    """Return the finding for a confirmed suspect. host: name of the host of each rank."""
    slow, others = map(_describe_rate, suspect.rates)
    one, *rest = name_suspect_ends(suspect, host)
    times = f"in each of {len(suspect.measured)} measurements beside them"
    code, severity, next_step = "slow-rank-link", "warning", NEXT["slow-rank-link"]
    place: dict[str, object] = {"ranks": list(suspect.ends)}
    if suspect.kind == "host":
        code = "slow-link" if rest else "slow-host"
        place = {"hosts": [one, *rest], **place}
        next_step = NEXT[code].format(one=one)
    if rest:
        if suspect.kind == "neighbour":  # can be due to the topology
            severity = "note"
        first, second = (rest[0], one) if suspect.ways == "receives" else (one, rest[0])
        both = f"between {one} and {rest[0]}"
        way = both if suspect.ways == "both" else f"from {first} to {second}"
        sentence = f"slow link: the link {way} carries {slow}; other links carry {others}, {times}"
    else:
        sentence = (
            f"slow {'host' if suspect.kind == 'host' else 'rank'}: {one} {WAYS[suspect.ways]} only "
            f"{slow}; links between the others carry {others}, {times}"
        )
    return Finding(severity, code, sentence, next_step, place)


def _describe_rate(bytes_per_second: float) -> str:
    bits = bytes_per_second * 8
    line = f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
    return f"{format_rate(bytes_per_second)} ({line})"


# --- lines and tables -----------------------------------------------------------------------------

SLOWEST = 12  # ways in the table: all of four ends


def summarise(title: str, cells: Sequence[Sequence[Any]]) -> list[str]:
    """Return one line on the rates and latencies of these cells; none without cells."""
    if not cells:
        return []
    rates = [(alone or at_once) / 1e6 for _, _, alone, at_once, _ in cells]
    shares = [at_once / alone for _, _, alone, at_once, _ in cells if at_once and alone]
    where = "alone" if all(cell[2] for cell in cells) else "all at once"
    parts = [f"{title}: {_range(rates)} MB/s {where}"]
    if shares:
        parts.append(f"{median(shares) * 100:.0f} % of that all at once")
    return [", ".join([*parts, f"latency {_range([cell[4] * 1e6 for cell in cells])} µs"])]


def _range(values: Sequence[float]) -> str:
    middle, least, most = map(_short, (median(values), min(values), max(values)))
    return f"{middle} ({least} … {most})"


def build_table(figures: Mapping[str, Any]) -> Table:
    """Return the rates and latencies of the slowest ways, the slowest first."""
    cells, names = figures["cells"], name_ends(figures)
    measured = [rate for cell in cells for rate in cell[2:4] if rate]
    scale, unit = (1e9, "GB/s") if min(measured) >= 1e9 else (1e6, "MB/s")
    headings = ("from", "to", f"{unit} alone", "all at once", "latency µs")
    rows = [
        (
            names[a],
            names[b],
            alone and _short(alone / scale),
            at_once and _short(at_once / scale),
            _short(latency * 1e6),
        )
        for a, b, alone, at_once, latency in sorted(cells, key=lambda cell: cell[2] or cell[3])
    ]
    which = f"the slowest {SLOWEST} of {len(rows)} ways" if len(rows) > SLOWEST else "ways"
    title = f"{which} between {figures['kind']}, the slowest first"
    return Table(title, tuple(map(TableColumn, headings)), tuple(rows[:SLOWEST]))


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
