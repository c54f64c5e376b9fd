"""Windows come from all ranks to rank 0, whoever dies or stops, and nobody waits for long."""

from __future__ import annotations

import itertools
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_ranks import HERE, Job, Place, a_window, open_job
from msgspec import structs
from patience import PATIENCE_SECONDS, wait_until
from simulated_hosts import Hosts
from slept_time import SleptTime

from ddpbench.hang.status_board import StoreClient
from ddpbench.watch import transport
from ddpbench.watch.transport import SIZE, TOKEN_NBYTES, Inbox, Transport, connect, send
from ddpbench.watch.window import Window, encode, join

NAME, TOKEN, SECOND = socket.gethostname(), b"t" * TOKEN_NBYTES, 10**9
HOUR_NS = 3600 * SECOND


@pytest.fixture(autouse=True)
def _be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine and its store take long to answer, in forked ranks too."""
    monkeypatch.setattr(transport, "CONNECT_SECONDS", PATIENCE_SECONDS)
    ask = StoreClient.request
    monkeypatch.setattr(
        StoreClient, "request", lambda client, _, function: ask(client, PATIENCE_SECONDS, function)
    )


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Inbox, tuple[str, int]]]:
    """An inbox whose clock is an hour ahead, and its address."""
    for name in ("ANSWER_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(transport, name, PATIENCE_SECONDS)
    server = socket.create_server(("127.0.0.1", 0))
    target = server.getsockname()
    made = Inbox(server, TOKEN, lambda: time.time_ns() + HOUR_NS)
    yield made, target
    made.close()


def deliver(target: tuple[str, int], number: int, window: Window) -> None:
    """Send a window of a round."""
    with connect(target, TOKEN, time.time_ns) as (connection, ahead):
        send(connection, structs.replace(window, number=number))
    assert ahead.least_ns <= HOUR_NS <= ahead.most_ns


def settle(job: Job, ranks: dict[str, list[int]], without: tuple[int, ...] = ()) -> None:
    """Make rounds until rank 0 hears of these ranks of each host, all with the same steps."""

    def is_settled() -> bool:
        first = job.round(*without)[0]
        return first is not None and first.hosts == ranks and first.first_step == job.step

    wait_until(is_settled, f"a round with {ranks}")


def test_ranks_report_to_rank_0_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a FileStore nothing but the job's token is ever written to the file. The file
    outlives a restart of the job, as torchrun's store does: ranks of the second attempt find
    the second token. The last windows of all ranks are heard when they end together."""
    monkeypatch.setattr(transport, "LAST_SECONDS", PATIENCE_SECONDS)
    file = tmp_path / "store"
    first, again = (Place(environ={"TORCHELASTIC_RESTART_COUNT": n}) for n in "01")
    with open_job(first, first, where=str(file)) as job:
        settle(job, {NAME: [0, 1]})
        size = file.stat().st_size
        settle(job, {NAME: [0, 1]})
        assert file.stat().st_size == size
        with open_job(again, again, again, where=str(file)) as second:
            settle(second, {NAME: [0, 1, 2]})
            settle(job, {NAME: [0, 1]})
            end = second.round(last=True)[0]
            assert end is not None
            assert (end.hosts, end.last) == ({NAME: [0, 1, 2]}, True)


@pytest.mark.thorough
def test_a_stopped_rank_comes_back() -> None:
    """It is left out meanwhile, and so is a killed one."""
    with open_job(HERE, HERE, HERE) as job:
        settle(job, {NAME: [0, 1, 2]})
        job.ranks[1].signal(signal.SIGSTOP)
        settle(job, {NAME: [0, 2]}, without=(1,))
        job.ranks[1].signal(signal.SIGCONT)
        settle(job, {NAME: [0, 1, 2]})
        job.ranks[2].signal(signal.SIGKILL)
        settle(job, {NAME: [0, 1]}, without=(2,))


@pytest.mark.thorough
def test_hosts_report_to_rank_0(hosts: Callable[..., Hosts]) -> None:
    """Rank 0 hears of all hosts. While a rank is stopped or killed, no other stops; the store may
    go; without rank 0 all ranks end."""
    bench = hosts(3)
    places = [Place(bench[n // 2].namespace, bench[n // 2].name) for n in range(6)]
    with open_job(*places, address=bench[0].address) as job:
        settle(job, {"host1": [0, 1], "host2": [2, 3], "host3": [4, 5]})
        job.ranks[2].signal(signal.SIGKILL)
        settle(job, {"host1": [0, 1], "host2": [3], "host3": [4, 5]}, without=(2,))
        job.ranks[5].signal(signal.SIGSTOP)
        job.round(2, 5)
        job.ranks[5].signal(signal.SIGCONT)
        settle(job, {"host1": [0, 1], "host2": [3], "host3": [4, 5]}, without=(2,))
        assert job.store is not None
        job.store.signal(signal.SIGKILL)
        settle(job, {"host1": [0, 1], "host2": [3], "host3": [4, 5]}, without=(2,))
        job.ranks[0].signal(signal.SIGKILL)
        job.round(0, 2, last=True)
        for number, rank in enumerate(job.ranks):
            if number not in (0, 2):
                rank.pipe.send(None)
                assert rank.answer() == "closed"


def test_a_stranger_is_not_believed(
    box: tuple[Inbox, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no token, or no window behind it, is ignored, and a silent one hinders nobody."""
    own, target = box
    monkeypatch.setattr(transport, "IDLE_SECONDS", 0.3)
    with socket.create_connection(target), socket.create_connection(target) as other:
        other.sendall(b"x" * 100)
        wrong = connect(target, b"u" * len(TOKEN), time.time_ns)
        with pytest.raises(ConnectionError), wrong:
            pass
        monkeypatch.setattr(transport, "IDLE_SECONDS", PATIENCE_SECONDS)
        with connect(target, TOKEN, time.time_ns) as (connection, _):
            connection.sendall(SIZE.pack(3) + b"xyz")
        deliver(target, 7, a_window(1, 3))
        assert [each.ranks for each in own.collect(7, 1, PATIENCE_SECONDS)] == [[1]]


def test_an_inbox_waits_for_its_ranks_as_long_as_it_may(
    box: tuple[Inbox, tuple[str, int]],
) -> None:
    """Until all have sent, else the time that it was given; a window counts once, in its own round
    alone, and at the job's end only last windows are waited for. The last window of a rank is
    returned once, whatever its round, and its rank is not waited for again."""
    own, target = box
    for sent, number, count, last, found in (
        (7, 7, 2, False, 1),
        (7, 8, 1, False, 0),
        (8, 8, 1, True, 1),
        (9, 8, 1, False, 0),
    ):
        deliver(target, sent, a_window(1, 3))
        wait_until(lambda: own._windows, "the window")
        began = time.monotonic()
        assert len(own.collect(number, count, 0.05, last)) == found
        assert 0.05 <= time.monotonic() - began < PATIENCE_SECONDS
    assert len(own.collect(9, 1, PATIENCE_SECONDS)) == 1
    last = a_window(2, 3, last=True, facts={2: {"gc_seconds": 1.0}})
    deliver(target, 6, last)
    (window,) = own.collect(10, 1, PATIENCE_SECONDS)
    assert encode(window) == encode(structs.replace(last, number=6))
    assert own.collect(11, 1, PATIENCE_SECONDS) == []


def test_rounds_begin_at_multiples_of_the_period() -> None:
    """A moment after them, so that no clock is before; and not twice, though a clock is set back.
    A rank that is alone gets its own window, whatever its store is."""
    now_ns: int = 1_700_000_000 * SECOND + 3 * SECOND
    alone = Transport(dist.HashStore(), "", 0, 1, now_ns=lambda: now_ns)
    for number in (1, 2):
        now_ns += round(alone.seconds_to_round() * SECOND)
        round_ = alone.begin_round()
        assert round_ == (340_000_000 + number, (1_700_000_000 + 5 * number) * SECOND)
        (host,) = alone.exchange(a_window(0, number))
        assert (host.hosts, host.first_step) == ({NAME: [0]}, number)
    now_ns -= SECOND
    late_by = 2 * transport.AFTER_SECONDS
    assert alone.seconds_to_round() == pytest.approx(transport.PERIOD + 1, abs=late_by)
    alone.close()


def test_rounds_begin_by_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host whose clock is an hour behind; its stamps are corrected by as much. A clock
    that was set is learned anew."""
    for name in ("ANSWER_SECONDS", "IDLE_SECONDS", "ROUND_SECONDS"):
        monkeypatch.setattr(transport, name, PATIENCE_SECONDS)
    store, ahead_ns, windows = dist.HashStore(), HOUR_NS, []
    # Each look takes 10 us, so that all happens at the beginning of one round.
    stamps = itertools.count(1_700_000_000 * SECOND, 10_000)
    clocks = [lambda: next(stamps), lambda: next(stamps) - ahead_ns]
    ranks = [Transport(store, "watch", n, 2, now_ns=clock) for n, clock in enumerate(clocks)]
    ranks[1]._host = "another"  # the ranks of one host have one clock
    for _ in range(2):
        for number in range(3):
            assert ranks[1].exchange(a_window(1, number)) == []
            windows.append(join(ranks[0].exchange(a_window(0, number))))
        first, second = (rank.begin_round() for rank in ranks)
        assert first.number == second.number
        assert abs(first.began_ns - second.began_ns - ahead_ns) < SECOND / 10
        ahead_ns = 2 * HOUR_NS
    assert [window.ranks for window in windows] == [[0, 1]] * 6
    for rank in ranks:
        rank.close()


def test_a_job_that_rank_0_never_publishes_costs_a_short_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a last window waits for it."""
    store, clock = dist.HashStore(), SleptTime()
    monkeypatch.setattr(transport, "time", clock)
    lost = Transport(store, "watch/1", 1, 2)
    for last in (False, True):
        began = clock.now
        assert lost.exchange(a_window(1, 0, last)) == []
        assert (clock.now - began >= transport.STORE_SECONDS) == last
    lost.close()
