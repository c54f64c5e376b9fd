"""How fast bytes can move between these ranks at all, measured in the same launch.

The rates bound the rows: copies in memory, all ranks of a host at once, for shared memory;
streams in both directions round the ring of ranks for TCP.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from ddpbench.launch.sockets import address_family
from ddpbench.measure import clock
from ddpbench.records.schema import Limit
from ddpbench.runtime import control
from ddpbench.runtime.subgroups import Partition
from ddpbench.runtime.world import World

COPY_NS, ROUNDS = 8_000_000, 3
# Between hosts the link is the limit, and a rank that the scheduler wakes 1 ms late reads it wrong.
STREAM_NS, STREAM_BETWEEN_HOSTS_NS = 60_000_000, 200_000_000
CONNECT_SECONDS = 5.0
CHUNK, END = 1 << 22, b"\1"  # smaller chunks carry less: 3 GB/s at 256 KiB, 5.5 at 4 MiB


@dataclass(frozen=True)
class Rates:
    """What was measured; bytes a second of one rank."""

    copies: dict[int, float] = field(default_factory=dict)  # size → slowest rank, all at once
    copies_alone: dict[int, float] = field(default_factory=dict)  # size → one rank of a host
    fastest_copy: float | None = None  # of any size and rank
    both_ways: float | None = None  # slowest rank's receiving rate while it sends as well
    one_way: float | None = None  # the same where every second rank only sends
    # Both of these in the teams of a split, all at once, where they are not all ranks.
    teams: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)

    def limit(
        self, transport: str, nbytes: int, one_way: bool, one_host: bool, split: str = "world"
    ) -> Limit | None:
        """What bounds a case of this total size; None where it is not known."""
        if one_host and transport == "memory":
            copies = self.copies_alone if one_way else self.copies
            source = f"{'one' if one_way else 'concurrent'} memcpy of the same size"
            return Limit(copies[nbytes], source) if nbytes in copies else None
        rate = self.teams.get(split, (self.both_ways, self.one_way))[one_way]
        if rate is None or not transport:
            return None
        kind = "one-way" if one_way else "bidirectional"
        return Limit(rate, f"{kind} TCP streams {'on this host' if one_host else 'across hosts'}")

    def hard_limit(self, one_host: bool) -> Limit | None:
        """What nothing on one host can pass: the fastest copy of any size, cache included."""
        if one_host and self.fastest_copy is not None:
            return Limit(self.fastest_copy, "fastest memcpy of any size")
        return None


def rates(world: World, sizes: Iterable[int], splits: Iterable[Partition]) -> Rates:
    """Measure on all ranks together: about 30 ms a size, and for the streams of each split half a
    second, between hosts 2 seconds."""
    copies: dict[int, float] = {}
    alone: dict[int, float] = {}
    fastest = 0.0
    first_of_host = world.neighbours[0] == world.rank
    copied = sorted({size for size in sizes if 0 < size <= 2**28})
    source, target = (np.full(max(copied, default=0), one, np.uint8) for one in (1, 0))
    for nbytes in copied:
        world.watchdog.rearm()
        copy = partial(_copy_rate, world, source[:nbytes], target[:nbytes])
        together = control.gather_values(world, copy(True))
        single = control.gather_values(world, copy(first_of_host))
        copies[nbytes] = min(usual for usual, _ in together)
        alone[nbytes] = min(usual for usual, _ in single if usual)
        fastest = max(fastest, *(best for _, best in together + single))
    rings = {split.name: _ring_rates(world, split) for split in splits if split.size > 1}
    both_ways, one_way = rings.pop("world", (None, None))
    return Rates(copies, alone, fastest or None, both_ways, one_way, rings)


def _copy_rate(
    world: World, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], copies_too: bool
) -> tuple[float, float]:
    """Median and best rate of this rank's copies while others copy; 0 where it stands aside."""
    control.broadcast_decision(world, 0)
    if not copies_too:
        return 0.0, 0.0
    spans: list[int] = []
    until = clock.now_ns() + COPY_NS
    while len(spans) < 3 or clock.now_ns() < until:
        began = clock.now_ns()
        np.copyto(target, source)
        spans.append(clock.now_ns() - began)
    usual, best = float(np.median(spans)), max(min(spans), 1)
    return source.nbytes / (usual * 1e-9), source.nbytes / (best * 1e-9)


def _ring_rates(world: World, partition: Partition) -> tuple[float | None, float | None]:
    """The slowest rank's receiving rate while each sends to the next of its team and hears the
    previous one, all teams at once.

    Then again while only every second rank sends. None where the ranks cannot open sockets to
    each other.
    """
    deadline = world.timeout.total_seconds()
    team = partition.subgroup_of(world.rank) or (world.rank,)  # one in no team stands aside
    at = team.index(world.rank)
    with contextlib.ExitStack() as sockets:
        place = (world.address, 0)
        server = sockets.enter_context(
            socket.create_server(place, family=address_family(world.address), backlog=1)
        )
        addresses = control.gather_values(world, [world.address, server.getsockname()[1]])
        address = tuple(addresses[team[(at + 1) % len(team)]])
        failure = None
        try:
            outward = sockets.enter_context(socket.create_connection(address, CONNECT_SECONDS))
        except OSError as error:
            failure = str(error)
        if control.agree_objection(world, failure) is not None:  # before one waits for the other
            return None, None
        server.settimeout(deadline)
        inward = sockets.enter_context(server.accept()[0])
        outward.settimeout(deadline)
        inward.settimeout(deadline)
        everyone = {rank for its in partition.subgroups for rank in its}
        every_second = {
            rank for its in partition.subgroups for rank in its[: partition.size - 1 : 2]
        }
        nanoseconds = STREAM_BETWEEN_HOSTS_NS if len(partition.ranks_per_host) > 1 else STREAM_NS
        ring = partial(_stream, world, outward, inward, team[at - 1], nanoseconds)
        # The best of some, in turn: where the scheduler puts sender and receiver halves a rate, and
        # it stays there until the pattern changes.
        both_ways = one_way = 0.0
        for _ in range(ROUNDS):
            both_ways = max(both_ways, ring(everyone))
            one_way = max(one_way, ring(every_second))
        return both_ways, one_way


def _stream(
    world: World, outward: socket.socket, inward: socket.socket, previous: int, stream_ns: int,
    senders: Container[int],
) -> float:  # fmt: skip
    """The slowest receiver's bytes a second while the senders send to their next rank.

    Every sender closes its stream with one last byte, which is how its receiver knows the end.
    """

    def send() -> None:
        data = memoryview(bytes(CHUNK))
        until = clock.now_ns() + stream_ns
        with contextlib.suppress(OSError):  # the receiver has left, which is told elsewhere
            while clock.now_ns() < until:
                outward.sendall(data)
            outward.sendall(END)

    world.watchdog.rearm()
    sends = world.rank in senders
    hears = previous in senders
    control.broadcast_decision(world, 0)
    sender = threading.Thread(target=send, daemon=True)
    if sends:
        sender.start()
    total, began, ended = 0, 0, 0
    buffer = memoryview(bytearray(CHUNK))
    while hears and not ended:
        count = inward.recv_into(buffer)
        if began:
            total += count
        else:  # until the first bytes come it is the sender's start, not the stream
            began = clock.now_ns()
        if count == 0 or buffer[count - 1 : count] == END:
            ended = clock.now_ns()
    if sends:
        sender.join()
    rates = control.gather_values(world, total / ((ended - began) * 1e-9) if hears else None)
    return float(min(rate for rate in rates if rate is not None))
