"""What is said of links: findings, and what all of them carry, in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ddpbench.doctor.links.suspects import Again, Cell, Rates, Suspect
from ddpbench.records.schema import Finding

# Of a full frame, besides its MTU: preamble, header, checksum and gap; of the MTU, the headers of
# IP and of TCP with time stamps.
FRAME_NBYTES, HEADERS_NBYTES = 38, 52
MTU_NBYTES = 1500
ENOUGH = 0.5  # of the interfaces' nominal speed


@dataclass(frozen=True)
class Places:
    """What the ends of links are called, and what is known of what lies between them; by rank."""

    host: Mapping[int, str]
    ethernet: bool = False  # whether TCP carries it
    mtu_nbytes: int = MTU_NBYTES
    nominal: Mapping[int, float | None] = field(default_factory=dict)  # bytes a second

    def rank(self, rank: int) -> str:
        return f"rank {rank} ({self.host[rank]})"

    def names(self, ends: Sequence[int], kind: str) -> str:
        """Hosts or ranks; of many the first and the last."""
        told = [self.host[end] if kind == "host" else self.rank(end) for end in ends]
        return " and ".join(told) if len(told) < 3 else f"{told[0]} … {told[-1]}"

    def line_rate(self, bytes_per_second: float, kind: str) -> float | None:
        """Bits a second of the Ethernet on which TCP carries so much; None where no TCP does."""
        if not self.ethernet or kind == "neighbour":
            return None
        return line_rate(bytes_per_second, self.mtu_nbytes)

    def carries(self, bytes_per_second: float, kind: str) -> str:
        """A rate, and of what Ethernet that is all that TCP can have."""
        bits = self.line_rate(bytes_per_second, kind)
        if bits is None:
            return rate(bytes_per_second)
        told = f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
        return f"{rate(bytes_per_second)}, as an Ethernet of {told} does"


@dataclass(frozen=True)
class Carried:
    """What one way between two ranks carried, bytes a second; None: not measured."""

    alone: float | None
    at_once: float | None  # with all pairs of a round
    latency_seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.alone or self.at_once or 0.0


def line_rate(bytes_per_second: float, mtu_nbytes: int = MTU_NBYTES) -> float:
    """Bits a second of the Ethernet on which TCP carries so much in full frames: 1448 of 1538."""
    share = (mtu_nbytes - HEADERS_NBYTES) / (mtu_nbytes + FRAME_NBYTES)
    return bytes_per_second * 8 / share


def rate(bytes_per_second: float) -> str:
    """Three digits, in GB/s from 1 on."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"


NEXT = {
    "slow-host": "on {one}: the negotiated speed (ethtool), errors and drops (ethtool -S, "
    "ip -s link) of its interface, its cable and port of the switch, and what else uses them",
    "slow-link": "the hosts' other links are fine, so look at what lies between these two: route "
    "(traceroute both ways), cabling, ports and limits of the switches; else keep them apart",
    "slow-rank-link": "compare its cores, NUMA node, GPU and interface with those of the other "
    "ranks of its host",
    "two-hosts": "measure with a third host, which tells the link from the hosts; until then look "
    "at both: ethtool, ethtool -S, ip -s link, cables and ports",
}
WAYS = {"both": "sends and receives", "sends": "sends", "receives": "receives"}


def finding(seen: Again, kind: str, places: Places, two_hosts: bool = False) -> Finding:
    """What a confirmed suspicion is told as.

    kind: of what the ends are: "host", "rank" (of different hosts), "neighbour" (of one host, where
    a slow pair may be the topology).
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
            f"whoever the other is; the others carry {others} among themselves ({each_time})"
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
    """A note where all links between hosts carry less than half of what their interfaces are said
    to; nothing where that of one is not known."""
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
            f"no link between hosts carries half of what its interfaces are said to: the best, "
            f"from {places.rank(best[0])} to {places.rank(best[1])}, {rate(rates[best])} of "
            f"{rate(nominal[best])} nominal",
            "one stream may not fill a fast link (compare all at once, with several ranks a host); "
            "else look at its MTU, at limits of the switch or of a virtual network, and whether "
            "this is the interface that is meant",
            {"ranks": list(best)},
        )
    ]


def summary(title: str, cells: Mapping[Cell, Carried]) -> list[str]:
    """A line of what the links of a class carry; none where there are none."""
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
    """The median, the least and the most."""
    middle, least, most = (
        f"{each:.3g}" if each < 1000 else f"{each:.0f}"
        for each in (median(values), min(values), max(values))
    )
    return f"{middle} ({least} … {most})"
