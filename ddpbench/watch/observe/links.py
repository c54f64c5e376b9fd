"""The links that a job uses, measured from this process's own TCP connections.

The kernel counts for each connection the bytes that its peer acknowledged, and for how long some
were on their way. Their quotient is what the link carried, however long the ranks computed or
waited in between. A slow link in a ring of gloo keeps its rate while all others carry in bursts, so
no rank is blamed for it. Needs nothing from the backend: gloo's, Open MPI's and NCCL's sockets are
all this process's. RDMA has no such connections.

Only bulk data tell a rate. A short message, such as gloo's request for the next one or a key of the
store, is on its way until its peer acknowledges it, which a peer may delay by 40 ms.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddpbench.launch import sockets
from ddpbench.watch.window import LINKS, Link, add_links

BULK_NBYTES = 1 << 16  # of one connection in one read, at least,
SEGMENT_NBYTES = 1000  # and of its segments on average
TCP_INFO_NBYTES = 256

# The fields of Counters in Linux's struct tcp_info, which only grows at its end.
TCP_INFO = struct.Struct("=68xI28xI16xQ28xIQQQ")

Ends = tuple[str, int, str, int]  # address and port of this end, of the peer's


class Counters(NamedTuple):
    """What the kernel counted for a connection since it was opened.

    retransmitted, segments: with data; bytes_per_second: of the latest acknowledgements, as the
    kernel estimates it for its own use; busy_microseconds: while data was on its way, blocked_: of
    these, while the peer had no room for it.
    """

    rtt_microseconds: int = 0
    retransmitted: int = 0
    nbytes: int = 0
    segments: int = 0
    bytes_per_second: int = 0
    busy_microseconds: int = 0
    blocked_microseconds: int = 0


class Links:
    """The connections of this process to other hosts; each read is since the last one.

    addresses: of this host, by which others know it.
    """

    def __init__(self) -> None:
        self._host = socket.gethostname()
        interfaces = sockets.list_interfaces().items()
        self._interfaces = {address.partition("/")[0]: name for name, address in interfaces}
        self.addresses = [one for one in self._interfaces if not sockets.is_loopback(one)][:LINKS]
        self._counters = dict(_read_connections())

    def read(self) -> list[Link]:
        """Return at most LINKS links that carried bulk data, those first that carried most."""
        before, self._counters = self._counters, dict(_read_connections())
        links = [
            self._make_link(ends, now, before.get(ends, Counters()))
            for ends, now in self._counters.items()
        ]
        return add_links(link for link in links if link is not None)[:LINKS]

    def _make_link(self, ends: Ends, now: Counters, before: Counters) -> Link | None:
        """Return what a connection carried since then; None for short messages alone."""
        nbytes = now.nbytes - before.nbytes
        segments = now.segments - before.segments
        if nbytes < max(BULK_NBYTES, SEGMENT_NBYTES * segments):
            return None
        busy_microseconds = now.busy_microseconds - before.busy_microseconds
        blocked_microseconds = now.blocked_microseconds - before.blocked_microseconds
        busy_seconds = (busy_microseconds - blocked_microseconds) * 1e-6
        rate = now.bytes_per_second
        return Link(
            host=self._host,
            peer=ends[2],
            interface=self._interfaces.get(ends[0], ""),
            nbytes=nbytes,
            busy_seconds=busy_seconds,
            rtt_seconds=now.rtt_microseconds * 1e-6,
            retransmitted=now.retransmitted - before.retransmitted,
            # Without delays of acknowledgements, as far as the latest rate shows them.
            transfer_seconds=min(busy_seconds, nbytes / rate) if rate else busy_seconds,
        )


def _read_connections() -> Iterator[tuple[Ends, Counters]]:
    """Yield this process's connections to other hosts.

    Nothing is opened or closed: another thread may close a connection at any time, and a copy of it
    would keep the peer from noticing.
    """
    for path in Path("/proc/self/fd").iterdir():
        # Not a connection, or gone meanwhile; Linux before 4.10 does not count busy time.
        with contextlib.suppress(OSError, struct.error):
            connection = sockets.wrap_file(int(path.name))
            try:
                # Fails unless it is a TCP socket, before anything is asked that is slow.
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_NBYTES)
                ends = connection.getsockname()[:2], connection.getpeername()[:2]
            finally:
                connection.detach()
            (own, own_port), (peer, port) = ends
            own, peer = sockets.plain_address(own), sockets.plain_address(peer)
            if own != peer and not sockets.is_loopback(peer):
                yield (own, own_port, peer, port), Counters._make(TCP_INFO.unpack_from(info))
