"""Slow links and hosts, from what the job's own connections carried. Pure, no torch.

In a ring every link carries the same bytes, and all ranks wait for the slowest. That link is busy
while the others carry in bursts: bytes per second tell them apart. Between a link of 100 Mbit/s
and one of 1 Gbit/s, bursts read 21 to 72 MB/s of busy time, because the last acknowledgement of
each is delayed. The rate of transfers varies, and was up to twice the planted one. So a link is
slow if the larger of its two rates is below half of what other links surely carry. Findings and
tables state the rate of busy time. That of a slow link was within 10 % of the planted one, because
its bursts are long.

Where one direction of a host is slow, the acknowledgements of what it carries in the other
one queue behind that, so these links seem to carry a tenth of what they can. They are no finding.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpbench.analysis.rates import upper_quartile
from ddpbench.records.schema import Finding
from ddpbench.records.wording import format_rate, list_all
from ddpbench.watch.window import Link

SLOW = 0.5  # of the usual rate; less is slow
BUSY = 0.1  # of the time: a link that is used less does not slow the job down
COMPARABLE = 1 / 16  # of the bytes of the link that carried most


@dataclass(frozen=True)
class SlowLink:
    """A host, all of whose links are slow in a direction or both, or the link between two hosts.

    hosts: one, or sender and receiver; rates: what the link "carries", or a host "sends" or
    "receives" over its links if all are busy at once; bytes per second while data was on its way.
    """

    hosts: tuple[str, ...]
    interface: str
    rates: Mapping[str, float]
    usual_bytes_per_second: float
    busy_share: float


def find_slow_links(links: Iterable[Link], hosts: Container[str], seconds: float) -> list[SlowLink]:
    """Return the slow hosts and links of a job, the slowest first.

    links: of all its hosts; those to others, as to a file server, are left out. hosts: by name.
    seconds: in which they carried this. With all links equally slow, none is.
    """
    links = [k for k in links if k.busy_seconds > 0 and k.peer in hosts and k.peer != k.host]
    most = max((link.nbytes for link in links), default=0)
    links = [link for link in links if link.nbytes >= COMPARABLE * most]
    if len(links) < 2:
        return []
    usual = upper_quartile(map(find_rate, links))
    limit = SLOW * usual
    slow = [k for k in links if k.busy_seconds >= BUSY * seconds and _highest_rate(k) < limit]
    slow = [link for link in slow if not _waits_for_answers(link, links, slow)]
    found = []
    for host in sorted({end for link in slow for end in (link.host, link.peer)}):
        ways = _find_slow_ways(host, links, slow)
        if ways:
            found.append(_describe((host,), ways, usual, seconds))
            slow = [link for link in slow if not any(link in way for way in ways.values())]
    found += [_describe((k.host, k.peer), {"carries": [k]}, usual, seconds) for k in slow]
    return sorted(found, key=lambda each: min(each.rates.values()))


def _waits_for_answers(link: Link, links: Sequence[Link], slow: Sequence[Link]) -> bool:
    """Whether a link only looks slow: its acknowledgements queue behind data on a slower way."""
    ways = (
        [k for k in links if k.host == link.peer],
        [k for k in links if k.peer == link.host],
        [k for k in links if k.host == link.peer and k.peer == link.host],
    )
    limit = SLOW * _highest_rate(link)
    return any(way and all(k in slow and find_rate(k) < limit for k in way) for way in ways)


def _find_slow_ways(
    host: str, links: Sequence[Link], slow: Sequence[Link]
) -> dict[str, list[Link]]:
    """Return the links of a host by the directions in which all are slow; none for one link."""
    ways = {
        "sends": [link for link in links if link.host == host],
        "receives": [link for link in links if link.peer == host],
    }
    ways = {name: way for name, way in ways.items() if way and all(link in slow for link in way)}
    others = {end for way in ways.values() for link in way for end in (link.host, link.peer)}
    return ways if len(others - {host}) > 1 else {}


def _describe(
    hosts: tuple[str, ...], ways: Mapping[str, Sequence[Link]], usual: float, seconds: float
) -> SlowLink:
    links = [link for way in ways.values() for link in way]
    interfaces = {link.interface for link in links if link.host == hosts[0]}
    return SlowLink(
        hosts,
        interfaces.pop() if len(interfaces) == 1 else "",
        {
            name: sum(k.nbytes for k in way) / max(k.busy_seconds for k in way)
            for name, way in ways.items()
        },
        usual,
        min(1.0, max(link.busy_seconds for link in links) / seconds) if seconds else 1.0,
    )


def describe_slow_link(slow: SlowLink) -> Finding:
    """Return the finding on a slow host or link."""
    first, *rest = slow.hosts
    interface = f" ({slow.interface})" if slow.interface else ""
    rates = list_all(f"{name} {format_rate(rate)}" for name, rate in slow.rates.items())
    figures = (
        f"{rates} {'' if rest else 'at most over all its links '}while data is on its way; other "
        f"links of the job carry {format_rate(slow.usual_bytes_per_second)}. "
        f"{'It is' if rest else 'Its links are'} in use {slow.busy_share:.0%} of the time"
    )
    measure = "to measure it, run under the job's launcher: python -m ddpbench.doctor --only links"
    place: dict[str, object] = {"hosts": list(slow.hosts), "interface": slow.interface}
    if not rest:
        place["bytes_per_second"] = slow.rates
        sentence = f"slow host: {first}{interface} {figures}"
        check = f"on {first}, check speed and errors of its interface (ethtool, ip -s link)"
        return Finding("warning", "slow-host", sentence, f"{check}; {measure}", place)
    sentence = f"slow link: the link from {first}{interface} to {rest[0]} {figures}"
    return Finding("warning", "slow-link", sentence, measure, place)


def find_rate(link: Link) -> float:
    """Return what a link carried while data was on its way, in bytes per second of busy time."""
    return link.nbytes / link.busy_seconds


def _highest_rate(link: Link) -> float:
    return link.nbytes / min(link.busy_seconds, link.transfer_seconds or link.busy_seconds)
