"""The store through which ranks meet, and the addresses on which it listens.

torch's TCPStore listens on every interface, and anybody who connects can read and write it. Here
it listens on the one address that the ranks use: loopback if they share a host.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from ddpbench.launch import sockets

if TYPE_CHECKING:
    import torch.distributed as dist

BACKLOG = 2048  # all ranks connect at once


def serve(address: str, port: int, timeout: timedelta, one_host: bool = True) -> dist.TCPStore:
    """Start a store that clients find at this address; port 0 takes a free one.

    one_host: whether all clients are known to be on this host. Raises OSError if the address is
    unknown or the port is taken.
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
        wait_for_workers=False,  # to find out and name the absent ranks
        master_listen_fd=server.detach(),
        use_libuv=torch.__version__ >= (2, 8),  # type: ignore[operator]  # before it takes no socket
    )


def listen(address: str, port: int, one_host: bool = True) -> socket.socket:
    """A socket that listens where clients of this address connect, and nowhere else.

    It listens on all interfaces only if this host does not know the address: one that is forwarded
    to this host, or a name that means loopback here but not on other hosts.
    """
    own, everywhere = _find_own_address(address), address == "localhost"
    with contextlib.suppress(ValueError):
        everywhere = ip_address(address).is_loopback
    if own is None or (sockets.is_loopback(own) and not one_host and not everywhere):
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    return socket.create_server((own, port), family=sockets.address_family(own), backlog=BACKLOG)


def _find_own_address(address: str) -> str | None:
    """This host's address for a name or address, IPv4 first; None if it has none."""
    candidates = [
        (family, str(socket_address[0]))
        for family, *_, socket_address in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        if family in sockets.FAMILIES
    ]
    for family, own in sorted(candidates, key=lambda pair: sockets.FAMILIES.index(pair[0])):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((own, 0))
            return own
    return None
