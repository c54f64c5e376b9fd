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
    for each in (ranks, between, at_once):
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
    assert [each.ends for each in judge.find_suspects(rates, spread)] == ends


def test_one_direction_can_be_slow() -> None:
    sends = {(3, other): SLOW for other in range(3)}
    (host,) = judge.find_suspects(a_network(4, {}, sends))
    assert (host.ends, host.ways, set(host.cells)) == ((3,), "sends", set(sends))
    (link,) = judge.find_suspects(a_network(4, {}, {(2, 1): SLOW}))
    assert (link.ends, link.ways) == ((1, 2), "receives")


def test_noise_is_seldom_suspicious() -> None:
    """Loopback on few cores varies by 2 to 3 ×. A suspect is cleared when it is measured again."""
    networks = [a_network(count, noise=0.4, seed=s) for count in (3, 4, 8) for s in range(200)]
    assert sum(bool(judge.find_suspects(rates)) for rates in networks) <= 90


FOUR_HOSTS = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("hosts", "slow", "between_gpus", "suspects"),
    [
        (FOUR_HOSTS, {3: SLOW}, False, [("rank", (3,))]),
        (FOUR_HOSTS, {2: SLOW, 3: SLOW}, False, [("host", (2,))]),
        ([range(4)], BOTH_WAYS, False, []),
        ([range(4)], BOTH_WAYS, True, [("neighbour", (0, 1))]),
    ],
    ids=["one rank of two", "both ranks", "shared memory", "GPUs"],
)
def test_ranks_are_judged_within_their_hosts(
    hosts: Any, slow: Any, between_gpus: bool, suspects: list[tuple[str, tuple[int, ...]]]
) -> None:
    """Links within a host are judged between GPUs only."""
    count = sum(map(len, hosts))
    rates = a_network(count, slow) if hosts is FOUR_HOSTS else a_network(count, {}, slow)
    readings = {cell: Reading(rate, 1e-4, 0.0) for cell, rate in rates.items()}
    found = list_suspects(readings, hosts, "ranks", between_gpus=between_gpus)
    assert [(each.kind, each.ends) for each in found] == suspects


TRUE, LOADED = (SLOW, FAST), (SLOW, FAST / 2)


@pytest.mark.parametrize(
    ("measured", "is_slow"),
    [
        ([TRUE] * 4, None),
        ([TRUE] * 5, True),
        ([TRUE, (FAST, FAST / 2)], False),
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


def test_a_slow_link_names_both_hosts_a_slow_host_one(frozen: Frozen) -> None:
    """With its rate, and that of healthy links."""
    both, one_way = ((0, 1), (1, 0)), ((1, 0),)
    slow: list[tuple[str, int, int | None, tuple[Cell, ...]]] = [
        ("host", 0, 1, both),
        ("host", 0, 1, one_way),
        ("host", 3, None, both),
        ("rank", 3, None, both),
        ("neighbour", 0, 1, both),
        ("neighbour", 0, None, both),
    ]
    suspects = [
        Suspect(one, other, cells, 0.1, kind, usual=FAST, measured=[TRUE] * 5)
        for kind, one, other, cells in slow
    ]
    frozen.findings(judge.describe_slow(suspect, HOSTS) for suspect in suspects)


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
