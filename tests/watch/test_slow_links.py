"""Which link, or host, is slow: from what links carried."""

import re
from collections.abc import Iterable

import pytest
from frozen import Frozen
from msgspec import structs

from ddpbench.watch.judging.slow_links import find_slow_links
from ddpbench.watch.window import Link

FAST, SLOW, SECONDS = 100e6, 11e6, 10.0
HOSTS = ["host0", "host1", "host2", "host3"]
RING = [(1, 0), (2, 1), (3, 2), (0, 3)]
MESH = [(a, b) for a in range(4) for b in range(4) if a != b]


def link(ends: tuple[int, int], rate: float, nbytes: float = 1e8) -> Link:
    """A link that carried so much at this rate."""
    sender, receiver = (f"host{end}" for end in ends)
    return Link(sender, receiver, "eth0", round(nbytes), nbytes / rate, 0.001, 0)


def find(links: Iterable[Link]) -> list[tuple[list[str], str]]:
    """The slow hosts and links among these, with what they do slowly, and at which rate in MB/s."""
    findings = find_slow_links(links, HOSTS, SECONDS)
    ways = [re.findall(r"(sends|receives|carries) ([0-9.]+) MB/s", f.sentence) for f in findings]
    return [
        (finding.place["hosts"], " and ".join(" ".join(way) for way in found))
        for finding, found in zip(findings, ways, strict=True)
    ]


def carry(
    ends: Iterable[tuple[int, int]], slow: Iterable[tuple[int, int]], rate: float = FAST
) -> list[Link]:
    """Links of which some are slow."""
    return [link(each, SLOW if each in slow else rate) for each in ends]


def test_one_link_of_a_ring_is_slow(frozen: Frozen) -> None:
    """The link is named with sender, receiver, both rates and its use, also where the
    acknowledgements of bursts are delayed; a healthy ring, whose bursts vary by 40 %, has none."""
    frozen.findings(find_slow_links(carry(RING, [(2, 1)]), HOSTS, SECONDS))
    busy = zip(RING, (0.8, 0.12, 0.24, 0.7), strict=True)
    links = [
        structs.replace(link(ends, FAST * share), transfer_seconds=0.9) for ends, share in busy
    ]
    links[1] = structs.replace(links[1], transfer_seconds=8.0)
    assert find(links) == [(["host2", "host1"], "carries 12")]
    bursts = zip(RING, (1.0, 0.8, 0.6, 0.9), strict=True)
    assert find(link(ends, FAST * share) for ends, share in bursts) == []


SENDS = [ends for ends in MESH if ends[0] == 3]  # links of host3
HEALTHY = [link(ends, FAST) for ends in MESH if 2 not in ends]
# Of host2: what it sends slowly, and what only looks slow because acknowledgements queue behind it.
SENT = [structs.replace(link((2, x), SLOW), transfer_seconds=0.7e8 / SLOW) for x in (1, 3)]
DELAYED = [
    structs.replace(link((x, 2), 1.6 * SLOW), transfer_seconds=1e8 / 3 / SLOW) for x in (0, 3)
]
BACKWARDS = [structs.replace(k, host=k.peer, peer=k.host) for k in (*HEALTHY, *DELAYED, *SENT)]


# By name: the links, and the slow hosts and links with what they do slowly.
CASES: dict[str, tuple[list[Link], list[tuple[list[str], str]]]] = {
    "ring": (carry(RING, [(2, 1), (3, 2)]), [(["host2"], "sends 11 and receives 11")]),
    "chain": (carry(RING[:3], [(2, 1), (1, 0)]), [(["host1"], "sends 11 and receives 11")]),
    "one direction": (carry(MESH, SENDS), [(["host3"], "sends 33")]),
    "both directions": (
        carry(MESH, [ends for ends in MESH if 3 in ends]),
        [(["host3"], "sends 33 and receives 33")],
    ),
    "a host and a link": (
        carry(MESH, [*SENDS, (1, 0)]),
        [(["host3"], "sends 33"), (["host1", "host0"], "carries 11")],
    ),
    "a delayed link": ([*HEALTHY, DELAYED[0], SENT[0]], [(["host2", "host1"], "carries 11")]),
    "delayed receives": ([*HEALTHY, *DELAYED, *SENT], [(["host2"], "sends 22")]),
    "delayed sends": (BACKWARDS, [(["host2"], "receives 22")]),
    "two rates": (
        [*HEALTHY, *SENT, link((0, 2), 1.5 * SLOW)],
        [(["host2"], "sends 22 and receives 16.5")],
    ),
    "two hosts": (carry([(0, 1), (1, 0)], [(0, 1)]), [(["host0", "host1"], "carries 11")]),
    "all equally slow": (carry(RING, RING), []),
    "one link": (carry(RING[:1], RING), []),
    "rarely used": ([*carry(RING, []), link((2, 0), SLOW, 7e6)], []),
    "out of the job": (
        [*carry(RING, []), Link("host0", "192.0.2.9", "eth0", 10**8, 9.0, 0.001, 0)],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_slow_hosts_and_links_are_named(case: str) -> None:
    """A host whose links are all slow is blamed alone, in the directions that are slow, with the
    rate over all its links. Links that cannot be compared or do not matter are no finding."""
    links, slow = CASES[case]
    assert find(links) == slow


def test_a_host_whose_links_are_all_slow_is_blamed_alone(frozen: Frozen) -> None:
    frozen.findings(find_slow_links(carry(MESH, SENDS), HOSTS, SECONDS))
