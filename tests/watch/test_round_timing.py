"""When rounds begin and how long a rank waits in them, by a clock that the test moves."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest
import torch.distributed as dist
from fake_clock import EPOCH_NS, SECOND, FakeClock
from forked_ranks import a_window

from ddpbench.watch.gather import mailbox, offsets, transport
from ddpbench.watch.gather.host_reports import HostReports, Job
from ddpbench.watch.gather.joining import join_ranks
from ddpbench.watch.gather.mailbox import JOIN_SECONDS, MISSED, SEND_SECONDS, Mailbox
from ddpbench.watch.gather.transport import AFTER_SECONDS, PERIOD, Transport

PERIOD_NS = round(PERIOD * SECOND)
AFTER_NS = round(AFTER_SECONDS * SECOND)
PREFIX = "watch/1/0"  # of the keys of a job that was never restarted


pytestmark = pytest.mark.usefixtures("patient_store")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close at the end what a test opens."""
    with ExitStack() as stack:
        yield stack


def open_mailboxes(stack: ExitStack, clock: FakeClock, ranks: int) -> list[Mailbox]:
    """Return the mailboxes of a host; the first leads."""
    token = os.urandom(16)
    boxes = [stack.enter_context(closing(Mailbox(token, ranks, clock))) for _ in range(ranks)]
    assert boxes[0].lead()
    return boxes


def collect(
    leader: Mailbox, clock: FakeClock, number: int, last: bool = False
) -> tuple[set[int], float]:
    """Return the ranks in a round, and how long the leader waited for them."""
    began = clock.monotonic()
    windows = leader.collect(number, a_window(0, number, last), 0)
    return {window.ranks[0] for window in windows}, clock.monotonic() - began


# --- on a host ------------------------------------------------------------------------------------


def test_a_leader_waits_for_its_ranks_as_long_as_it_may(stack: ExitStack, clock: FakeClock) -> None:
    """Until all have sent, else JOIN_SECONDS, and LAST_SECONDS at the end. What comes later counts
    in no round."""
    leader, one, two = open_mailboxes(stack, clock, 3)
    clock.after(0.1, lambda: one.send(7, a_window(1, 7)))
    clock.after(0.3, lambda: two.send(7, a_window(2, 7)))
    assert collect(leader, clock, 7) == ({0, 1, 2}, pytest.approx(0.3))
    one.send(8, a_window(1, 8))
    clock.after(JOIN_SECONDS + 0.1, lambda: two.send(8, a_window(2, 8)))
    assert collect(leader, clock, 8) == ({0, 1}, pytest.approx(JOIN_SECONDS))
    clock.sleep(1)
    one.send(9, a_window(1, 9))
    assert collect(leader, clock, 9) == ({0, 1}, pytest.approx(JOIN_SECONDS))
    clock.after(mailbox.LAST_SECONDS - 0.1, lambda: one.send(10, a_window(1, 10, last=True)))
    ranks, seconds = collect(leader, clock, 10, last=True)
    assert (ranks, seconds) == ({0, 1}, pytest.approx(mailbox.LAST_SECONDS))


def test_a_rank_that_has_missed_some_rounds_is_not_waited_for(
    stack: ExitStack, clock: FakeClock
) -> None:
    """Nor one that the launcher counts and that never sent, after the first round; nor one that has
    ended. A rank that comes back is in the round again, and waited for in the next ones."""
    leader, one = open_mailboxes(stack, clock, 2)
    assert collect(leader, clock, 1) == ({0}, pytest.approx(JOIN_SECONDS))
    assert collect(leader, clock, 2) == ({0}, 0)
    one.send(3, a_window(1, 3))
    assert collect(leader, clock, 3) == ({0, 1}, 0)
    waits = [collect(leader, clock, number)[1] for number in range(4, 4 + MISSED)]
    assert waits == [pytest.approx(JOIN_SECONDS)] * (MISSED - 1) + [0]
    number = 4 + MISSED
    one.send(number, a_window(1, number))
    assert collect(leader, clock, number) == ({0, 1}, 0)
    clock.after(0.1, lambda: one.send(number + 1, a_window(1, number + 1, last=True)))
    assert collect(leader, clock, number + 1) == ({0, 1}, pytest.approx(0.1))
    assert collect(leader, clock, number + 2, last=True) == ({0, 1}, 0)


def test_a_rank_gives_up_a_window_that_its_leader_does_not_take(
    stack: ExitStack, clock: FakeClock
) -> None:
    """Once the queue of a leader that reads nothing is full, a window is lost after SEND_SECONDS,
    and the rank does not take the lead. The next window comes."""
    leader, one = open_mailboxes(stack, clock, 2)
    one._socket.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            one._socket.sendto(b"x", leader._name)
    assert one.send(7, a_window(1, 7))
    assert one._socket.gettimeout() == SEND_SECONDS
    assert collect(leader, clock, 7) == ({0}, pytest.approx(JOIN_SECONDS))
    assert one.send(8, a_window(1, 8))
    assert collect(leader, clock, 8) == ({0, 1}, 0)


# --- rounds ---------------------------------------------------------------------------------------


def open_transport(stack: ExitStack, clock: FakeClock, rank: int) -> tuple[Transport, HostReports]:
    """Return the transport of one of two ranks, and the reports in its store as the other's."""
    store = dist.HashStore()
    stack.callback(lambda: store)  # a transport does not keep it
    reports = stack.enter_context(closing(HostReports(store, PREFIX)))
    if rank:
        reports.publish_job(Job(os.urandom(16), ["192.0.2.1"], port=1))
    opened = Transport(store, "watch/1", rank, 2, clock=clock)
    if rank == 0:
        assert reports.read_job() is not None
    return stack.enter_context(closing(opened)), reports


def test_rounds_begin_at_multiples_of_the_period(stack: ExitStack, clock: FakeClock) -> None:
    """A moment after them, so that no clock is before; and not twice, though a clock is set back.
    A rank that is alone gets its own window, whatever its store is."""
    alone = stack.enter_context(closing(Transport(dist.HashStore(), "", 0, 1, clock=clock)))
    clock.sleep(3.2)
    for number in (1, 2):
        clock.sleep(alone.seconds_to_round())
        assert clock.now_ns() == EPOCH_NS + number * PERIOD_NS + AFTER_NS
        (host,) = alone.exchange(a_window(0, number))
        assert (host.ranks, host.first_step) == ([0], number)
        assert [*host.hosts] == [socket.gethostname()]
    clock.ahead_ns -= SECOND
    assert alone.seconds_to_round() == pytest.approx(PERIOD + 1, abs=2 * AFTER_SECONDS)


def test_rounds_begin_by_the_clock_of_rank_0(stack: ExitStack, clock: FakeClock) -> None:
    """A host whose clock is ahead begins when rank 0 does; one whose clock is behind sends later by
    as much, up to 0.1 s, as its ranks cut their windows by their own clock."""
    rank_1, _ = open_transport(stack, clock, 1)
    assert rank_1.exchange(a_window(1, 0)) == []  # it leads a host of its own
    box = rank_1._mailbox
    assert box is not None
    for ahead, later in ((2.0, 0.0), (-0.04, 0.04), (-2.0, 0.1)):
        box.ahead_ns = clock.ahead_ns = round(ahead * SECOND)
        clock.sleep(0.5)
        seconds = PERIOD - clock.passed_ns % PERIOD_NS / SECOND + later + AFTER_SECONDS
        assert rank_1.seconds_to_round() == pytest.approx(seconds)


def test_rank_0_gives_other_hosts_a_time_to_report(stack: ExitStack, clock: FakeClock) -> None:
    """From the start of a round it waits REPORT_SECONDS, once there is another host; the report
    that comes later is in no round. At the end, a host that has ended is heard."""
    rank_0, reports = open_transport(stack, clock, 0)

    def report(number: int, last: bool = False) -> None:
        joined = join_ranks([a_window(1, number, last)], "two")
        assert joined is not None
        reports.publish("boot/two", number, joined, 1)

    def exchange(number: int, last: bool = False) -> tuple[int, float]:
        clock.sleep(rank_0.seconds_to_round())
        began = clock.monotonic()
        hosts = rank_0.exchange(a_window(0, number, last))
        return len(hosts), clock.monotonic() - began

    first = EPOCH_NS // PERIOD_NS
    assert exchange(first) == (1, pytest.approx(JOIN_SECONDS))  # rank 1 might be on this host
    report(first)
    for number, after, count in ((1, 0.5, 2), (2, 0.7, 1), (3, 0.1, 2)):
        clock.after(rank_0.seconds_to_round() + after, lambda number=number: report(first + number))
        hosts, seconds = exchange(first + number)
        assert (hosts, seconds) == (count, pytest.approx(transport.REPORT_SECONDS))
    report(first + 4, last=True)
    assert exchange(first + 4, last=True)[0] == 2


def test_a_host_asks_again_for_the_time_a_minute_after_it_could_not(
    stack: ExitStack, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 that does not answer is left alone for RETRY_SECONDS; from then on it is asked in each
    round that it answers."""
    asked: list[int] = []
    stamp_ns = EPOCH_NS + 60 * SECOND
    answers = [None, *[np.array([[stamp_ns] * 3])] * 2]

    def ping(*_: object) -> object:
        asked.append(round(clock.monotonic()))
        return answers[len(asked) - 1]

    monkeypatch.setattr(offsets, "ping", ping)
    rank_1, _ = open_transport(stack, clock, 1)
    for number in range(14):
        clock.sleep(rank_1.seconds_to_round())
        rank_1.exchange(a_window(1, number))
    assert asked == [0, 60, 65]


def test_a_job_that_rank_0_never_publishes_costs_a_short_wait(
    stack: ExitStack, clock: FakeClock
) -> None:
    """Only a last window waits for it, MEET_SECONDS."""
    store = dist.HashStore()
    lost = stack.enter_context(closing(Transport(store, "watch/1", 1, 2, clock=clock)))
    for last, seconds in ((False, 0.0), (True, transport.MEET_SECONDS)):
        began = clock.monotonic()
        assert lost.exchange(a_window(1, 0, last)) == []
        assert clock.monotonic() - began == pytest.approx(seconds)
