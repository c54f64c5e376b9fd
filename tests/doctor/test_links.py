"""Links: who meets whom, what is slow and what it is told as, and what ranks measure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import Frozen
from rank_pool import RankPool
from simulated_gpu import GUARD_VARIABLE
from simulated_hosts import payload

from ddpbench.doctor.links import judge, measure
from ddpbench.doctor.links.judge import Again, Cell, Places, Suspect
from ddpbench.doctor.links.measure import plan_schedule
from ddpbench.present.writers.text import lay_out
from ddpbench.records.schema import Finding

FAST, SLOW = 117.7e6, 11.77e6


def net(
    count: int,
    ends: Mapping[int, float] | None = None,
    pairs: Mapping[tuple[int, int], float] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> dict[Cell, float]:
    """What ends carry of which some are slow, and some links, one way each; log-normal noise."""
    drawn, slow = np.random.default_rng(seed), ends or {}
    return {
        cell: min(*(slow.get(end, FAST) for end in cell), (pairs or {}).get(cell, FAST))
        * float(np.exp(drawn.normal(0, noise)))
        for cell in itertools.permutations(range(count), 2)
    }


def blamed(rates: Mapping[Cell, float], spread: float = 0.0) -> list[tuple[int, ...]]:
    """The ends of each suspect."""
    return [each.ends for each in judge.find_suspects(rates, spread)]


# --- who meets whom -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 8, 17])
def test_in_a_circle_each_meets_each_once_and_one_at_a_time(count: int) -> None:
    """n - 1 rounds of an even number of ends, n of an odd one, and no end twice in one."""
    rounds = judge.plan_circle(range(count))
    assert len(rounds) == count - 1 + count % 2
    assert all(len({end for pair in its for end in pair}) == 2 * len(its) for its in rounds)
    met = sorted(tuple(sorted(pair)) for its in rounds for pair in its)
    assert met == list(itertools.combinations(range(count), 2))


@pytest.mark.parametrize("count", [2, 5, 16, 100])
def test_halves_meet_across_their_cut(count: int) -> None:
    """In as many rounds as the ends can be halved, no end twice in one; from 16 ends on each meets
    three at least, among which a slow link does not make it a slow end."""
    depths = judge.halve(range(count))
    rounds = [[pair for cut in cuts for pair in judge.pair_across(cut)] for cuts in depths]
    assert len(rounds) == int(np.ceil(np.log2(count)))
    assert all(len({end for pair in its for end in pair}) == 2 * len(its) for its in rounds)
    partners = [sum(end in pair for its in rounds for pair in its) for end in range(count)]
    assert min(partners) >= (3 if count >= 16 else 1)


def test_a_course_measures_hosts_where_ranks_are_too_many(frozen: Frozen) -> None:
    """All ranks where their pairs are few enough; else a rank of each host; else halves: with what
    is left out, and the cost of the rest."""
    hosts = [range(first, first + 4) for first in range(0, 80, 4)]
    ranks = plan_schedule(hosts, "rank", 3160, 15, 0.2)
    assert (len(ranks.ends), ranks.pairs, ranks.kind, ranks.unchecked) == (80, 3160, "ranks", ())
    between = plan_schedule(hosts, "rank", 190, 15, 0.2)
    assert (between.ends[:3], between.pairs, between.kind) == ((0, 4, 8), 190, "hosts")
    halved = plan_schedule(hosts, "host", 100, 15, 0.2)
    assert (len(halved.rounds), halved.alone(0), len(halved.at_once())) == (5, [], 10)
    four = plan_schedule([[0], [1], [2], [3]], "rank", 120, 15, 0.2)
    assert sorted(cell for (cell,) in four.alone(7)) == [*itertools.permutations(range(4), 2)]
    for each in (ranks, between, halved, four):
        frozen.text("\n".join((each.cost, *each.unchecked)))


# --- what is slow ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4, 20])
def test_a_slow_host_is_told_from_a_slow_link(count: int) -> None:
    """One of three hosts already; nothing where all are alike."""
    assert blamed(net(count, noise=0.05)) == []
    assert blamed(net(count, {count - 1: SLOW}, noise=0.03)) == [(count - 1,)]
    pair = {(0, 1): SLOW, (1, 0): SLOW}
    assert blamed(net(count, {}, pair, noise=0.03)) == [(0, 1)]


def test_several_slow_ones_are_all_found() -> None:
    """A slow host beside a slow link; two slow hosts of four; a slow link to a slow host is no more
    than that; a link that is slower than its slow host is."""
    pair = {(0, 1): SLOW, (1, 0): SLOW}
    assert blamed(net(4, {3: SLOW}, pair)) == [(3,), (0, 1)]
    assert blamed(net(4, {2: SLOW, 3: SLOW})) == [(2,), (3,)]
    assert blamed(net(4, {0: SLOW}, pair)) == [(0,)]
    assert blamed(net(4, {0: SLOW}, {(0, 1): SLOW / 4})) == [(0,), (0, 1)]


def test_one_way_may_be_slow() -> None:
    """Of a host its sending, of a link the way there; of two hosts only that can be seen."""
    sends = {(3, other): SLOW for other in range(3)}
    (host,) = judge.find_suspects(net(4, {}, sends))
    assert (host.ends, host.ways, set(host.cells)) == ((3,), "sends", set(sends))
    (link,) = judge.find_suspects(net(4, {}, {(2, 1): SLOW}))
    assert (link.ends, link.ways) == ((1, 2), "receives")
    (of_two,) = judge.find_suspects({(0, 1): FAST, (1, 0): SLOW})
    assert (of_two.ends, of_two.ways) == ((0, 1), "receives")
    assert judge.find_suspects({(0, 1): FAST, (1, 0): FAST * 0.9}) == []


def test_rates_that_vary_are_suspicious_only_far_outside() -> None:
    """Loopback on few cores varies by 2 to 3 ×: few such matrices have a suspect, which is cleared
    when it is measured again. What single bursts vary by counts too."""
    found = [blamed(net(count, noise=0.4, seed=s)) for count in (3, 4, 8) for s in range(200)]
    assert sum(map(bool, found)) <= 90
    pair = {(0, 1): FAST / 2, (1, 0): FAST / 2}
    assert blamed(net(4, {}, pair), 0.05) == [(0, 1)]
    assert blamed(net(4, {}, pair), 0.3) == []
    assert blamed(net(4, {3: SLOW}), 0.9) == [(3,)]


def test_ranks_are_judged_within_their_hosts() -> None:
    """A slow rank of two makes no slow host, and a slow host no slow ranks."""
    host = {rank: rank - rank % 2 for rank in range(8)}
    rates = net(8, {3: SLOW})
    assert blamed(judge.combine_hosts(rates, host)) == []
    assert blamed(judge.compare_with_hosts(rates, host)) == [(3,)]
    rates = net(8, {2: SLOW, 3: SLOW})
    assert blamed(judge.combine_hosts(rates, host)) == [(2,)]
    assert blamed(judge.compare_with_hosts(rates, host)) == []


def test_pairs_that_are_slow_across_a_cut_become_one() -> None:
    """All between two halves; where one of them is healthy, each stays what it is."""
    cuts = [cut for depth in judge.halve(range(8)) for cut in depth]
    cells = [way for cut in cuts for a, b in judge.pair_across(cut) for way in ((a, b), (b, a))]
    slow = {way for a, b in judge.pair_across(cuts[0]) for way in ((a, b), (b, a))}
    rates = {cell: SLOW if cell in slow else FAST for cell in cells}
    (whole,) = judge.merge_cuts(judge.find_suspects(rates), cuts)
    assert (whole.one, whole.other) == ((0, 1, 2, 3), (4, 5, 6, 7))
    rates[0, 7] = rates[7, 0] = FAST
    single = judge.merge_cuts(judge.find_suspects(rates), cuts)
    assert sorted(each.ends for each in single) == [(1, 6), (2, 5), (3, 4)]


def test_a_suspicion_is_measured_again_beside_healthy_links() -> None:
    """Of the same hosts first, and never beside another suspicion; the link of a slow host beside
    that host's others."""
    rates = net(5, {4: SLOW}, {(0, 1): SLOW, (1, 0): SLOW})
    host, link = found = judge.find_suspects(rates)
    slow, healthy = judge.choose_cells(link, rates, found)
    assert sorted(slow) == [(0, 1), (1, 0)]
    assert len(healthy) == judge.MOST_BESIDE
    assert {0, 1} <= {end for cell in healthy for end in cell}
    assert not {cell for cell in healthy if 4 in cell or set(cell) == {0, 1}}
    slow, healthy = judge.choose_cells(host, rates, found)
    assert all(4 in cell for cell in slow)
    assert all(rates[cell] == FAST for cell in healthy)
    rates = net(4, {0: SLOW}, {(0, 1): SLOW / 4})
    _, link = found = judge.find_suspects(rates)
    assert judge.choose_cells(link, rates, found) == ([(0, 1)], [(0, 2), (0, 3)])
    two = {(0, 1): FAST, (1, 0): SLOW}
    (only,) = found = judge.find_suspects(two)
    assert judge.choose_cells(only, two, found) == ([(1, 0)], [(0, 1)])
    alone = Suspect((0,), (), ((0, 1),), 0.1)
    assert judge.choose_cells(alone, {(0, 1): SLOW}, [alone]) == ([(0, 1)], [])


def test_only_what_is_slow_each_time_is_confirmed() -> None:
    """Five times, its best cell against the best healthy one; a time at which the healthy are slow
    too says nothing, and ten times are enough."""
    suspect = Suspect((0,), (1,), ((0, 1), (1, 0)), 0.1)

    def again(*times: tuple[float, float]) -> Again:
        seen = Again(suspect, [(0, 1), (1, 0)], [(0, 2), (2, 0)], FAST)
        for slow, others in times:
            seen.add({(0, 1): 0.9 * slow, (1, 0): slow, (0, 2): 0.8 * others, (2, 0): others})
        return seen

    true, loaded = (SLOW, FAST), (SLOW, FAST / 2)
    seen = again(*[true] * 5)
    assert (seen.confirmed, seen.cleared, seen.decided) == (True, False, True)
    assert seen.slow_rate == SLOW
    assert seen.others_rate == FAST
    assert not again(*[true] * 4).decided
    assert again(true, (FAST, FAST)).cleared
    assert again(true, (FAST, FAST / 2)).cleared
    assert not again(true, (FAST / 2, FAST / 2)).cleared
    assert not again(*[true] * 4, *[loaded] * 5).decided
    assert again(*[true] * 4, *[loaded] * 5, true).confirmed
    given_up = again(*[true] * 4, *[loaded] * 6)
    assert (given_up.decided, given_up.confirmed, given_up.cleared) == (True, False, False)


# --- what is told ---------------------------------------------------------------------------------

PLACES = Places({0: "a", 1: "b", 2: "c", 3: "d"}, ethernet=True, nominal={0: 125e6, 1: 125e6})


def told(
    kind: str, one: int, *other: int, cells: tuple[Cell, ...] = ((0, 1), (1, 0)), two: bool = False
) -> Finding:
    """The finding of a suspicion that was confirmed five times."""
    seen = Again(Suspect((one,), other, cells, 0.1, kind), [], [], FAST, [[SLOW]] * 5, [[FAST]] * 5)
    return judge.describe_slow(seen, PLACES, two)


def test_a_slow_link_names_both_hosts_a_slow_host_one(frozen: Frozen) -> None:
    """With the rate, that of the others, and of which Ethernet it is all."""
    link = told("host", 0, 1)
    one_way = told("host", 0, 1, cells=((1, 0),), two=True)
    host, rank = told("host", 3), told("rank", 3)
    neighbours = told("neighbour", 0, 1), told("neighbour", 0)
    frozen.findings([link, one_way, host, rank, *neighbours])


def test_a_rate_is_that_of_an_ethernet() -> None:
    """TCP over full frames of 1500 bytes carries 1448 of 1538; jumbo frames carry more."""
    for bits in (1e8, 1e9, 2.5e9):
        assert PLACES.line_rate(payload(bits)) == pytest.approx(bits)
    assert (replace(PLACES, mtu_nbytes=9000).line_rate(payload(1e9)) or 1e9) < 0.96e9


def test_links_below_half_of_the_nominal_speed_are_a_note(frozen: Frozen) -> None:
    """Where that of all interfaces is known, and no link reaches it."""
    frozen.findings(judge.find_below_nominal({(0, 1): 50e6, (1, 0): 60e6}, PLACES))
    assert judge.find_below_nominal({(0, 1): 50e6, (1, 0): 63e6}, PLACES) == []
    assert judge.find_below_nominal({(0, 1): 50e6, (0, 2): 50e6}, PLACES) == []
    assert judge.find_below_nominal({}, PLACES) == []


def test_a_line_tells_what_a_class_of_links_carries(frozen: Frozen) -> None:
    """Median, least and most; a class that is not there has no line."""
    cells = [[0, 1, 100e6, 50e6, 1e-4], [1, 0, 200e6, 80e6, 3e-4]]
    frozen.text("\n".join(measure.summarise("between hosts", cells)))
    frozen.text("\n".join(measure.summarise("within", [[0, 1, None, 50e6, 1e-4]])))
    assert measure.summarise("within", []) == []


def shown(count: int, host: Callable[[int], str], at_once: float | None = 50e6) -> list[str]:
    """The text of the tables of an examination in which rank 1 to 0 was the slowest way."""
    cells = [
        [a, b, 1e6 if (a, b) == (1, 0) else 100e6, at_once, 1e-4]
        for a, b in itertools.permutations(range(count), 2)
    ]
    kind = "hosts" if len({host(rank) for rank in range(count)}) == count else "ranks"
    ends = [[rank, host(rank)] for rank in range(count)]
    figures = {"ends": ends, "kind": kind, "halved": False, "cells": cells}
    return [f"{one.title}\n{lay_out(one)}" for one in measure.build_tables(figures, "gloo")]


def test_few_links_are_shown_as_a_matrix_many_by_their_slowest(frozen: Frozen) -> None:
    """Rows send to columns."""
    carried, waits = shown(3, lambda rank: f"h{rank}")
    (row,) = (line.split() for line in carried.splitlines() if line.startswith("h1"))
    assert " ".join(row) == "h1 1 / 50 - 100 / 50"
    assert waits.count("100") == 6
    (alone, _) = shown(2, lambda _: "h", None)
    assert "rank 1" in alone
    (slowest,) = shown(12, lambda rank: f"h{rank // 2}")
    assert slowest.splitlines()[3].split() == ["1", "h0", "0", "h0", "1", "50", "100"]
    frozen.text("\n".join(text.splitlines()[0] for text in (carried, alone, slowest)))


# --- ranks ----------------------------------------------------------------------------------------


def examine_links(pool: RankPool, world_size: int, cwd: Path, *words: str) -> dict[str, Any]:
    """The examination of links that these ranks make, as it is stored."""
    done = pool.call(
        world_size, cwd, "doctor", "--only", "links", "--backend", "gloo", "--case-time", "1",
        "--format", "json", *words,
    )  # fmt: skip
    assert done.returncode == 0, done
    (examination,) = json.loads(done.stdout)["examinations"]
    return dict(examination)


def test_four_ranks_measure_all_their_links(pool: RankPool, tmp_path: Path) -> None:
    """Every way alone and all at once; within a host nothing is judged."""
    its = examine_links(pool, 4, tmp_path)
    cells = its["figures"]["cells"]
    assert [cell[:2] for cell in cells] == [list(c) for c in itertools.permutations(range(4), 2)]
    assert all(min(cell[2:]) > 0 for cell in cells)
    assert its["findings"] == []
    assert len(its["told"]) == 3
    assert its["unchecked"] == []


def test_more_links_than_max_pairs_are_halved(
    pool: RankPool, tmp_path: Path, frozen: Frozen
) -> None:
    """Only across the cuts, all at once; how many were left out is told."""
    its = examine_links(pool, 4, tmp_path, "--max-pairs", "5")
    assert {tuple(cell[:2]) for cell in its["figures"]["cells"] if cell[0] < cell[1]} == {
        (0, 3), (1, 2), (0, 1), (2, 3),
    }  # fmt: skip
    assert {cell[2] for cell in its["figures"]["cells"]} == {None}
    frozen.text("\n".join(its["unchecked"]))


def test_where_there_is_no_link_nothing_is_measured(
    pool: RankPool, tmp_path: Path, frozen: Frozen
) -> None:
    """One rank; --by host on one host."""
    for words in ((1,), (2, "--by", "host")):
        its = examine_links(pool, words[0], tmp_path, *words[1:])
        assert (its["findings"], its["figures"]) == ([], {})
        frozen.text("\n".join(its["unchecked"]))


VIRTUAL_GPU = """
import os
os.environ["{variable}"] = "{guard}"
import pretend_gpu
import torch.distributed as dist
from dataclasses import replace
from ddpbench.catalog import backends
from ddpbench.runtime import devices

class Clock:  # of a GPU that takes 1 ns for a byte; everything else takes it 1 ms
    ns = 0

class Event:
    def record(self):
        self.ns = Clock.ns

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return (later.ns - self.ns) * 1e-6

def count(module, name, cost_ns):
    call = getattr(module, name)
    def counted(*args, **options):
        Clock.ns += cost_ns(*args)
        return call(*args, **options)
    setattr(module, name, counted)

connected, barrier = [], dist.barrier

def connect(*args, **options):
    connected.append(options.get("group"))
    return barrier(*args, **options)

def cost_ns(ops):
    assert ops[0].group in connected
    assert ops[0].tensor.is_cuda
    return 1_000_000 * (len(ops) - 1) + ops[0].tensor.nbytes

dist.barrier = connect
kind = devices.KINDS["cuda"]
kind.event = lambda device: Event()
count(dist, "batch_isend_irecv", cost_ns)
for module, name in ((dist, "send"), (dist, "recv"), (dist, "all_gather"), (kind, "sleep")):
    count(module, name, lambda *args: 1_000_000)
backends.BACKENDS["gloo"] = replace(backends.BACKENDS["gloo"], transport="links")
"""


@pytest.mark.thorough
def test_on_a_gpu_only_one_message_and_its_confirmation_are_timed(
    cuda_guard: Path, tmp_path: Path
) -> None:
    """Not the order, not the wait for the peer, not the hosts between many messages: what a slow
    host takes is no part of a link. In each round one of three ranks has no peer, and nccl needs
    all ranks for the first operation of a group: that is a barrier."""
    virtual = VIRTUAL_GPU.format(variable=GUARD_VARIABLE, guard=cuda_guard)
    (tmp_path / "virtual_gpu.py").write_text(virtual)
    ranks = RankPool()
    try:
        its = examine_links(ranks, 3, tmp_path, "--import", "virtual_gpu", "--device", "cuda")
    finally:
        ranks.close()
    cells = its["figures"]["cells"]
    assert len(cells) == 6
    assert [cell[2] for cell in cells] == pytest.approx([1e9] * 6, rel=1e-3)
    assert [cell[4] for cell in cells] == pytest.approx([8e-9] * 6)
