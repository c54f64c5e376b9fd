"""What the windows of ranks say together: calls are matched, steps are cut, and messages
stay as large as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs

from ddpbench.watch.window import CALLS, LINKS, STEPS, JoinedCall, Link, Window, encode, join, shift

EPOCH = 1_700_000_000 * 10**9
MS = 10**6
STEP = np.array([1, 10, 20, 3, 1, 5]) * 1e-3  # seconds: what every healthy rank needs
STEP_NS = 100 * MS


def a_call(rank: int, number: int, ns: int, step: int = -1, group: str = "world") -> JoinedCall:
    """A call as one rank arrived at it."""
    return JoinedCall(group, number, "all_reduce", 64, step, ns, 0, ns, rank)


def without_steps(rank: int, host: str = "one", **known: Any) -> Window:
    """The window of a rank without steps."""
    return Window(7, {host: [rank]}, EPOCH, **known)


def a_window(
    rank: int,
    *,
    host: str = "one",
    group: str = "world",
    first: int = 100,
    late_ns: int = 0,
    ahead_ns: int = 0,
) -> Window:
    """The window of a rank with equal steps, in each of which ranks meet three times.

    late_ns: by which the rank comes late to the first call of each step; ahead_ns: of its clock.
    """
    calls = []
    for step in range(first, first + STEPS):
        begin = EPOCH + step * STEP_NS + ahead_ns
        for index, ns in enumerate((late_ns, 60 * MS, 70 * MS)):
            calls.append(a_call(rank, 3 * step + index, begin + ns, step, group))
    ended = EPOCH + (first + STEPS) * STEP_NS + ahead_ns
    rows = np.tile(STEP, (STEPS, 1)).astype(np.float32)
    return Window(7, {host: [rank]}, ended, first, {rank: rows}, calls[-CALLS:])


def test_arrivals_are_joined_by_the_clock_of_rank_0() -> None:
    """Rank 9 comes last to a call, on the second host, whose clock is 5 ms ahead: it is named, with
    the first arrival and the last but one."""
    late = {9: 50 * MS, 8: 20 * MS}
    own = [
        a_window(rank, host="two", late_ns=late.get(rank, 0), ahead_ns=5 * MS)
        for rank in range(8, 16)
    ]
    round_ = join([*(shift(window, -5 * MS) for window in own), *map(a_window, range(8))])
    assert (list(round_.hosts), len(round_.rows), round_.steps) == (["one", "two"], 16, STEPS)
    call = round_.calls[-3]
    assert (call.last_rank, call.ranks, call.last_ns - call.second_ns) == (9, 16, 30 * MS)
    assert call.first_ns == EPOCH + call.step * STEP_NS
    assert round_.ended_ns == EPOCH + (100 + STEPS) * STEP_NS


def test_groups_are_matched_by_name_and_number() -> None:
    """Ranks of different groups do not meet, even in calls of the same number."""
    round_ = join(
        [a_window(n, group=f"pair {n // 2}", late_ns=50 * MS * (n == 3)) for n in range(16)]
    )
    late = {call.last_rank for call in round_.calls if call.last_ns > call.first_ns}
    assert late == {3}
    assert {call.ranks for call in round_.calls} == {2}


def test_windows_are_joined_over_the_steps_that_all_have() -> None:
    """Windows that begin and end at different steps are cut. A rank that has stopped long ago, or
    has no steps, hides nobody's, but is one of its host."""
    windows = [a_window(rank, first=first) for rank, first in enumerate((100, 103, 10))]
    round_ = join([*windows, without_steps(3, last=True), a_window(4, first=110, host="two")])
    assert (round_.first_step, list(round_.rows)) == (110, [0, 1, 4])
    assert {len(rows) for rows in round_.rows.values()} == {STEPS - 10}
    assert (round_.hosts, round_.last) == ({"one": [0, 1, 2, 3], "two": [4]}, False)


def test_links_of_a_host_are_added_and_named() -> None:
    """Connections of several ranks to one peer are one link; a peer is named by its address unless
    two hosts have that address."""
    link = Link("one", "10.0.0.2", "eth0", 1000, 0.5, 0.001, 1)
    bridge = Link("one", "172.17.0.1", "docker0", 10, 0.5, 0.001, 0)
    addresses = ["10.0.0.1", "172.17.0.1"]
    windows = [
        without_steps(
            rank, facts={rank: {"gc_seconds": rank}}, links=[link, bridge], addresses=addresses
        )
        for rank in range(2)
    ]
    round_ = join([*windows, without_steps(2, "two", addresses=["10.0.0.2", "172.17.0.1"])])
    links = {(each.host, each.peer): (each.nbytes, each.retransmitted) for each in round_.links}
    assert links == {("one", "two"): (2000, 2), ("one", "172.17.0.1"): (20, 0)}
    assert round_.facts[1] == {"gc_seconds": 1}


def test_a_job_without_steps_still_has_calls() -> None:
    """Ranks that only call collectives, without an optimizer, report their calls."""
    windows = [without_steps(rank, calls=[a_call(rank, 1, EPOCH)]) for rank in range(2)]
    round_ = join(windows)
    assert (round_.steps, round_.rows) == (0, {})
    assert [call.ranks for call in round_.calls] == [2]


def test_messages_do_not_grow_with_steps() -> None:
    """At step a million, a rank sends as much as at step 100, but for the digits of its numbers."""
    sizes = []
    for first in (100, 1_000_000):
        links = [Link("one", f"10.0.{n}.1", "eth0", 1, 0.1, 0.1, 0) for n in range(LINKS)]
        window = structs.replace(a_window(16383, first=first), links=links)
        sizes.append(len(encode(window)))
    assert abs(sizes[1] - sizes[0]) <= CALLS * 8
    assert max(sizes) < 40_000
