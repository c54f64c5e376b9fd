"""Links, as read from this process's own connections."""

import contextlib
import fcntl
import os
import socket
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import wait_until

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


def transfer(one: socket.socket, other: socket.socket) -> None:
    """Send a MiB and receive it, until the sender knows that all has arrived."""
    sender = threading.Thread(target=one.sendall, args=(SENT,))
    sender.start()
    assert len(other.recv(len(SENT), socket.MSG_WAITALL)) == len(SENT)
    sender.join()
    wait_until(lambda: not any(fcntl.ioctl(one, termios.TIOCOUTQ, bytes(4))), "the last answer")


def list_files() -> dict[str, str]:
    """Return this process's open files by number."""
    files = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # this folder
            files[path.name] = str(path.readlink())
    return files


@pytest.fixture
def default_timeout() -> Iterator[None]:
    """Sockets have a timeout, as a job may want."""
    socket.setdefaulttimeout(5)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout")
def test_bytes_of_a_connection_are_those_since_the_last_read(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    """What was sent between two reads, by the address of the peer; a connection that was idle, or
    that is closed, is left out. The job's files stay open, and its connections blocking."""
    one, other = connected
    for end in connected:
        end.setblocking(True)
    transfer(one, other)
    watched, before = Links(), list_files()
    assert watched.read() == []
    transfer(one, other)
    (link,) = watched.read()
    assert (link.peer, link.nbytes) == (other.getsockname()[0], len(SENT))
    assert link.busy_seconds >= 0
    assert link.rtt_seconds > 0
    assert watched.read() == []
    files = list_files()
    assert not files.items() - before.items()  # those of other tests may be closed meanwhile
    numbers = [str(end.fileno()) for end in connected]
    assert [files[number] for number in numbers] == [before[number] for number in numbers]
    assert os.get_blocking(one.fileno())
    one.close()
    assert watched.read() == []
