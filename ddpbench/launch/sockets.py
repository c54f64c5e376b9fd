"""Connections and addresses of this process and host, and the store through which ranks meet.

torch's TCPStore listens on every interface, and any client that connects can read and write it.
Here it listens only on the address that the ranks use: loopback if they share a host.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from ipaddress import ip_address, ip_interface
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

if TYPE_CHECKING:
    import torch.distributed as dist

BACKLOG = 2048  # all ranks connect at once
FAMILIES = (socket.AF_INET, socket.AF_INET6)
STAMP = struct.Struct("!q")


class Connection(NamedTuple):
    """One established TCP connection."""

    local: str
    local_port: int
    remote: str


def list_connections() -> frozenset[Connection]:
    """Return the connections of this process; none if they cannot be read."""
    process: Any = psutil.Process()
    # psutil 6 renamed the method.
    read: Callable[..., Any] = getattr(process, "net_connections", None) or process.connections
    try:
        entries = [each for each in read(kind="tcp") if each.status == psutil.CONN_ESTABLISHED]
    except psutil.Error:
        return frozenset()
    return frozenset(
        Connection(plain_address(each.laddr.ip), each.laddr.port, plain_address(each.raddr.ip))
        for each in entries
    )


def local_addresses(connections: Iterable[Connection], remote: frozenset[str]) -> list[str]:
    """Return local addresses of the connections to these remote ones, the most used first."""
    used = Counter(connection.local for connection in connections if connection.remote in remote)
    return sorted(used, key=lambda address: (-used[address], address))


def wrap_file(number: int) -> socket.socket:
    """Return a socket of an open file, whose flags stay as they are. Not for calls that block.

    Without SOCK_NONBLOCK, and after socket.setdefaulttimeout, Python makes the file non-blocking
    for all that share it, such as the library that opened it. With SOCK_NONBLOCK, Python assumes
    that the file is non-blocking already. Raises OSError if the file is not a socket.
    """
    return socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, fileno=number)


def list_interfaces() -> dict[str, str]:
    """Return interfaces with an IP address: name → "10.0.0.1/24"; IPv4 before IPv6, as in gloo."""
    interfaces: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in sorted(entries, key=lambda entry: entry.family):
            if entry.family in FAMILIES and name not in interfaces:
                address = plain_address(entry.address)
                mask = entry.netmask if entry.family == socket.AF_INET else None
                text = f"{address}/{mask}" if mask else address
                interfaces[name] = ip_interface(text).with_prefixlen
    return interfaces


def is_loopback(address: str) -> bool:
    """Return whether only this host reaches an address, with or without a prefix."""
    return ip_interface(address).is_loopback


def address_family(address: str) -> socket.AddressFamily:
    """Return the family of an IPv4 or IPv6 address."""
    return FAMILIES[":" in address]


def plain_address(address: str) -> str:
    """Return the address without a scope; an IPv4 address inside IPv6 as IPv4."""
    return address.partition("%")[0].removeprefix("::ffff:")


def serve(address: str, port: int, timeout: timedelta, one_host: bool = True) -> dist.TCPStore:
    """Start a store that clients find at this address; port 0 takes a free one.

    one_host: whether all clients run on this host. Raises OSError if the address is unknown or the
    port is in use.
    """
    return serve_on(listen(address, port, one_host), address, timeout)


def serve_on(server: socket.socket, address: str, timeout: timedelta) -> dist.TCPStore:
    """Start a store on a socket that listens on this address."""
    import torch
    import torch.distributed as dist

    return dist.TCPStore(
        address,
        int(server.getsockname()[1]),
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,  # ddpbench itself waits, and names missing ranks
        master_listen_fd=server.detach(),
        use_libuv=torch.__version__ >= (2, 8),  # type: ignore[operator]  # before it takes no socket
    )


def listen(address: str, port: int, one_host: bool = True) -> socket.socket:
    """Return a socket that listens only where clients of this address connect.

    It listens on all interfaces only if no interface has the address: if the address is forwarded
    to this host, or a name means loopback here but not on other hosts.
    """
    own, everywhere = None, address == "localhost"
    for family, _, _, _, entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM):
        if family in FAMILIES and (own is None or ":" in own):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((entry[0], 0))
                own = str(entry[0])
    with contextlib.suppress(ValueError):
        everywhere = ip_address(address).is_loopback
    if own is None or (is_loopback(own) and not one_host and not everywhere):
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    return socket.create_server((own, port), family=address_family(own), backlog=BACKLOG)


def exchange_stamps(
    peer: socket.socket, question: bytes, now_ns: Callable[[], int]
) -> tuple[int, int, int]:
    """Ask a peer for its time. Return the stamps of the question, of the peer and of the answer.

    Raises OSError as `receive` does.
    """
    sent_ns = now_ns()
    peer.sendall(question)
    answer = receive(peer, STAMP.size)
    return sent_ns, STAMP.unpack(answer)[0], now_ns()


def answer_stamp(peer: socket.socket, question: bytes, now_ns: Callable[[], int]) -> None:
    """Receive a question and answer with the time. Raises ConnectionError for another question."""
    if receive(peer, len(question)) != question:
        raise ConnectionError("it sent something other than the question")
    peer.sendall(STAMP.pack(now_ns()))


def receive(peer: socket.socket, nbytes: int) -> bytes:
    """Receive exactly `nbytes`. Raises ConnectionError at the end, TimeoutError without data."""
    data = b""
    while len(data) < nbytes:
        chunk = peer.recv(nbytes - len(data))
        if not chunk:
            raise ConnectionError("it closed the connection")
        data += chunk
    return data
