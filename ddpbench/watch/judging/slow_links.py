"""Slow links and hosts, from what the job's own connections carried. Pure, no torch.

In a ring every link carries the same bytes, and all ranks wait for the slowest. That link is busy
while the others carry in bursts: bytes per second tell them apart. Between a link of 100 Mbit/s
and one of 1 Gbit/s, bursts read 21 to 72 MB/s of busy time, because the last acknowledgement of
each is delayed. The rate of transfers is nearly right, but varies. So a link is slow if the larger
of its two rates is below half of what other links surely carry.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from ddpbench.records.schema import Finding
from ddpbench.watch.window import Link

SLOW = 0.5  # of the usual rate; less is slow
BUSY = 0.1  # of the time: a link that is used less does not slow the job down
COMPARABLE = 1 / 16  # of the bytes of the link that carried most


@dataclass(frozen=True)
class SlowLink:
    """A host, all of whose links are slow, or the link from one host to another.

    hosts: one, or sender and receiver; ways: "sends", "receives" or "sends and receives", for a
    host; rates are those of one connection, in bytes per second, while data was on its way.
    """

    hosts: tuple[str, ...]
    interface: str
    ways: str
    bytes_per_second: float
    usual_bytes_per_second: float
    busy_share: float


def judge_links(links: Iterable[Link], hosts: Container[str], seconds: float) -> list[Finding]:
    """Return a finding for each slow host and link, the slowest first; see `find_slow_links`."""
    return [_finding(slow) for slow in find_slow_links(links, hosts, seconds)]


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
    usual = _upper_quartile([link.nbytes / link.busy_seconds for link in links])
    limit = SLOW * usual
    used = (link for link in links if link.busy_seconds >= BUSY * seconds)
    slow = [link for link in used if find_rate(link) < limit]
    found = []
    for host in sorted({end for link in slow for end in (link.host, link.peer)}):
        ways, whole = _find_slow_ways(host, links, slow)
        if whole:
            found.append(_describe((host,), ways, whole, usual, seconds))
            slow = [link for link in slow if link not in whole]
    found += [_describe((link.host, link.peer), "", [link], usual, seconds) for link in slow]
    return sorted(found, key=lambda each: each.bytes_per_second)


def _find_slow_ways(
    host: str, links: Sequence[Link], slow: Sequence[Link]
) -> tuple[str, Sequence[Link]]:
    """Return in which direction all links of a host are slow, to two others or more, and these."""
    sends = [link for link in links if link.host == host]
    receives = [link for link in links if link.peer == host]
    ways = {"sends and receives": sends + receives, "sends": sends, "receives": receives}
    for way, its in ways.items():
        others = {end for link in its for end in (link.host, link.peer)} - {host}
        if len(others) > 1 and all(link in slow for link in its):
            return way, its
    return "", []


def _describe(
    hosts: tuple[str, ...], ways: str, links: Sequence[Link], usual: float, seconds: float
) -> SlowLink:
    interfaces = {link.interface for link in links if link.host == hosts[0]}
    return SlowLink(
        hosts,
        interfaces.pop() if len(interfaces) == 1 else "",
        ways,
        sum(map(find_rate, links)) / len(links),
        usual,
        min(1.0, max(link.busy_seconds for link in links) / seconds) if seconds else 1.0,
    )


def _finding(slow: SlowLink) -> Finding:
    first, *rest = slow.hosts
    interface = f" ({slow.interface})" if slow.interface else ""
    rate, usual = _format(slow.bytes_per_second), _format(slow.usual_bytes_per_second)
    figures = (
        f"{rate} while data is on its way; other links of the job carry {usual}. "
        f"{'It is' if rest else 'Its links are'} in use {slow.busy_share:.0%} of the time"
    )
    measure = "to measure it, run under the job's launcher: python -m ddpbench.doctor --only links"
    place: dict[str, object] = {"hosts": list(slow.hosts), "interface": slow.interface}
    if not rest:
        sentence = f"slow host: {first}{interface} {slow.ways} {figures}"
        check = f"on {first}, check speed and errors of its interface (ethtool, ip -s link)"
        return Finding("warning", "slow-host", sentence, f"{check}; {measure}", place)
    sentence = f"slow link: the link from {first}{interface} to {rest[0]} carries {figures}"
    return Finding("warning", "slow-link", sentence, measure, place)


def _format(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def find_rate(link: Link) -> float:
    """Return what a link carried while data was on its way, in bytes per second."""
    return link.nbytes / min(link.busy_seconds, link.transfer_seconds or link.busy_seconds)


def _upper_quartile(values: Sequence[float]) -> float:
    """Return one of the values: of two or three the largest."""
    return sorted(values)[math.ceil(0.75 * len(values)) - 1]
