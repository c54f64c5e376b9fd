"""What the windows of ranks and hosts say together: calls are matched, the slowest ranks are passed
on, and messages stay as large as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from ddpbench.watch.gather.joining import join_hosts, join_ranks
from ddpbench.watch.window import (
    BLOCKED,
    CALLS,
    COLUMNS,
    HOST_CALLS,
    LINKS,
    RANKS,
    ROUND_RANKS,
    STEPS,
    JoinedCall,
    Link,
    Window,
    encode,
    make_window,
)

EPOCH = 1_700_000_000 * 10**9
MS = 10**6
STEP = np.array([1, 10, 20, 3, 1, 5]) * 1e-3  # seconds: what every healthy rank needs
STEP_NS = 100 * MS
NONE = np.empty((0, COLUMNS), np.float32)


def a_call(rank: int, number: int, ns: int, step: int = -1, group: str = "world") -> JoinedCall:
    """A call as one rank arrived at it."""
    return JoinedCall(group, number, "all_reduce", 64, step, ns, ns, ns, rank)


@dataclasses.dataclass
class Simulated:
    """A job of equal steps, in each of which ranks meet three times.

    late: ns by which a rank comes late to the first call of each step; ahead: of a rank's clock.
    """

    late: Callable[[int], int] = lambda rank: 0
    ahead: Callable[[int], int] = lambda rank: 0
    first: int = 100
    steps: int = STEPS
    group: Callable[[int], str] = lambda rank: "world"

    def window(self, rank: int, first: int | None = None) -> Window:
        """What a rank sends."""
        first = self.first if first is None else first
        calls = []
        for step in range(first, first + self.steps):
            begin = EPOCH + step * STEP_NS + self.ahead(rank)
            calls += [
                a_call(rank, 3 * step, begin + self.late(rank), step, group=self.group(rank)),
                a_call(rank, 3 * step + 1, begin + 60 * MS, step, group=self.group(rank)),
                a_call(rank, 3 * step + 2, begin + 70 * MS, step, group=self.group(rank)),
            ]
        ended = EPOCH + (first + self.steps) * STEP_NS + self.ahead(rank)
        rows = np.tile(STEP, (self.steps, 1)).astype(np.float32)
        return make_window(rank, first, rows, ended, calls[-CALLS:])

    def host(self, ranks: Sequence[int], name: str = "one") -> Window:
        """The joined windows of some ranks."""
        windows = [self.window(rank) for rank in ranks]
        return join_ranks(windows, name, ["10.0.0.9"], -self.ahead(ranks[0]))


def test_arrivals_of_ranks_are_joined() -> None:
    """Rank 3 comes last to a call: it is named, with the first arrival and the last but one."""
    round_ = join_hosts([Simulated(late=lambda rank: 50 * MS * (rank == 3)).host(range(8))])
    call = round_.calls[-3]
    assert (call.last_rank, call.ranks, call.operation) == (3, 8, "all_reduce")
    assert (call.last_ns - call.first_ns, call.last_ns - call.second_ns) == (50 * MS, 50 * MS)
    assert len(round_.rows) == 8
    assert np.allclose(round_.least_blocked, STEP[BLOCKED])


def test_arrivals_of_hosts_are_joined_by_the_clock_of_rank_0() -> None:
    """Rank 9 is late, on the second host, whose clock is 5 ms ahead."""
    job = Simulated(
        late=lambda rank: 50 * MS * (rank == 9), ahead=lambda rank: 5 * MS if rank >= 8 else 0
    )
    round_ = join_hosts([job.host(range(8, 16), "two"), job.host(range(8))])
    assert list(round_.hosts) == ["one", "two"]
    call = round_.calls[-3]
    assert (call.last_rank, call.ranks, call.last_ns - call.second_ns) == (9, 16, 50 * MS)
    assert call.first_ns == EPOCH + call.step * STEP_NS
    assert round_.ended_ns == EPOCH + (100 + STEPS) * STEP_NS


def test_groups_are_matched_by_name_and_number() -> None:
    """Ranks of different groups do not meet, even in calls of the same number."""
    job = Simulated(late=lambda rank: 50 * MS * (rank == 3), group=lambda rank: f"pair {rank // 2}")
    round_ = join_hosts([job.host(range(8)), job.host(range(8, 16), "two")])
    late = {call.last_rank for call in round_.calls if call.last_ns > call.first_ns}
    assert late == {3}
    assert {call.ranks for call in round_.calls} == {2}


def test_windows_are_joined_over_the_steps_that_all_have() -> None:
    """Windows that begin and end at different steps are cut, and a rank that has stopped long ago
    hides nobody's steps."""
    job = Simulated()
    windows = [job.window(0, first=100), job.window(1, first=103), job.window(2, first=10)]
    host = join_ranks(windows, "one")
    assert (host.first_step, len(host.least_blocked)) == (103, STEPS - 3)
    assert host.ranks == [0, 1]
    other = join_ranks([job.window(3, first=110)], "two")
    round_ = join_hosts([host, other])
    assert (round_.first_step, len(round_.least_blocked)) == (110, STEPS - 10)
    assert {len(rows) for rows in round_.rows.values()} == {STEPS - 10}


def test_a_rank_that_has_ended_stays_one_of_its_host() -> None:
    """Ranks without steps are listed once they have ended, and cost the others none of theirs."""
    job = Simulated()
    windows = [
        job.window(0),
        make_window(1, 0, NONE, EPOCH, last=True),
        make_window(2, 0, NONE, EPOCH),
    ]
    host = join_ranks(windows, "one")
    assert (host.ranks, list(host.rows)) == ([0, 1], [0])
    assert len(host.medians["one"]) == STEPS


def test_a_host_passes_on_its_newest_calls() -> None:
    """Of more calls than fit, the newest remain, and all steps."""
    round_ = join_hosts([Simulated(group=lambda rank: f"alone {rank}").host(range(8))])
    assert len(round_.calls) == HOST_CALLS
    assert min(call.step for call in round_.calls) == 100 + STEPS - 1 - HOST_CALLS // (8 * 3)
    assert len(round_.least_blocked) == STEPS


@pytest.mark.parametrize("phase", range(BLOCKED))
def test_the_slowest_ranks_are_passed_on(phase: int) -> None:
    """Of 64 noisy ranks these are among the few passed on, in any phase: one that is always 5 %
    late, one that is late in every fifth step only, and the one that is blocked least."""
    noise = np.random.default_rng(phase)
    windows = []
    for rank in range(64):
        rows = STEP * noise.normal(1, 0.02, (STEPS, COLUMNS))
        rows[:, phase] += {11: 0.05, 22: 0.0}.get(rank, 0.0) * STEP.sum()
        if rank == 22:
            rows[::5, phase] += 0.2 * STEP.sum()
        if rank == 33:
            rows[:, BLOCKED] *= 0.8
        windows.append(make_window(rank, 0, rows.astype(np.float32), EPOCH))
    host = join_ranks(windows, "one")
    assert len(host.rows) == RANKS
    assert {11, 22, 33} <= host.rows.keys()
    assert host.ranks == [*range(64)]


def test_rows_of_some_ranks_are_passed_on() -> None:
    """Of more ranks than fit, those of ROUND_RANKS; the medians of all hosts."""
    job = Simulated()
    hosts = [job.host(range(8 * n, 8 * n + 8), f"host {n}") for n in range(48)]
    round_ = join_hosts(hosts)
    assert len(round_.rows) == ROUND_RANKS
    assert len(round_.medians) == len(round_.hosts) == 48
    assert round_.hosts["host 1"] == list(range(8, 16))


def test_links_of_a_host_are_added_and_named() -> None:
    """Connections of several ranks to one peer are one link; a peer is named by its address unless
    two hosts have that address."""
    link = Link("", "10.0.0.2", "eth0", 1000, 0.5, 0.001, 1)
    bridge = Link("", "172.17.0.1", "docker0", 10, 0.5, 0.001, 0)
    windows = [
        make_window(rank, 0, NONE, EPOCH, facts={"gc_seconds": rank}, links=[link, bridge])
        for rank in range(2)
    ]
    one = join_ranks(windows, "one", ["10.0.0.1", "172.17.0.1"])
    two = join_ranks([make_window(2, 0, NONE, EPOCH)], "two", ["10.0.0.2", "172.17.0.1"])
    round_ = join_hosts([one, two])
    links = {(each.host, each.peer): (each.nbytes, each.retransmitted) for each in round_.links}
    assert links == {("one", "two"): (2000, 2), ("one", "172.17.0.1"): (20, 0)}
    assert round_.facts[1] == {"gc_seconds": 1}
    assert round_.hosts == {"one": [0, 1], "two": [2]}


def test_a_job_without_steps_still_has_calls() -> None:
    """Ranks that only call collectives, without an optimizer, report their calls."""
    windows = [make_window(rank, 0, NONE, EPOCH, [a_call(rank, 1, EPOCH)]) for rank in range(2)]
    round_ = join_hosts([join_ranks(windows, "one")])
    assert (len(round_.least_blocked), round_.rows, round_.medians) == (0, {}, {})
    assert [call.ranks for call in round_.calls] == [2]


def test_messages_do_not_grow_with_steps_or_ranks() -> None:
    """A host of 64 ranks at step a million sends as much as one of eight ranks at step 100, but for
    the digits of its numbers, and no more than a socket takes; so does a rank."""
    sizes = []
    for first, count in ((100, 8), (1_000_000, 8), (1_000_000, 64)):
        job = Simulated(first=first)
        links = [Link("", f"10.0.{n}.1", "eth0", 1, 0.1, 0.1, 0) for n in range(LINKS + 4)]
        windows = [
            msgspec.structs.replace(job.window(rank), links=links[n % 4 :][:LINKS])
            for n, rank in enumerate(range(16384 - count, 16384))
        ]
        host = join_ranks(windows, "host", [f"10.0.0.{n}" for n in range(LINKS)])
        sizes.append((len(encode(windows[0])), len(encode(host))))
    ranks, hosts = zip(*sizes, strict=True)
    assert max(ranks) - min(ranks) <= CALLS * 8
    assert max(ranks) < 40_000
    assert max(hosts) - min(hosts) <= HOST_CALLS * 8
    assert max(hosts) < 50_000
