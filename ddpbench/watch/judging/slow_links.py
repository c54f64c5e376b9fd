"""Slow links and hosts, from what the job's own connections carried. Pure, no torch.

In a ring every link carries the same bytes, and all ranks wait for the slowest, which is busy while
the others carry in bursts. The last acknowledgement of a burst is delayed, so a fast link may look
slow by its busy time, and its rate of transfers varies. A link is slow if the larger of the two
rates is below half of what other links surely carry. Findings and tables state the rate of busy
time, which is right for a slow link, because its bursts are long.

Where one direction of a host is slow, the acknowledgements of what it carries in the other one
queue behind that, so these links seem slow too. They are no finding.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from ddpbench.analysis.rates import upper_quartile
from ddpbench.records.schema import Finding
from ddpbench.records.wording import format_rate, list_all
from ddpbench.watch.window import Link

SLOW = 0.5  # of the usual rate; less is slow
BUSY = 0.1  # of the time: a link that is used less does not slow the job down
COMPARABLE = 1 / 16  # of the bytes of the link that carried most
MEASURE = (
    "check speed and errors of the interface (ethtool, ip -s link); to measure it, run under the "
    "job's launcher: python -m ddpbench.doctor --only links"
)


def find_slow_links(links: Iterable[Link], hosts: Container[str], seconds: float) -> list[Finding]:
    """Return a finding for each slow link, and for each host whose links are all slow.

    links: of all hosts of the job; those to others, as to a file server, are left out. hosts: by
    name. seconds: in which they carried this. With all links equally slow, none is.
    """
    links = [k for k in links if k.busy_seconds > 0 and k.peer in hosts and k.peer != k.host]
    most = max((link.nbytes for link in links), default=0)
    links = [link for link in links if link.nbytes >= COMPARABLE * most]
    if len(links) < 2:
        return []
    usual = upper_quartile(map(find_rate, links))
    slow = [k for k in links if k.busy_seconds >= BUSY * seconds]
    slow = [link for link in slow if _find_highest_rate(link) < SLOW * usual]
    slow = [link for link in slow if not _waits_for_answers(link, links, slow)]
    findings = []
    for host in sorted({end for link in slow for end in (link.host, link.peer)}):
        ends = {
            "sends": [link for link in links if link.host == host],
            "receives": [link for link in links if link.peer == host],
        }
        ways = {name: way for name, way in ends.items() if way and all(k in slow for k in way)}
        others = {end for way in ways.values() for link in way for end in (link.host, link.peer)}
        if len(others - {host}) > 1:
            findings.append(_describe([host], ways, usual, seconds))
            slow = [link for link in slow if not any(link in way for way in ways.values())]
    rest = [_describe([link.host, link.peer], {"carries": [link]}, usual, seconds) for link in slow]
    return findings + rest


def _waits_for_answers(link: Link, links: Sequence[Link], slow: Sequence[Link]) -> bool:
    """Return whether a link only looks slow: its acknowledgements queue on a slower way."""
    ways = (
        [k for k in links if k.host == link.peer],
        [k for k in links if k.peer == link.host],
        [k for k in links if k.host == link.peer and k.peer == link.host],
    )
    limit = SLOW * _find_highest_rate(link)
    return any(way and all(k in slow and find_rate(k) < limit for k in way) for way in ways)


def _describe(
    hosts: list[str], ways: Mapping[str, Sequence[Link]], usual: float, seconds: float
) -> Finding:
    """Return the finding on a host, or on the link from one to another; ways: its slow links."""
    links = [link for way in ways.values() for link in way]
    interfaces = {link.interface for link in links if link.host == hosts[0]}
    interface = interfaces.pop() if len(interfaces) == 1 else ""
    rates = {
        name: sum(k.nbytes for k in way) / max(k.busy_seconds for k in way)
        for name, way in ways.items()
    }
    busy = min(1.0, max(link.busy_seconds for link in links) / seconds) if seconds else 1.0
    name = f"{hosts[0]} ({interface})" if interface else hosts[0]
    figures = list_all(f"{way} {format_rate(rate)}" for way, rate in rates.items())
    place: dict[str, object] = {"hosts": hosts, "interface": interface}
    code, subject = "slow-link", f"slow link: the link from {name} to {hosts[-1]}"
    if len(hosts) == 1:
        code, subject = "slow-host", f"slow host: over all its links, {name}"
        place["bytes_per_second"] = rates
    sentence = (
        f"{subject} {figures} while data is on its way; other links of the job carry "
        f"{format_rate(usual)}. In use {busy:.0%} of the time"
    )
    return Finding("warning", code, sentence, MEASURE, place)


def find_rate(link: Link) -> float:
    """Return what a link carried while data was on its way, in bytes per second of busy time."""
    return link.nbytes / link.busy_seconds


def _find_highest_rate(link: Link) -> float:
    return link.nbytes / min(link.busy_seconds, link.transfer_seconds or link.busy_seconds)
