"""How fast bytes can move between these ranks at all, measured in the same launch.

The rates bound the rows: copies in memory, all ranks of a host at once, for shared memory;
streams in both directions round the ring of ranks for TCP.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ddpbench.measure import clock
from ddpbench.records.schema import Limit
from ddpbench.runtime import agree
from ddpbench.runtime.group import Group

COPY_NS, STREAM_NS = 8_000_000, 250_000_000
CHUNK = 1 << 18


@dataclass(frozen=True)
class Rates:
    """What was measured; bytes a second of one rank."""

    copies: dict[int, float] = field(default_factory=dict)  # size → slowest rank, all at once
    fastest_copy: float | None = None  # of any size and rank
    stream: float | None = None  # slowest rank's receiving rate

    def limit(self, transport: str, nbytes: int, one_host: bool) -> Limit | None:
        """What bounds a case of this total size; None where it is not known."""
        if one_host and transport == "memory" and nbytes in self.copies:
            return Limit(self.copies[nbytes], "concurrent memcpy of the same size")
        if self.stream is not None and transport:
            place = "loopback" if one_host else "between hosts"
            return Limit(self.stream, f"bidirectional TCP streams, {place}")
        return None

    def hard_limit(self, one_host: bool) -> Limit | None:
        """What nothing on one host can pass: the fastest copy of any size, cache included."""
        if one_host and self.fastest_copy is not None:
            return Limit(self.fastest_copy, "fastest memcpy of any size")
        return None


def rates(group: Group, sizes: Iterable[int], streams: bool) -> Rates:
    """Measure on all ranks together: about 20 ms a size, and half a second for the streams."""
    copies: dict[int, float] = {}
    fastest = 0.0
    for nbytes in sorted({size for size in sizes if 0 < size <= 2**28}):
        usual, best = _copy_rate(group, nbytes)
        found = agree.everyones(group, [usual, best])
        copies[nbytes] = min(rate for rate, _ in found)
        fastest = max(fastest, *(rate for _, rate in found))
    stream = _ring_rate(group) if streams and group.world_size > 1 else None
    return Rates(copies, fastest or None, stream)


def _copy_rate(group: Group, nbytes: int) -> tuple[float, float]:
    """Median and best rate of this rank's copies while all ranks copy."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    agree.decision(group, 0)
    spans = []
    until = clock.now_ns() + COPY_NS
    while len(spans) < 3 or clock.now_ns() < until:
        began = clock.now_ns()
        np.copyto(target, source)
        spans.append(clock.now_ns() - began)
    return nbytes / (float(np.median(spans)) * 1e-9), nbytes / (max(min(spans), 1) * 1e-9)


def _ring_rate(group: Group) -> float | None:
    """The slowest rank's receiving rate while each sends to its next and hears its previous.

    None where the ranks cannot open sockets to each other.
    """
    deadline = group.timeout.total_seconds()
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("", 0), backlog=1))
        server.settimeout(deadline)
        addresses = agree.everyones(group, [_own_address(group), server.getsockname()[1]])
        address = tuple(addresses[(group.rank + 1) % group.world_size])
        failure = None
        try:
            outward = sockets.enter_context(socket.create_connection(address, timeout=deadline))
            inward = sockets.enter_context(server.accept()[0])
        except OSError as error:
            failure = str(error)
        if agree.first_objection(group, failure) is not None:
            return None
        inward.settimeout(deadline)
        return float(min(agree.everyones(group, _stream(outward, inward))))


def _stream(outward: socket.socket, inward: socket.socket) -> float:
    """Send for a while from a second thread; bytes a second received until the sender ends."""

    def send() -> None:
        data = memoryview(bytes(CHUNK))
        until = clock.now_ns() + STREAM_NS
        while clock.now_ns() < until:
            outward.sendall(data)
        outward.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send, daemon=True)
    buffer = memoryview(bytearray(CHUNK))
    sender.start()
    total, began = 0, clock.now_ns()
    while count := inward.recv_into(buffer):
        total += count
    ended = clock.now_ns()
    sender.join()
    return total / ((ended - began) * 1e-9)


def _own_address(group: Group) -> str:
    """This rank's address as the other hosts see it: that of the route to the store."""
    if len(group.hosts) == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((group.meeting_host, 1))
        return str(probe.getsockname()[0])
