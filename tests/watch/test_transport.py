"""Windows come from all ranks to rank 0, whoever dies or stops, and nobody waits for long."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_ranks import HERE, Job, Place, a_window, open_job
from patience import PATIENCE_SECONDS, wait_until
from simulated_hosts import Hosts

from ddpbench.watch.gather import host_reports, mailbox
from ddpbench.watch.gather.host_reports import HostReports
from ddpbench.watch.gather.joining import join_hosts, join_ranks
from ddpbench.watch.gather.mailbox import Mailbox
from ddpbench.watch.window import Link, Window, decode, encode

NAME = socket.gethostname()
pytestmark = pytest.mark.usefixtures("patient_store")


def settle(job: Job, ranks: dict[str, list[int]], without: tuple[int, ...] = ()) -> None:
    """Make rounds until rank 0 hears of these ranks of each host, all with the same steps."""

    def is_settled() -> bool:
        first = job.round(*without)[0]
        return first is not None and first.ranks == ranks and len(first.first_steps) == 1

    wait_until(is_settled, f"a round with {ranks}")


def test_ranks_of_a_host_report_to_rank_0_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a FileStore on one host nothing but the job's token is ever written to the file. The
    file outlives a restart of the job, as torchrun's store does: ranks of the second attempt find
    the second token. The last windows of all ranks are heard when they end together."""
    monkeypatch.setattr(mailbox, "LAST_SECONDS", PATIENCE_SECONDS)
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
            assert (end.ranks, end.last) == ({NAME: [0, 1, 2]}, True)


@pytest.mark.thorough
def test_two_jobs_on_one_host_do_not_meet() -> None:
    """Two jobs with the same prefix and the same ranks, each with its own store, get their own
    ranks' windows only; a stopped rank is left out, and comes back; so is a killed one."""
    with open_job(HERE, HERE, HERE) as job, open_job(HERE, HERE) as other:
        settle(job, {NAME: [0, 1, 2]})
        settle(other, {NAME: [0, 1]})
        job.ranks[1].signal(signal.SIGSTOP)
        settle(job, {NAME: [0, 2]}, without=(1,))
        job.ranks[1].signal(signal.SIGCONT)
        settle(job, {NAME: [0, 1, 2]})
        job.ranks[2].signal(signal.SIGKILL)
        settle(job, {NAME: [0, 1]}, without=(2,))


@pytest.mark.thorough
def test_hosts_report_through_the_store(hosts: Callable[..., Hosts]) -> None:
    """Rank 0 hears of all hosts; when a leader is killed, another rank of its host takes over under
    the same key; while a rank is stopped, no other stops; and when the store's host has gone, rank
    0 still has its own host, and all ranks end."""
    bench = hosts(3)
    places = [Place(bench[n // 2].namespace, bench[n // 2].name) for n in range(6)]
    with open_job(*places, address=bench[0].address) as job:
        settle(job, {"host1": [0, 1], "host2": [2, 3], "host3": [4, 5]})
        job.ranks[2].signal(signal.SIGKILL)
        settle(job, {"host1": [0, 1], "host2": [3], "host3": [4, 5]}, without=(2,))
        job.ranks[5].signal(signal.SIGSTOP)  # it may be the leader, whose name is then taken
        job.round(2, 5)
        job.ranks[5].signal(signal.SIGCONT)
        settle(job, {"host1": [0, 1], "host2": [3], "host3": [4, 5]}, without=(2,))
        assert job.store is not None
        job.store.signal(signal.SIGKILL)
        settle(job, {"host1": [0, 1]}, without=(2,))
        job.round(2, last=True)
        for number, rank in enumerate(job.ranks):
            if number != 2:
                rank.pipe.send(None)
                assert rank.answer() == "closed"


def test_a_stranger_is_not_believed() -> None:
    """A datagram without the token, or with one and no window, is ignored."""
    leader = Mailbox(os.urandom(16), expected=2)
    assert leader.lead()
    assert not Mailbox(leader.token, 2).lead()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"x" * 100, leader.token, leader.token + b"y" * 50):
            stranger.sendto(data, leader._name)
    member = Mailbox(leader.token, 2)
    assert member.send(7, a_window(1, 3))
    windows = leader.collect(7, a_window(0, 3), ahead_ns=1234)
    assert [window.ranks for window in windows] == [[0], [1]]
    member.read_answers()
    assert member.ahead_ns == leader.ahead_ns == 1234
    leader.close()
    assert not member.send(8, a_window(1, 6))
    assert member.lead()
    member.close()


def test_what_an_ended_rank_sent_counts_once() -> None:
    """The last window of a rank is passed on whole once, then only that the rank has ended. That is
    so even if it came with the rank's window of the round before, which goes first."""
    leader = Mailbox(os.urandom(16), expected=3)
    assert leader.lead()
    early, late = Mailbox(leader.token, 3), Mailbox(leader.token, 3)
    last = [a_window(rank, 3, last=True, facts={"gc_seconds": 1.0}) for rank in (1, 2)]
    assert early.send(7, last[0])
    assert late.send(7, a_window(2, 3))
    assert late.send(7, last[1])
    rounds = [
        {each.ranks[0]: each for each in leader.collect(number, a_window(0, 3 * number), 0)}
        for number in (7, 8, 9)
    ]
    for mailbox_ in (leader, early, late):
        mailbox_.close()
    assert [each.keys() for each in rounds] == [{0, 1, 2}] * 3
    assert encode(rounds[0][1]) == encode(last[0])
    assert not rounds[0][2].last
    assert encode(rounds[1][2]) == encode(last[1])
    for ended in (rounds[1][1], rounds[2][1], rounds[2][2]):
        assert (ended.rows, len(ended.calls), ended.facts, ended.links) == ({}, 0, {}, [])
        assert ended.last
    host = join_ranks(list(rounds[1].values()), "one")
    assert host is not None
    assert host.ranks == [0, 1, 2]


def test_what_an_ended_host_reported_counts_once() -> None:
    """The last report of a host is read whole once. Afterwards the host is one of the job's still,
    without steps, facts or links, and costs the others none of their steps; and a report under its
    key that is not the same counts again."""
    store = dist.HashStore()
    reports = HostReports(store, "watch")
    reports.publish_job(host_reports.Job(os.urandom(16)))

    def join(last: bool, name: str, first: int) -> Window:
        links = [Link("", "10.0.0.9", "eth0", 1000, 0.5, 0.001, 0)]
        rank = 2 if name == "two" else 0
        window = a_window(rank, first, last, facts={"gc_seconds": 1.0}, links=links)
        joined = join_ranks([window], name)
        assert joined is not None
        return joined

    rounds = []
    reports.publish("boot/two", 7, join(True, "two", 0), 1)
    for number in (7, 8, 9):
        if number == 9:
            reports.publish("boot/two", 9, join(False, "two", 200), 1)
        own = join(False, "one", 100 * (number - 7))
        rounds.append(join_hosts([own, *reports.read(number, PATIENCE_SECONDS)]))
        assert rounds[-1] is not None
    reports.close()
    assert [len(each.links) for each in rounds if each] == [2, 1, 2]
    assert [each.host_facts.get("two", {}) for each in rounds if each] == [
        {"gc_seconds": 1.0},
        {},
        {"gc_seconds": 1.0},
    ]
    assert [list(each.medians) for each in rounds if each] == [
        ["one", "two"],
        ["one"],
        ["one", "two"],
    ]
    assert [len(each.least_blocked) for each in rounds if each] == [8, 8, 8]
    assert [each.hosts for each in rounds if each] == [{"one": [0], "two": [2]}] * 3


def test_1024_ranks_report_under_one_key_a_host() -> None:
    """128 hosts with eight ranks each report through a TCPStore, in real messages: rank 0 gets all
    of a round, none of an earlier one, and a second round adds no key."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reports = HostReports(server, "watch")
    reports.publish_job(host_reports.Job(os.urandom(16)))
    keys = []
    for number in (7, 8):
        for host in range(127 if number == 8 else 128):
            messages = [encode(a_window(8 * host + n, number)) for n in range(8)]
            joined = join_ranks([*map(decode, messages)], f"host{host}")
            assert joined is not None
            reports.slot = -1  # as another host
            reports.publish(f"boot/{host}", number, joined, 8)
        keys.append(server.num_keys())
        heard = reports.read(number, PATIENCE_SECONDS)
        round_ = join_hosts(heard)
        assert round_ is not None
        assert sum(map(len, round_.hosts.values())) == (1024 if number == 7 else 1016)
        assert set(round_.calls["ranks"]) == {8 * len(heard)}
        assert round_.first_step == number
    assert keys[0] == keys[1]
    reports.close()
