"""What the clocks of other hosts are ahead of rank 0's: ping-pongs over sockets of their own.

The first rank of each clock answers rank 0. That is done before the first case and after each, so
that every case has what was found before and after it; between ranks of one clock nothing is done.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddpbench.analysis import clocks
from ddpbench.analysis.clocks import Ahead
from ddpbench.launch import sockets
from ddpbench.measure import clock
from ddpbench.records.schema import Offset
from ddpbench.runtime import control
from ddpbench.runtime.world import World

# Of all clocks together, so that many hosts take no longer than few; of each one at least.
EXCHANGES, FEWEST = 200, 20
CONNECT_SECONDS = 5.0
LATE_SECONDS = 30.0  # beyond the watchdog's deadline: it can name ranks
ASKED, STAMP, RANK = b"?", struct.Struct("!q"), struct.Struct("!i")


@dataclass
class Clocks:
    """The clocks of all ranks, as they were compared last. All ranks hold the same."""

    world: World
    ranks: list[list[int]]  # of each clock, rank 0's first
    objection: str | None = None  # why they cannot be compared
    peers: dict[int, socket.socket] = field(default_factory=dict)  # rank at the other end → to it
    ahead: list[Ahead] = field(default_factory=list)  # of each clock, at the last comparison
    ever: list[Ahead] = field(default_factory=list)  # likewise, all comparisons joined

    @property
    def ahead_ns(self) -> int:
        """What to subtract from this rank's stamps to have them in rank 0's clock, about."""
        own = [self.world.rank in ranks for ranks in self.ranks].index(True)
        return self.ahead[own].middle_ns if self.ahead else 0

    @property
    def offsets(self) -> tuple[Offset, ...]:
        """Of all clocks but rank 0's, over all comparisons so far."""
        return tuple(
            Offset(
                host=self.world.members[ranks[0]].host,
                ranks=tuple(ranks),
                seconds=its.middle_ns * 1e-9,
                bound_seconds=its.off_ns(its.middle_ns) * 1e-9,
            )
            for ranks, its in zip(self.ranks[1:], self.ever[1:], strict=False)
        )

    def again(self, teams: Sequence[Sequence[int]]) -> float | None:
        """Compare once more; all ranks together. What stamps of different ranks since the last
        time, each corrected by the `ahead_ns` of then, may be off against each other: seconds.

        teams: only stamps of one team are held against each other. 0.0 where the ranks of each team
        read one clock, None where clocks cannot be compared.
        """
        before = self.ahead
        self._compare()
        number = {rank: clock for clock, ranks in enumerate(self.ranks) for rank in ranks}
        read = [sorted({number[rank] for rank in team}) for team in teams]
        if all(len(those) == 1 for those in read):
            return 0.0
        if self.objection is not None:
            return None
        since = list(map(Ahead.joined, before, self.ahead))
        off_ns = max(
            clocks.off_ns([since[i] for i in those], [before[i].middle_ns for i in those])
            for those in read
        )
        return off_ns * 1e-9

    def _compare(self) -> None:
        if len(self.ranks) > 1 and self.objection is None:
            self.ahead = _compared(self.world, self.ranks, self.peers)
            self.ever = list(map(Ahead.joined, self.ever or self.ahead, self.ahead))


@contextlib.contextmanager
def opened(world: World, facts: Sequence[Mapping[str, Any]]) -> Iterator[Clocks]:
    """The clocks, compared for the first time, for as long as the context lasts; all ranks call it
    together.

    facts: of each rank, which tell what clock it reads: `analysis.clocks.clocks`.
    """
    its = Clocks(world, clocks.clocks(facts))
    with contextlib.ExitStack() as stack:
        if len(its.ranks) > 1:
            world.watchdog.begin_phase("the comparison of the hosts' clocks")
            its.objection = _connect(world, [each[0] for each in its.ranks[1:]], its.peers, stack)
        its._compare()
        yield its


def _connect(
    world: World,
    others: Sequence[int],
    peers: dict[int, socket.socket],
    stack: contextlib.ExitStack,
) -> str | None:
    """Connections between rank 0 and the others into `peers`; in all ranks why there are none."""
    server, told, failure = None, None, None
    if world.rank == 0:
        try:
            family = sockets.address_family(world.address)
            server = socket.create_server((world.address, 0), family=family, backlog=len(others))
            told = stack.enter_context(server).getsockname()[:2]
        except OSError as error:
            failure = f"{world.address} cannot be listened on ({error.strerror})"
    address = control.broadcast_value(world, told)
    if address is not None and world.rank in others:
        try:
            peers[0] = stack.enter_context(
                socket.create_connection(tuple(address), CONNECT_SECONDS)
            )
            peers[0].sendall(RANK.pack(world.rank))
        except OSError as error:
            failure = f"{address[0]} cannot be connected to ({error})"
    objection = control.agree_objection(world, failure)  # before rank 0 waits for who cannot come
    if objection is None and server is not None:
        server.settimeout(_patience(world))
        for _ in others:
            peer = stack.enter_context(server.accept()[0])
            peer.settimeout(_patience(world))
            peers[RANK.unpack(_received(peer, RANK.size))[0]] = peer
    for peer in peers.values():
        peer.settimeout(_patience(world))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return objection


def _patience(world: World) -> float:
    return world.timeout.total_seconds() + LATE_SECONDS


def _compared(world: World, ranks: list[list[int]], peers: dict[int, socket.socket]) -> list[Ahead]:
    """What each clock is ahead now, in all ranks."""
    world.watchdog.begin_phase("the comparison of the hosts' clocks")
    others = [each[0] for each in ranks[1:]]
    count = max(FEWEST, EXCHANGES // len(others))
    found = [Ahead(0, 0)]
    for rank, peer in sorted(peers.items()):
        try:
            if world.rank:
                _answer(peer, count)
            else:
                found.append(clocks.ahead(np.array([_asked(peer) for _ in range(count)])))
        except OSError as error:
            other = world.members[rank]
            raise RuntimeError(
                f"rank {rank} ({other.host}) is lost while the clocks are compared: {error}"
            ) from None
    told = [[each.least_ns, each.most_ns] for each in found]
    return [Ahead(*each) for each in control.broadcast_value(world, told)]


def _asked(peer: socket.socket) -> tuple[int, int, int]:
    """One exchange: own stamp, the peer's, own."""
    asked = clock.now_ns()
    peer.sendall(ASKED)
    answer = _received(peer, STAMP.size)
    return asked, STAMP.unpack(answer)[0], clock.now_ns()


def _answer(peer: socket.socket, count: int) -> None:
    for _ in range(count):
        _received(peer, len(ASKED))
        peer.sendall(STAMP.pack(clock.now_ns()))


def _received(peer: socket.socket, nbytes: int) -> bytes:
    """Raises ConnectionError when the other end is closed, TimeoutError when nothing comes."""
    data = b""
    while len(data) < nbytes:
        more = peer.recv(nbytes - len(data))
        if not more:
            raise ConnectionError("its end is closed")
        data += more
    return data
