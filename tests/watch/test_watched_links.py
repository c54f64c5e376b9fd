"""Links, as read from this process's own connections."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpbench.launch import sockets
from ddpbench.watch.observe.links import Links

SENT = bytes(1 << 20)


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection that looks like one between two hosts."""
    addresses = [text.partition("/")[0] for text in sockets.list_interfaces().values()]
    outward = next((a for a in addresses if not sockets.is_loopback(a) and ":" not in a), None)
    if outward is None:
        pytest.skip("this machine has no address besides loopback")
    with (
        socket.create_server((outward, 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0)) as one,
    ):
        other, _ = server.accept()
        with other:
            yield one, other


def count_files() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def transfer(one: socket.socket, other: socket.socket) -> None:
    """Send a MiB and receive it."""
    sender = threading.Thread(target=one.sendall, args=(SENT,))
    sender.start()
    assert len(other.recv(len(SENT), socket.MSG_WAITALL)) == len(SENT)
    sender.join()


def test_bytes_of_a_connection_are_those_since_the_last_read(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    """What was sent between two reads, by the address of the peer; a connection that was idle, or
    that is closed, is left out, and the job's files stay open."""
    one, other = connected
    transfer(one, other)
    watched, files = Links(), count_files()
    assert watched.read() == []
    transfer(one, other)
    (link,) = watched.read()
    assert (link.peer, link.nbytes) == (other.getsockname()[0], len(SENT))
    assert link.busy_seconds >= 0
    assert link.rtt_seconds > 0
    assert watched.read() == []
    assert count_files() == files
    one.close()
    assert watched.read() == []


def test_the_job_s_connections_stay_as_they_are(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    """After socket.setdefaulttimeout, a read makes no connection of the job's
    non-blocking."""
    one, other = connected
    one.setblocking(True)
    watched, before = Links(), socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)
    try:
        transfer(one, other)
        assert len(watched.read()) == 1
    finally:
        socket.setdefaulttimeout(before)
    assert os.get_blocking(one.fileno())
