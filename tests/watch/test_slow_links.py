"""Which link, or host, is slow: from what links carried."""

from collections.abc import Iterable

import pytest
from frozen import Frozen
from msgspec import structs

from ddpbench.watch.judging.slow_links import SlowLink, describe_slow_link, find_slow_links
from ddpbench.watch.window import Link

FAST, SLOW, SECONDS = 100e6, 11e6, 10.0
HOSTS = ["host0", "host1", "host2", "host3"]
RING = [(1, 0), (2, 1), (3, 2), (0, 3)]
MESH = [(a, b) for a in range(4) for b in range(4) if a != b]


def link(ends: tuple[int, int], rate: float, nbytes: float = 1e8) -> Link:
    """A link that carried so much at this rate."""
    sender, receiver = (f"host{end}" for end in ends)
    return Link(sender, receiver, "eth0", round(nbytes), nbytes / rate, 0.001, 0)


def find(links: Iterable[Link]) -> list[tuple[tuple[str, ...], str]]:
    """The slow hosts and links among these, with the directions that are slow."""
    return [
        (slow.hosts, " and ".join(slow.rates)) for slow in find_slow_links(links, HOSTS, SECONDS)
    ]


def carry(
    ends: Iterable[tuple[int, int]], slow: Iterable[tuple[int, int]], rate: float = FAST
) -> list[Link]:
    """Links of which some are slow."""
    return [link(each, SLOW if each in slow else rate) for each in ends]


def test_one_link_of_a_ring_is_slow(frozen: Frozen) -> None:
    """The link is named with sender, receiver, both rates and its use, also where the
    acknowledgements of bursts are delayed; a healthy ring, whose bursts vary by 40 %, has none."""
    (slow,) = find_slow_links(carry(RING, [(2, 1)]), HOSTS, SECONDS)
    rates = {"carries": pytest.approx(SLOW)}
    expected = SlowLink(("host2", "host1"), "eth0", rates, FAST, 1e8 / SLOW / SECONDS)
    assert slow == expected
    busy = zip(RING, (0.8, 0.12, 0.24, 0.7), strict=True)
    links = [
        structs.replace(link(ends, FAST * share), transfer_seconds=0.9) for ends, share in busy
    ]
    links[1] = structs.replace(links[1], transfer_seconds=8.0)
    assert find(links) == [(("host2", "host1"), "carries")]
    frozen.findings([describe_slow_link(slow)])
    bursts = zip(RING, (1.0, 0.8, 0.6, 0.9), strict=True)
    assert find(link(ends, FAST * share) for ends, share in bursts) == []


def test_a_host_whose_links_are_all_slow_is_blamed_alone(frozen: Frozen) -> None:
    """In a ring it has one link to each side, in a mesh also one direction may be slow."""
    assert find(carry(RING, [(2, 1), (3, 2)])) == [(("host2",), "sends and receives")]
    assert find(carry(RING[:3], [(2, 1), (1, 0)])) == [(("host1",), "sends and receives")]
    sends = [ends for ends in MESH if ends[0] == 3]
    assert find(carry(MESH, sends)) == [(("host3",), "sends")]
    assert find(carry(MESH, [ends for ends in MESH if 3 in ends])) == [
        (("host3",), "sends and receives")
    ]
    both = find(carry(MESH, [*sends, (1, 0)]))
    assert sorted(both) == [(("host1", "host0"), "carries"), (("host3",), "sends")]
    (slow,) = find_slow_links(carry(MESH, sends), HOSTS, SECONDS)
    frozen.findings([describe_slow_link(slow)])


def test_of_a_host_only_the_slow_direction_is_named() -> None:
    """The acknowledgements of what a host receives queue behind what it sends slowly, so both look
    slow. The rate is that of the slow direction alone, over all its links. Of two slow directions,
    both rates are named."""
    delayed = [
        structs.replace(link((x, 2), 1.6 * SLOW), transfer_seconds=1e8 / 3 / SLOW) for x in (0, 3)
    ]
    sends = [structs.replace(link((2, x), SLOW), transfer_seconds=0.7 * 1e8 / SLOW) for x in (1, 3)]
    healthy = [link(ends, FAST) for ends in MESH if 2 not in ends]
    (ring,) = find_slow_links([*healthy, delayed[0], sends[0]], HOSTS, SECONDS)
    assert (ring.hosts, ring.rates) == (("host2", "host1"), {"carries": pytest.approx(SLOW)})
    (mesh,) = find_slow_links([*healthy, *delayed, *sends], HOSTS, SECONDS)
    assert (mesh.hosts, mesh.rates) == (("host2",), {"sends": pytest.approx(2 * SLOW)})
    backwards = [structs.replace(k, host=k.peer, peer=k.host) for k in (*healthy, *delayed, *sends)]
    (mesh,) = find_slow_links(backwards, HOSTS, SECONDS)
    assert (mesh.hosts, mesh.rates) == (("host2",), {"receives": pytest.approx(2 * SLOW)})
    (both,) = find_slow_links([*healthy, *sends, link((0, 2), 1.5 * SLOW)], HOSTS, SECONDS)
    rates = {"sends": pytest.approx(2 * SLOW), "receives": pytest.approx(1.5 * SLOW)}
    assert (both.hosts, both.rates) == (("host2",), rates)


def test_what_cannot_be_compared_or_does_not_matter_is_no_finding() -> None:
    """All links are equally slow; a slow link is rarely used; it leads out of the job, as to a
    file server; there is no link at all."""
    assert find(carry(RING, RING)) == find([]) == find(carry(RING[:1], RING)) == []
    rare = [*carry(RING, []), link((2, 0), SLOW, 7e6)]
    assert find(rare) == []
    outside = Link("host0", "192.0.2.9", "eth0", 10**8, 9.0, 0.001, 0)
    assert find([*carry(RING, []), outside]) == []
    assert find(carry([(0, 1), (1, 0)], [(0, 1)])) == [(("host0", "host1"), "carries")]
