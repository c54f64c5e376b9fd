"""Measure how far the clocks of other hosts are ahead of rank 0's, by ping-pongs over sockets.

Rank 0 exchanges messages with the first rank of every other clock, before the first case and after
each case, so that each case is between two comparisons. Ranks that share one clock do nothing.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddpbench.analysis import clocks
from ddpbench.analysis.clocks import Ahead
from ddpbench.launch import sockets
from ddpbench.measure import clock
from ddpbench.records.launched import Offset
from ddpbench.runtime import control
from ddpbench.runtime.world import World

# In total, so that many hosts do not take longer than few; and the least with each clock.
EXCHANGES, FEWEST = 200, 20
CONNECT_SECONDS = 5.0
EXTRA_SECONDS = 30.0  # beyond the watchdog's deadline: the watchdog can name the late rank
REQUEST, RANK = b"?", struct.Struct("!i")


@dataclass
class Clocks:
    """The clocks of all ranks and their latest comparison, equal in all ranks."""

    world: World
    ranks: list[list[int]]  # the ranks that read each clock; rank 0's clock first
    objection: str | None = None  # why the clocks cannot be compared
    peers: dict[int, socket.socket] = field(default_factory=dict)  # rank → connection to it
    ahead: list[Ahead] = field(default_factory=list)  # of each clock, in the latest comparison
    ever: list[Ahead] = field(default_factory=list)  # of each clock, in all comparisons joined

    @property
    def ahead_ns(self) -> int:
        """Return what to subtract from this rank's stamps to convert them to rank 0's clock."""
        own = [self.world.rank in ranks for ranks in self.ranks].index(True)
        return self.ahead[own].middle_ns if self.ahead else 0

    @property
    def offsets(self) -> tuple[Offset, ...]:
        """Return the offset of each clock but rank 0's, over all comparisons so far."""
        return tuple(
            Offset(
                host=self.world.members[ranks[0]].host,
                ranks=tuple(ranks),
                seconds=ahead.middle_ns * 1e-9,
                bound_seconds=ahead.off_ns(ahead.middle_ns) * 1e-9,
            )
            for ranks, ahead in zip(self.ranks[1:], self.ever[1:], strict=False)
        )

    def compare_again(self, subgroups: Sequence[Sequence[int]]) -> float | None:
        """Compare the clocks again, all ranks together. Return the largest error of stamps, in s.

        This is the error between stamps of different ranks of a subgroup since the last comparison,
        each corrected by the `ahead_ns` of that time: 0.0 if the ranks of each subgroup read one
        clock, None if the clocks cannot be compared.
        """
        before = self.ahead
        self._compare()
        clock_of = {rank: clock for clock, ranks in enumerate(self.ranks) for rank in ranks}
        clocks_read = [sorted({clock_of[rank] for rank in subgroup}) for subgroup in subgroups]
        if all(len(numbers) == 1 for numbers in clocks_read):
            return 0.0
        if self.objection is not None:
            return None
        since = list(map(Ahead.joined, before, self.ahead))
        off_ns = max(
            clocks.off_ns([since[i] for i in numbers], [before[i].middle_ns for i in numbers])
            for numbers in clocks_read
        )
        return off_ns * 1e-9

    def _compare(self) -> None:
        if len(self.ranks) > 1 and self.objection is None:
            self.ahead = _gather_ahead(self.world, self.ranks, self.peers)
            self.ever = list(map(Ahead.joined, self.ever or self.ahead, self.ahead))


@contextlib.contextmanager
def open_clocks(world: World, facts: Sequence[Mapping[str, Any]]) -> Iterator[Clocks]:
    """Connect and compare the clocks for as long as the context lasts; all ranks together.

    facts: the facts of each rank, from which `analysis.clocks.clocks` finds the clock it reads.
    """
    all_clocks = Clocks(world, clocks.clocks(facts))
    with contextlib.ExitStack() as stack:
        if len(all_clocks.ranks) > 1:
            world.watchdog.begin_phase("the comparison of the hosts' clocks")
            others = [ranks[0] for ranks in all_clocks.ranks[1:]]
            target, count = (None, len(others)) if world.rank == 0 else (0, 0)
            outward, inward, all_clocks.objection = agree_connections(
                world, target if world.rank in others else None, count, stack
            )
            all_clocks.peers |= inward if outward is None else {0: outward}
        all_clocks._compare()
        yield all_clocks


def agree_connections(
    world: World, target: int | None, count: int, stack: contextlib.ExitStack
) -> tuple[socket.socket | None, dict[int, socket.socket], str | None]:
    """Connect this rank to `target`, and `count` other ranks to this one; all ranks together.

    Returns the connection to the target, those from other ranks, and why a rank failed.
    """
    address, failure = None, None
    server, outward, inward = None, None, dict[int, socket.socket]()
    try:
        if count:
            family = sockets.address_family(world.address)
            server = socket.create_server((world.address, 0), family=family, backlog=count)
            address = stack.enter_context(server).getsockname()[:2]
    except OSError as error:
        failure = f"cannot listen on {world.address} ({error.strerror})"
    addresses = control.gather_values(world, address)
    if target is not None and (address := addresses[target]) is not None:
        try:
            connection = socket.create_connection(tuple(address), CONNECT_SECONDS)
            outward = stack.enter_context(connection)
            outward.sendall(RANK.pack(world.rank))
        except OSError as error:
            failure = f"cannot connect to {address[0]} ({error})"
    objection = control.agree_objection(world, failure)  # before a rank waits in accept
    patience_seconds = world.timeout.total_seconds() + EXTRA_SECONDS
    if objection is None and server is not None:
        server.settimeout(patience_seconds)
        for _ in range(count):
            peer = stack.enter_context(server.accept()[0])
            peer.settimeout(patience_seconds)
            inward[RANK.unpack(sockets.receive(peer, RANK.size))[0]] = peer
    for each in filter(None, (outward, *inward.values())):
        each.settimeout(patience_seconds)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return outward, inward, objection


def ask_ahead(peer: socket.socket, question: bytes, count: int, now_ns: Callable[[], int]) -> Ahead:
    """Bound how far a peer's clock is ahead of this one, by questions that the peer answers.

    now_ns: this clock. Raises OSError as `sockets.exchange_stamps` does.
    """
    stamps = [sockets.exchange_stamps(peer, question, now_ns) for _ in range(count)]
    return clocks.ahead(np.array(stamps))


def _gather_ahead(
    world: World, clock_ranks: list[list[int]], peers: dict[int, socket.socket]
) -> list[Ahead]:
    """Measure how far each clock is ahead now; the same result in all ranks."""
    world.watchdog.begin_phase("the comparison of the hosts' clocks")
    count = max(FEWEST, EXCHANGES // (len(clock_ranks) - 1))
    all_ahead = [Ahead(0, 0)]
    for rank, peer in sorted(peers.items()):
        try:
            if world.rank:
                for _ in range(count):
                    sockets.answer_stamp(peer, REQUEST, clock.now_ns)
            else:
                all_ahead.append(ask_ahead(peer, REQUEST, count, clock.now_ns))
        except OSError as error:
            other = world.members[rank]
            raise RuntimeError(
                f"lost rank {rank} ({other.host}) while comparing the clocks: {error}"
            ) from None
    bounds = [[ahead.least_ns, ahead.most_ns] for ahead in all_ahead]
    return [Ahead(*bound) for bound in control.broadcast_value(world, bounds)]
