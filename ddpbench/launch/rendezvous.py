"""The store through which ranks meet, and the addresses on which it listens.

torch's TCPStore listens on every interface, and anybody who connects can read and write it. Here it
listens on the one address that the ranks use: loopback where they share a host.
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
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

TORCHRUN_BACKEND = "ddpbench"  # the name under which torchrun's agent finds `torchrun_handler`
BACKLOG = 2048  # all ranks connect at once


def serve(address: str, port: int, timeout: timedelta, one_host: bool = True) -> dist.TCPStore:
    """Start a store that clients find at this address; port 0 takes a free one.

    one_host: whether all clients are known to be on this host. Raises OSError when the address is
    unknown or the port is taken.
    """
    import torch
    import torch.distributed as dist

    server = listen(address, port, one_host)
    return dist.TCPStore(
        address,
        int(server.getsockname()[1]),
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,  # who is absent is to be found out, and named
        master_listen_fd=server.detach(),
        use_libuv=torch.__version__ >= (2, 8),  # type: ignore[operator]  # before it takes no socket
    )


def torchrun_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous of a torchrun agent that is alone: its ranks share a store on loopback."""
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    store = serve("127.0.0.1", 0, timedelta(minutes=1))

    class Handler(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return TORCHRUN_BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            where = RendezvousStoreInfo(store.host, store.port)
            return RendezvousInfo(store, 0, 1, where)

    return Handler(store.host, store.port, 0, 1, parameters.run_id, 60)


def listen(address: str, port: int, one_host: bool = True) -> socket.socket:
    """A socket that listens where clients of this address connect, and nowhere else.

    Only where this host cannot tell that address does it listen on all interfaces: for an address
    that is forwarded to this host, and for a name that means loopback here but not on other hosts.
    """
    own = _own(address)
    if own is None or (sockets.is_loopback(own) and not one_host and not _means_loopback(address)):
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    return socket.create_server((own, port), family=sockets.address_family(own), backlog=BACKLOG)


def _own(address: str) -> str | None:
    """The address of this host for which a name or address stands, IPv4 first; None where none."""
    found = [
        (family, str(where[0]))
        for family, *_, where in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        if family in sockets.FAMILIES
    ]
    for family, own in sorted(found, key=lambda each: sockets.FAMILIES.index(each[0])):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((own, 0))
            return own
    return None


def _means_loopback(address: str) -> bool:
    """Whether every host reads this as its own loopback."""
    with contextlib.suppress(ValueError):
        return ip_address(address).is_loopback
    return address == "localhost"
