"""What the windows of ranks and hosts say together: waits are told from work, the slowest ranks are
passed on, and messages stay as large as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from ddpbench.records.watched import PHASES
from ddpbench.watch.gather.joining import join_hosts, join_ranks
from ddpbench.watch.gather.offsets import UNKNOWN, Line
from ddpbench.watch.window import (
    BLOCKED,
    CALLS,
    COLUMNS,
    HOST_CALLS,
    LINKS,
    RANKS,
    ROUND_RANKS,
    STEPS,
    Call,
    HostWindow,
    Link,
    RankWindow,
    Round,
    Rows,
    pack_rows,
)

EPOCH = 1_700_000_000 * 10**9
MS = 10**6
FORWARD, BACKWARD = PHASES.index("forward"), PHASES.index("backward")
STEP = np.array([1, 10, 20, 3, 1, 5]) * 1e-3  # seconds: what every healthy rank needs
STEP_NS = 100 * MS


@dataclasses.dataclass
class Simulated:
    """A job in which each step has two blocking calls in forward, and one in backward.

    late: seconds by which a rank comes late to the first call of a step; ahead: of a rank's clock.
    """

    late: Callable[[int, int], float] = lambda rank, step: 0.0
    ahead: Callable[[int], int] = lambda rank: 0
    first: int = 100
    steps: int = STEPS
    world: int = 8
    group: Callable[[int], str] = lambda rank: "world"
    phase: int = FORWARD

    def window(self, rank: int, first: int | None = None, seen: int | None = None) -> RankWindow:
        """What a rank sends: it is blocked in forward until the last rank has come."""
        first = self.first if first is None else first
        steps = range(first, first + self.steps)
        rows = np.tile(STEP, (self.steps, 1))
        calls = []
        for row, step in zip(rows, steps, strict=True):
            late = self.late(rank, step)
            latest = max(self.late(other, step) for other in range(self.world))
            row[FORWARD] += latest  # its own lateness, or waiting for the latest rank
            begin = EPOCH + step * STEP_NS + self.ahead(rank)
            entered = begin + round(late * 1e9)
            room = round((latest - late + 0.002) * 1e9)
            after = begin + round(latest * 1e9) + 2 * MS
            calls += [
                Call(self.group(rank), 3 * step, "all_reduce", 64, entered, room, step, self.phase),
                Call(self.group(rank), 3 * step + 1, "broadcast", 64, after, MS, step, self.phase),
                Call(self.group(rank), 3 * step + 2, "all_reduce", 10**6, after + MS, 0, step, -1),
            ]
        calls = calls[-CALLS:] if seen is None else calls[:seen][-CALLS:]
        ended = EPOCH + steps[-1] * STEP_NS + STEP_NS + self.ahead(rank)
        return RankWindow(rank, first, pack_rows(rows.astype(np.float32)), ended, calls)

    def host(
        self, ranks: Sequence[int], name: str = "one", clock: Line | None = None
    ) -> HostWindow:
        """The joined windows of some ranks; their host's clock is known."""
        clock = clock or Line(self.ahead(ranks[0]), 1000.0)
        host = join_ranks([self.window(rank) for rank in ranks], name, ["10.0.0.9"], clock)
        assert host is not None
        return host


def median_row(rows: Rows) -> list[float]:
    """A typical step, in ms."""
    return [round(float(value), 1) for value in np.median(rows, axis=0) * 1e3]


LATE = [1.0, 60.0, 20.0, 3.0, 1.0, 5.0]  # late by 50 ms in forward
WAITED = [1.0, 10.0, 20.0, 3.0, 1.0, 55.0]
HEALTHY = [1.0, 10.0, 20.0, 3.0, 1.0, 5.0]


def test_waits_for_another_rank_of_the_host_are_no_work() -> None:
    """Rank 3 takes 50 ms longer in forward, so all forwards are equally long: after the join only
    rank 3's is, and the others were blocked."""
    job = Simulated(late=lambda rank, step: 0.05 if rank == 3 else 0.0)
    round_ = join_hosts([job.host(range(8))])
    assert round_ is not None
    assert {rank: median_row(rows) for rank, rows in round_.rows.items()} == {
        rank: LATE if rank == 3 else WAITED for rank in range(8)
    }
    assert median_row(round_.medians["one"]) == WAITED
    assert np.allclose(round_.least_blocked, 0.005, atol=1e-5)
    call = round_.calls[-3]
    assert (call.last_rank, call.ranks, call.operation) == (3, 8, "all_reduce")
    assert (call.last_ns - call.first_ns, call.last_ns - call.second_ns) == (50 * MS, 50 * MS)


def test_waits_for_a_rank_of_another_host_are_no_work() -> None:
    """Rank 9 is late, on the second host, whose clock is 5 ms ahead: the first host's ranks were
    blocked for exactly as long, by rank 0's clock."""
    job = Simulated(
        late=lambda rank, step: 0.05 if rank == 9 else 0.0,
        ahead=lambda rank: 5 * MS if rank >= 8 else 0,
        world=16,
    )
    round_ = join_hosts([job.host(range(8, 16), "two"), job.host(range(8))])
    assert round_ is not None
    assert list(round_.hosts) == ["one", "two"]
    for rank, rows in round_.rows.items():
        assert median_row(rows) == (LATE if rank == 9 else WAITED)
    assert [median_row(rows) for rows in round_.medians.values()] == [WAITED, WAITED]
    call = round_.calls[-3]
    assert (call.last_rank, call.ranks, call.last_ns - call.second_ns) == (9, 16, 50 * MS)
    assert call.first_ns == EPOCH + call.step * STEP_NS
    assert round_.ended_ns == EPOCH + (100 + STEPS) * STEP_NS


def test_a_host_whose_clock_is_unknown_is_not_compared() -> None:
    """How long ranks of a host without a known clock waited for other hosts is unknown, so its rows
    are left out where such calls block outside backward, and only there. Calls of its groups, of
    which some ranks' arrivals are unknown, are left out too."""

    def join(phase: int, group: Callable[[int], str]) -> Round:
        job = Simulated(
            late=lambda rank, step: 0.05 if rank == 3 else 0.0,
            ahead=lambda rank: 10**12 if rank >= 8 else 0,
            world=16,
            group=group,
            phase=phase,
        )
        round_ = join_hosts([job.host(range(8)), job.host(range(8, 16), "two", UNKNOWN)])
        assert round_ is not None
        assert round_.hosts == {"one": list(range(8)), "two": list(range(8, 16))}
        return round_

    blocking = join(FORWARD, lambda rank: "world")
    assert {rank: median_row(rows) for rank, rows in blocking.rows.items()} == {
        rank: LATE if rank == 3 else WAITED for rank in range(8)
    }
    assert list(blocking.medians) == ["one"]
    assert blocking.calls == []
    assert list(join(-1, lambda rank: "world").medians) == ["one", "two"]
    alone = join(FORWARD, lambda rank: f"host {rank // 8}")
    assert list(alone.medians) == ["one", "two"]
    assert {call.group for call in alone.calls} == {"host 0"}


def test_waits_for_another_host_count_for_the_ranks_that_were_in_the_call() -> None:
    """Each of four ranks is in a group with one rank of the other host, all of whose ranks come
    50 ms late: each waited 50 ms, not once for each group."""
    job = Simulated(
        late=lambda rank, step: 0.05 if rank >= 4 else 0.0, group=lambda rank: f"pair {rank % 4}"
    )
    round_ = join_hosts([job.host(range(4)), job.host(range(4, 8), "two")])
    assert round_ is not None
    assert [median_row(rows) for rows in round_.rows.values()] == [WAITED] * 4 + [LATE] * 4


def test_a_wait_is_never_longer_than_its_room_and_its_phase() -> None:
    """A rank that comes a second after all others takes from them what they spent in that phase
    at most, and less where the next mark or call came sooner."""
    windows = []
    for rank in range(3):
        entered = EPOCH + (10**9 if rank == 2 else 0)
        room = 4 * MS if rank == 0 else 10**9
        calls = [
            Call("world", 0, "all_reduce", 8, EPOCH - 1, 0, 6, FORWARD),
            Call("world", 1, "all_reduce", 8, entered, room, 7, FORWARD),
        ]
        windows.append(RankWindow(rank, 6, pack_rows(np.float32([STEP, STEP])), EPOCH, calls))
    round_ = join_hosts([join_ranks(windows, "one") or pytest.fail("nothing")])
    assert round_ is not None
    assert [median_row(rows)[FORWARD] for rows in round_.rows.values()] == [6.0, 0.0, 10.0]
    assert [median_row(rows)[BLOCKED] for rows in round_.rows.values()] == [9.0, 15.0, 5.0]
    assert all(np.allclose(rows.sum(), STEP.sum()) for rows in round_.rows.values())


def test_groups_are_matched_by_name_and_number() -> None:
    """Ranks of different groups do not wait for each other, even in calls of the same number."""
    job = Simulated(
        late=lambda rank, step: 0.05 if rank == 3 else 0.0,
        world=16,
        group=lambda rank: f"pair {rank // 2}",
    )
    hosts = [job.host(range(8)), job.host(range(8, 16), "two")]
    round_ = join_hosts(hosts)
    assert round_ is not None
    waited = [rank for rank, rows in round_.rows.items() if median_row(rows) == WAITED]
    assert waited == [2]
    assert {call.ranks for call in round_.calls} == {2}


def test_windows_are_joined_over_the_steps_that_all_have() -> None:
    """Windows that begin and end at different steps are cut; the end is that of the last step that
    all of them have; and a rank that has stopped long ago hides nobody's steps."""
    job = Simulated(world=3, phase=-1)
    windows = [job.window(0, first=100), job.window(1, first=103), job.window(2, first=10)]
    host = join_ranks(windows, "one")
    assert host is not None
    assert (host.first_step, len(host.median) // (4 * COLUMNS)) == (103, STEPS - 3)
    assert host.ranks == [(0, 1)]
    assert abs(host.ended_ns - (EPOCH + (100 + STEPS) * STEP_NS)) < 100 * MS
    other = join_ranks([job.window(3, first=110)], "two")
    assert other is not None
    round_ = join_hosts([host, other])
    assert round_ is not None
    assert (round_.first_step, len(round_.least_blocked)) == (110, STEPS - 10)
    assert {len(rows) for rows in round_.rows.values()} == {STEPS - 10}


def test_steps_whose_calls_are_unknown_are_left_out() -> None:
    """Where calls block outside backward, a step counts only if all its calls are known: of the
    oldest some were cut off, of the newest some have not been read. Otherwise all steps count."""
    for phase, expected in ((FORWARD, (100 + 10, 100 + 86)), (-1, (100, 100 + 90))):
        job = Simulated(steps=90, world=2, phase=phase)
        newest = job.window(0)  # of the tenth step only the last call is left
        newest = msgspec.structs.replace(newest, calls=newest.calls[3 * 9 + 2 :])
        host = join_ranks([newest, job.window(1, seen=3 * 86)], "one")
        assert host is not None
        steps = host.first_step, host.first_step + len(host.median) // (4 * COLUMNS)
        assert steps == expected


def test_a_rank_whose_calls_are_unknown_is_left_out() -> None:
    """Of a rank without any known call nobody knows how long it waited for a late one: where calls
    block outside backward, its rows do not count; if no other rank has steps, none do."""
    job = Simulated(late=lambda rank, step: 0.05 if rank == 3 else 0.0)
    windows = [job.window(rank) for rank in range(8)]
    windows[5] = msgspec.structs.replace(windows[5], calls=[])
    host = join_ranks(windows, "one")
    assert host is not None
    assert host.ranks == [(0, 4), (6, 7)]
    assert host.rows.keys() == {0, 1, 2, 3, 4, 6, 7}
    without_steps = msgspec.structs.replace(windows[0], rows=b"")
    host = join_ranks([without_steps, windows[5]], "one")
    assert host is not None
    assert (host.median, host.least_blocked, host.rows) == (b"", b"", {})


def test_a_rank_that_has_ended_stays_one_of_its_host() -> None:
    """Ranks without steps are listed once they have ended, and cost the others none of theirs."""
    job = Simulated(world=2)
    windows = [job.window(0), RankWindow(1, 0, b"", EPOCH, last=True), RankWindow(2, 0, b"", EPOCH)]
    host = join_ranks(windows, "one")
    assert host is not None
    assert (host.ranks, list(host.rows)) == ([(0, 1)], [0])
    assert len(host.median) == len(join_ranks([job.window(0)], "one").median)  # type: ignore[union-attr]


def test_a_host_passes_on_the_calls_that_block_first() -> None:
    """Of more calls than fit, those that block remain, the newest of them, and only the steps of
    which none is dropped."""
    job = Simulated(steps=85, world=8, group=lambda rank: f"alone {rank}")
    host = job.host(range(8))
    round_ = join_hosts([host])
    assert round_ is not None
    assert len(host.calls) // len(round_.calls) == len(host.calls) // HOST_CALLS
    assert {call.phase for call in round_.calls} == {FORWARD}
    last = 100 + 85
    assert round_.first_step == last - HOST_CALLS // (8 * 2)
    assert len(round_.least_blocked) == last - round_.first_step


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
        windows.append(RankWindow(rank, 0, pack_rows(rows.astype(np.float32)), EPOCH))
    host = join_ranks(windows, "one")
    assert host is not None
    assert len(host.rows) == RANKS
    assert {11, 22, 33} <= host.rows.keys()
    assert host.ranks == [(0, 63)]


def test_a_round_passes_on_the_slowest_ranks_of_all_hosts() -> None:
    """Of 48 hosts with eight ranks each, the rows of ROUND_RANKS ranks are in a round, among them
    those of the one late rank; the medians are those of all hosts."""
    noise = np.random.default_rng(1)
    hosts = []
    for number in range(48):
        windows = []
        for rank in range(8 * number, 8 * number + 8):
            rows = STEP * noise.normal(1, 0.02, (STEPS, COLUMNS))
            rows[:, BACKWARD] += 0.002 * (rank == 77)
            windows.append(RankWindow(rank, 0, pack_rows(rows.astype(np.float32)), EPOCH))
        hosts.append(join_ranks(windows, "same") or pytest.fail("nothing"))
    round_ = join_hosts(hosts)
    assert round_ is not None
    assert len(round_.rows) == ROUND_RANKS
    assert 77 in round_.rows
    assert len(round_.medians) == len(round_.hosts) == 48
    assert round_.hosts["same (rank 8)"] == list(range(8, 16))


def test_links_of_a_host_are_added_and_named() -> None:
    """Connections of several ranks to one peer are one link; a peer is named by its address unless
    two hosts have that address."""
    link = Link("", "10.0.0.2", "eth0", 1000, 0.5, 0.001, 1)
    bridge = Link("", "172.17.0.1", "docker0", 10, 0.5, 0.001, 0)
    windows = [
        RankWindow(rank, 0, b"", EPOCH, facts={"gc_seconds": rank}, links=[link, bridge])
        for rank in range(2)
    ]
    one = join_ranks(windows, "one", ["10.0.0.1", "172.17.0.1"])
    two = join_ranks([RankWindow(2, 0, b"", EPOCH)], "two", ["10.0.0.2", "172.17.0.1"])
    assert one is not None
    assert two is not None
    round_ = join_hosts([one, two])
    assert round_ is not None
    links = {(each.host, each.peer): (each.nbytes, each.retransmitted) for each in round_.links}
    assert links == {("one", "two"): (2000, 2), ("one", "172.17.0.1"): (20, 0)}
    assert round_.facts[1] == {"gc_seconds": 1}
    assert round_.hosts == {"one": [0, 1], "two": [2]}


def test_a_job_without_steps_still_has_calls() -> None:
    """Ranks that only call collectives, without an optimizer, report their calls."""
    calls = [Call("world", 1, "all_reduce", 8, EPOCH, 0)]
    windows = [RankWindow(rank, 0, b"", EPOCH, calls) for rank in range(2)]
    round_ = join_hosts([join_ranks(windows, "one") or pytest.fail("nothing")])
    assert round_ is not None
    assert (len(round_.least_blocked), round_.rows, round_.medians) == (0, {}, {})
    assert [call.ranks for call in round_.calls] == [2]
    assert join_ranks([], "one") is None
    assert join_hosts([]) is None


def test_messages_do_not_grow_with_steps_or_ranks() -> None:
    """A host of 64 ranks at step a million sends as much as one of eight ranks at step 100, but for
    the digits of its numbers, and no more than a socket takes; so does a rank."""
    sizes = []
    for first, count, phase in ((100, 8, FORWARD), (1_000_000, 8, FORWARD), (1_000_000, 64, -1)):
        job = Simulated(first=first, world=1, phase=phase)
        links = [Link("", f"10.0.{n}.1", "eth0", 1, 0.1, 0.1, 0) for n in range(LINKS + 4)]
        windows = [
            msgspec.structs.replace(job.window(rank), links=links[n % 4 :][:LINKS])
            for n, rank in enumerate(range(16384 - count, 16384))
        ]
        host = join_ranks(windows, "host", [f"10.0.0.{n}" for n in range(LINKS)])
        sizes.append((len(msgspec.msgpack.encode(windows[0])), len(msgspec.msgpack.encode(host))))
    ranks, hosts = zip(*sizes, strict=True)
    assert max(ranks) - min(ranks) <= CALLS * 8
    assert max(ranks) < 30_000
    assert max(hosts) - min(hosts) <= 12 * STEPS
    assert max(hosts) < 50_000


def test_a_rank_that_did_not_wait_in_a_broadcast_was_not_blocked_there() -> None:
    """Rank 2 comes late to a broadcast, and only the root's phase becomes longer: it alone was
    blocked. If the root is late, all others were."""

    def join(late: int, waiting: Sequence[int]) -> dict[int, list[float]]:
        windows = []
        for rank in range(4):
            rows = np.tile(STEP, (8, 1))
            rows[:, FORWARD] += 0.02 if rank in waiting else 0.0
            calls = [
                Call(
                    *("world", step, "broadcast", 64),
                    EPOCH + step * STEP_NS + (20 * MS if rank == late else 0),
                    *(30 * MS, step, FORWARD),
                )
                for step in range(8)
            ]
            data = pack_rows(rows.astype(np.float32))
            windows.append(RankWindow(rank, 0, data, EPOCH + 8 * STEP_NS, calls))
        host = join_ranks(windows, "one")
        assert host is not None
        round_ = join_hosts([host])
        assert round_ is not None
        return {rank: median_row(rows) for rank, rows in round_.rows.items()}

    waited = [*HEALTHY[:-1], HEALTHY[-1] + 20]
    assert join(2, [0]) == {0: waited, 1: HEALTHY, 2: HEALTHY, 3: HEALTHY}
    assert join(0, [1, 2, 3]) == {0: HEALTHY, 1: waited, 2: waited, 3: waited}
