"""Findings on links, one line on the rates of all links, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ddpbench.doctor.links.suspects import Again, Cell, Rates, Suspect
from ddpbench.records.schema import Finding
from ddpbench.records.table import Table, TableColumn
from ddpbench.records.wording import format_rate

# A full frame adds preamble, header, checksum and gap to its MTU; the MTU contains the headers of
# IP and of TCP with time stamps.
FRAME_NBYTES, HEADERS_NBYTES = 38, 52
MTU_NBYTES = 1500
ENOUGH = 0.5  # of the interfaces' nominal speed


@dataclass(frozen=True)
class Places:
    """Names of the ends of links, and facts about the network between them, by rank."""

    host: Mapping[int, str]
    ethernet: bool = False  # whether TCP carries it
    mtu_nbytes: int = MTU_NBYTES
    nominal: Mapping[int, float | None] = field(default_factory=dict)  # bytes a second

    def rank(self, rank: int) -> str:
        return f"rank {rank} ({self.host[rank]})"

    def names(self, ends: Sequence[int], kind: str) -> str:
        """Name hosts or ranks; of many the first and the last."""
        names = [self.host[end] if kind == "host" else self.rank(end) for end in ends]
        return " and ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"

    def line_rate(self, bytes_per_second: float, kind: str) -> float | None:
        """Return bits a second of the Ethernet on which TCP carries that rate; None without TCP."""
        if not self.ethernet or kind == "neighbour":
            return None
        return line_rate(bytes_per_second, self.mtu_nbytes)

    def carries(self, bytes_per_second: float, kind: str) -> str:
        """Format a rate together with the Ethernet on which TCP carries as much."""
        bits = self.line_rate(bytes_per_second, kind)
        if bits is None:
            return format_rate(bytes_per_second)
        line = f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
        return f"{format_rate(bytes_per_second)}, as an Ethernet of {line} does"


@dataclass(frozen=True)
class Carried:
    """Rates of one direction between two ranks, in bytes a second; None: not measured."""

    alone: float | None
    at_once: float | None  # with all pairs of a round
    latency_seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.alone or self.at_once or 0.0


def line_rate(bytes_per_second: float, mtu_nbytes: int = MTU_NBYTES) -> float:
    """Return bits a second of the Ethernet on which TCP in full frames carries that rate.

    With the usual MTU, 1448 of 1538 bytes of a frame are data.
    """
    share = (mtu_nbytes - HEADERS_NBYTES) / (mtu_nbytes + FRAME_NBYTES)
    return bytes_per_second * 8 / share


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


def finding(seen: Again, kind: str, places: Places, two_hosts: bool = False) -> Finding:
    """Return the finding for a confirmed suspect.

    kind: what the ends are: "host", "rank" (of different hosts) or "neighbour" (ranks of one host,
    where a slow pair may be due to the topology).
    """
    suspect = seen.suspect
    slow = places.carries(seen.bytes_per_second, kind)
    others = places.carries(seen.others_bytes_per_second, kind)
    each_time = f"in each of {len(seen.slow)} measurements beside them"
    two_hosts = two_hosts and kind == "host"
    code = f"slow-{'link' if suspect.other else 'host'}" if kind == "host" else "slow-rank-link"
    step = NEXT["two-hosts" if two_hosts else code]
    if suspect.other:
        where = f"the link {_between(suspect, kind, places)}"
        beside = "the way back it is" if two_hosts else "other links carry"
        sentence = f"slow link: {where} carries {slow}; {beside} {others} ({each_time})"
    else:
        what = "slow host" if kind == "host" else "slow rank"
        sentence = (
            f"{what}: {places.names(suspect.one, kind)} {WAYS[suspect.ways]} {slow}, "
            f"with every other; the others carry {others} among themselves ({each_time})"
        )
    place: dict[str, object] = {"ranks": list(suspect.ends)}
    if kind == "host":
        place = {"hosts": [places.host[end] for end in suspect.ends], **place}
    severity = "note" if kind == "neighbour" and suspect.other else "warning"
    return Finding(
        severity, code, sentence, step.format(one=places.names(suspect.one, kind)), place
    )


def _between(suspect: Suspect, kind: str, places: Places) -> str:
    one, other = (places.names(ends, kind) for ends in (suspect.one, suspect.other))
    if suspect.ways == "both":
        return f"between {one} and {other}"
    first, second = (one, other) if suspect.ways == "sends" else (other, one)
    return f"from {first} to {second}"


def below_nominal(rates: Rates, places: Places) -> list[Finding]:
    """Return a note if no link between hosts carries half of its interfaces' nominal speed.

    Nothing if the nominal speed of an interface is unknown.
    """
    nominal = {cell: min(places.nominal.get(end) or 0.0 for end in cell) for cell in rates}
    if not rates or not all(nominal.values()):
        return []
    best = max(rates, key=lambda cell: rates[cell] / nominal[cell])
    if rates[best] >= ENOUGH * nominal[best]:
        return []
    return [
        Finding(
            "note",
            "below-nominal",
            f"no link between hosts carries half of the nominal speed of its interfaces: the best, "
            f"from {places.rank(best[0])} to {places.rank(best[1])}, {format_rate(rates[best])} "
            f"of {format_rate(nominal[best])} nominal",
            "one stream may not fill a fast link (compare all at once, with several ranks a host); "
            "else check its MTU, the limits of the switch or of a virtual network, and whether "
            "this is the right interface",
            {"ranks": list(best)},
        )
    ]


def summary(title: str, cells: Mapping[Cell, Carried]) -> list[str]:
    """Return one line on the rates and latencies of these links; none without links."""
    if not cells:
        return []
    rates = [its.bytes_per_second / 1e6 for its in cells.values()]
    shares = [its.at_once / its.alone for its in cells.values() if its.at_once and its.alone]
    micros = [its.latency_seconds * 1e6 for its in cells.values()]
    alone = all(its.alone for its in cells.values())
    parts = [f"{title}: {_range(rates)} MB/s {'alone' if alone else 'all at once'}"]
    if shares:
        parts.append(f"{median(shares) * 100:.0f} % of that all at once")
    return [", ".join([*parts, f"latency {_range(micros)} µs"])]


def _range(values: Sequence[float]) -> str:
    middle, least, most = map(_short, (median(values), min(values), max(values)))
    return f"{middle} ({least} … {most})"


MOST_ENDS = 10  # in a matrix
SLOWEST = 10  # in a list


def build_tables(figures: Mapping[str, Any], backend: str) -> tuple[Table, ...]:
    cells = figures["cells"]
    names = _names(figures)
    rates = [rate for cell in cells for rate in cell[2:4] if rate]
    scale, unit = (1e9, "GB/s") if min(rates) >= 1e9 else (1e6, "MB/s")
    if len(names) > MOST_ENDS:
        return (_slowest(figures, names, scale, unit),)
    ways = [] if figures["halved"] else ["alone"]
    if any(cell[3] for cell in cells):
        ways.append("all at once")
    carried = {
        (sender, receiver): " / ".join(_short(rate / scale) for rate in (alone, at_once) if rate)
        for sender, receiver, alone, at_once, _ in cells
    }
    latencies = {
        (sender, receiver): _short(latency * 1e6) for sender, receiver, _, _, latency in cells
    }
    return (
        _matrix(f"{unit} {' / '.join(ways)}", carried, names),
        _matrix("latency µs, half a round trip", latencies, names),
    )


def _matrix(content: str, cells: Mapping[tuple[int, int], str], names: Mapping[int, str]) -> Table:
    return Table(
        f"{content}; each row sends to the columns",
        tuple(map(TableColumn, ["", *names.values()])),
        tuple(
            (name, *(cells.get((sender, receiver)) for receiver in names))
            for sender, name in names.items()
        ),
    )


def _slowest(
    figures: Mapping[str, Any], names: Mapping[int, str], scale: float, unit: str
) -> Table:
    cells = sorted(figures["cells"], key=lambda cell: cell[2] or cell[3])
    rows = [
        (
            names[sender],
            names[receiver],
            *(_short(rate / scale) if rate else None for rate in (alone, at_once)),
            _short(latency * 1e6),
        )
        for sender, receiver, alone, at_once, latency in cells[:SLOWEST]
    ]
    headings = ["from", "to", f"{unit} alone", "all at once", "latency µs"]
    return Table(
        f"the slowest {len(rows)} of {len(cells)} ways between {figures['kind']}",
        tuple(map(TableColumn, headings)),
        tuple(rows),
    )


def _names(figures: Mapping[str, Any]) -> dict[int, str]:
    """Return a name for each end: its host, its rank, or both."""
    hosts = {host for _, host in figures["ends"]}
    if figures["kind"] == "hosts" and len(hosts) == len(figures["ends"]):
        return dict(figures["ends"])
    if len(hosts) == 1:
        return {rank: f"rank {rank}" for rank, _ in figures["ends"]}
    return {rank: f"{rank} {host}" for rank, host in figures["ends"]}


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
