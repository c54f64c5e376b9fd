"""Links: which pairs are measured, which link, host or rank is slow, and how it is reported."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import Frozen
from rank_pool import RankPool

from ddpbench.doctor.links import judge
from ddpbench.doctor.links.judge import Cell, Suspect
from ddpbench.doctor.links.measure import Reading, list_suspects, plan_circle, plan_schedule
from ddpbench.records.schema import Finding

FAST, SLOW = 117.7e6, 11.77e6


def a_network(
    count: int,
    ends: Mapping[int, float] | None = None,
    pairs: Mapping[tuple[int, int], float] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> dict[Cell, float]:
    """Return the rates between ends, some of which are slow, as some links are, with noise."""
    drawn, slow = np.random.default_rng(seed), ends or {}
    return {
        cell: min(*(slow.get(end, FAST) for end in cell), (pairs or {}).get(cell, FAST))
        * float(np.exp(drawn.normal(0, noise)))
        for cell in itertools.permutations(range(count), 2)
    }


def find_ends(rates: Mapping[Cell, float], spread: float = 0.0) -> list[tuple[int, ...]]:
    """Return the ends of each suspect."""
    return [each.ends for each in judge.find_suspects(rates, spread)]


# --- which pairs are measured ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 8, 17])
def test_in_a_circle_each_end_meets_every_other_once(count: int) -> None:
    """No end is in a round twice."""
    rounds = plan_circle(range(count))
    assert len(rounds) == count - 1 + count % 2
    assert all(len({end for pair in own for end in pair}) == 2 * len(own) for own in rounds)
    met = sorted(tuple(sorted(pair)) for own in rounds for pair in own)
    assert met == list(itertools.combinations(range(count), 2))


def test_with_many_pairs_hosts_are_measured_and_none_alone(frozen: Frozen) -> None:
    """With more pairs than --max-pairs, one rank of each host is measured. If these are too many as
    well, they only send all at once."""
    hosts = [range(first, first + 4) for first in range(0, 80, 4)]
    ranks = plan_schedule(hosts, "rank", 3160, 15)
    assert (len(ranks.ends), ranks.pairs, ranks.kind, ranks.unchecked) == (80, 3160, "ranks", ())
    between = plan_schedule(hosts, "rank", 190, 15)
    assert (between.ends[:3], between.pairs, between.kind) == ((0, 4, 8), 190, "hosts")
    at_once = plan_schedule(hosts, "host", 100, 15)
    assert (at_once.pairs, at_once.alone, len(at_once.at_once)) == (190, [], 38)
    four = plan_schedule([[0], [1], [2], [3]], "rank", 120, 15)
    assert sorted(cell for (cell,) in four.alone) == [*itertools.permutations(range(4), 2)]
    for each in (ranks, between, at_once, four):
        frozen.text("\n".join((each.cost, *each.unchecked)))


# --- what is slow ---------------------------------------------------------------------------------

BOTH_WAYS = {(0, 1): SLOW, (1, 0): SLOW}
HALF = {(0, 1): FAST / 2, (1, 0): FAST / 2}
# What is slow → (rates, spread of repeated measurements, ends of the suspects)
SLOW_NETWORKS = {
    **{
        f"{name} of {count}": (rates, 0.0, ends)
        for count in (3, 4, 20)
        for name, rates, ends in (
            ("none", a_network(count, noise=0.05), []),
            ("host", a_network(count, {count - 1: SLOW}, noise=0.03), [(count - 1,)]),
            ("link", a_network(count, {}, BOTH_WAYS, noise=0.03), [(0, 1)]),
        )
    },
    "host and link": (a_network(4, {3: SLOW}, BOTH_WAYS), 0.0, [(3,), (0, 1)]),
    "two hosts of four": (a_network(4, {2: SLOW, 3: SLOW}), 0.0, [(2,), (3,)]),
    "link of a slow host": (a_network(4, {0: SLOW}, {(0, 1): SLOW / 4}), 0.0, [(0,)]),
    "two hosts": ({(0, 1): FAST, (1, 0): SLOW}, 0.0, []),
    "half, steady": (a_network(4, {}, HALF), 0.05, [(0, 1)]),
    "half, unsteady": (a_network(4, {}, HALF), 0.3, []),
    "host, unsteady": (a_network(4, {3: SLOW}), 0.9, [(3,)]),
}


@pytest.mark.parametrize("name", SLOW_NETWORKS)
def test_slow_hosts_and_links_are_told_apart(name: str) -> None:
    rates, spread, ends = SLOW_NETWORKS[name]
    assert find_ends(rates, spread) == ends


def test_one_direction_can_be_slow() -> None:
    sends = {(3, other): SLOW for other in range(3)}
    (host,) = judge.find_suspects(a_network(4, {}, sends))
    assert (host.ends, host.ways, set(host.cells)) == ((3,), "sends", set(sends))
    (link,) = judge.find_suspects(a_network(4, {}, {(2, 1): SLOW}))
    assert (link.ends, link.ways) == ((1, 2), "receives")


def test_noise_is_seldom_suspicious() -> None:
    """Loopback on few cores varies by 2 to 3 ×. A suspect is cleared when it is measured again."""
    found = [
        find_ends(a_network(count, noise=0.4, seed=s)) for count in (3, 4, 8) for s in range(200)
    ]
    assert sum(map(bool, found)) <= 90


@pytest.mark.parametrize(
    ("slow", "suspects"),
    [({3: SLOW}, [("rank", (3,))]), ({2: SLOW, 3: SLOW}, [("host", (2,))])],
    ids=["one rank of two", "both ranks"],
)
def test_ranks_are_judged_within_their_hosts(
    slow: dict[int, float], suspects: list[tuple[str, tuple[int, ...]]]
) -> None:
    rates = a_network(8, slow)
    readings = {cell: Reading(rate, 1e-4, 0.0) for cell, rate in rates.items()}
    hosts = [[0, 1], [2, 3], [4, 5], [6, 7]]
    found = list_suspects(readings, hosts, "ranks", between_gpus=False)
    assert [(each.kind, each.ends) for each in found] == suspects


def test_links_within_a_host_are_judged_between_gpus() -> None:
    readings = {c: Reading(rate, 1e-4, 0.0) for c, rate in a_network(4, {}, BOTH_WAYS).items()}
    assert list_suspects(readings, [range(4)], "ranks", between_gpus=False) == []
    (link,) = list_suspects(readings, [range(4)], "ranks", between_gpus=True)
    assert (link.kind, link.ends, link.usual) == ("neighbour", (0, 1), FAST)


TRUE, LOADED = (SLOW, FAST), (SLOW, FAST / 2)


@pytest.mark.parametrize(
    ("measured", "is_slow"),
    [
        ([TRUE] * 4, None),
        ([TRUE] * 5, True),
        ([TRUE, (FAST, FAST)], False),
        ([TRUE, (FAST, FAST / 2)], False),
        ([TRUE, (FAST / 2, FAST / 2)], None),
        ([*[TRUE] * 4, *[LOADED] * 5], None),
        ([*[TRUE] * 4, *[LOADED] * 5, TRUE], True),
    ],
)
def test_only_what_is_slow_each_time_is_confirmed(
    measured: list[tuple[float, float]], is_slow: bool | None
) -> None:
    """A time at which the healthy links are slow as well does not count."""
    suspect = Suspect(0, 1, [(0, 1), (1, 0)], 0.1, usual=FAST, measured=measured)
    assert suspect.is_slow == is_slow


# --- what is reported -----------------------------------------------------------------------------

HOSTS = {0: "a", 1: "b", 2: "c", 3: "d"}


def report(
    kind: str,
    one: int,
    other: int | None = None,
    *,
    cells: tuple[Cell, ...] = ((0, 1), (1, 0)),
) -> Finding:
    """Return the finding of a suspect that was confirmed five times."""
    suspect = Suspect(one, other, cells, 0.1, kind, usual=FAST, measured=[TRUE] * 5)
    return judge.describe_slow(suspect, HOSTS)


def test_a_slow_link_names_both_hosts_a_slow_host_one(frozen: Frozen) -> None:
    """With its rate, and that of healthy links."""
    link = report("host", 0, 1)
    one_way = report("host", 0, 1, cells=((1, 0),))
    host, rank = report("host", 3), report("rank", 3)
    neighbours = report("neighbour", 0, 1), report("neighbour", 0)
    frozen.findings([link, one_way, host, rank, *neighbours])


def test_a_line_describes_a_class_of_links(frozen: Frozen) -> None:
    """Median, least and most."""
    cells = [[0, 1, 100e6, 50e6, 1e-4], [1, 0, 200e6, 80e6, 3e-4]]
    frozen.text("\n".join(judge.summarise("between hosts", cells)))
    frozen.text("\n".join(judge.summarise("within", [[0, 1, None, 50e6, 1e-4]])))
    assert judge.summarise("within", []) == []


# --- ranks ----------------------------------------------------------------------------------------


def examine_links(pool: RankPool, world_size: int, cwd: Path, *words: str) -> dict[str, Any]:
    """Return the examination of links by these ranks, as it is stored."""
    done = pool.call(
        world_size, cwd, "doctor", "--only", "links", "--backend", "gloo", "--case-time", "1",
        "--format", "json", *words,
    )  # fmt: skip
    assert done.returncode == 0, done
    (examination,) = json.loads(done.stdout)["examinations"]
    return dict(examination)


def test_four_ranks_measure_all_their_links(pool: RankPool, tmp_path: Path) -> None:
    """Every way alone and all at once; with more links than --max-pairs, only all at once. Links
    within a host are not judged."""
    examination = examine_links(pool, 4, tmp_path)
    cells = examination["figures"]["cells"]
    every_way = [list(cell) for cell in itertools.permutations(range(4), 2)]
    assert [cell[:2] for cell in cells] == every_way
    assert all(min(cell[2:]) > 0 for cell in cells)
    assert examination["findings"] == []
    assert len(examination["told"]) == 3
    assert examination["unchecked"] == []
    cells = examine_links(pool, 4, tmp_path, "--max-pairs", "5")["figures"]["cells"]
    assert [cell[:2] for cell in cells] == every_way
    assert {cell[2] for cell in cells} == {None}


def test_without_a_link_nothing_is_measured(pool: RankPool, tmp_path: Path, frozen: Frozen) -> None:
    """One rank; --by host on one host."""
    for words in ((1,), (2, "--by", "host")):
        examination = examine_links(pool, words[0], tmp_path, *words[1:])
        assert (examination["findings"], examination["figures"]) == ([], {})
        frozen.text("\n".join(examination["unchecked"]))
