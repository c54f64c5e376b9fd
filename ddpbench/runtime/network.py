"""Find where gloo would listen in every rank, and why ranks could not connect there.

The ranks check this over the store, before gloo would wait. gloo listens on the interfaces of
GLOO_SOCKET_IFNAME, else on the address to which the host's own name resolves, else on loopback.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_interface

from ddpbench.launch import sockets

GLOO = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Endpoint:
    """The addresses on which one rank's gloo listens, and why."""

    rank: int
    host: str  # its name
    network: str  # equal for ranks of one host
    reason: str  # why gloo listens there, as the rest of a sentence about the host
    listening: tuple[str, ...]
    interfaces: Mapping[str, str]  # of the host: name → "10.0.0.1/24"

    @property
    def name(self) -> str:
        return f"{self.host} (rank {self.rank})"

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(address.partition("/")[0] for address in self.interfaces.values())


def find_endpoint(rank: int, network: str, requested: str | None) -> Endpoint:
    """Return this rank's endpoint. requested: the value of GLOO_SOCKET_IFNAME."""
    interfaces, host = sockets.list_interfaces(), socket.gethostname()
    if requested and len(requested) > 1:  # torch ignores a single letter
        names = [name for name in requested.split(",") if name in interfaces]
        listening = tuple(interfaces[name].partition("/")[0] for name in names)
        return Endpoint(rank, host, network, f"has {GLOO}={requested}", listening, interfaces)
    address, reason = _resolve_own_name(host)
    return Endpoint(rank, host, network, reason, (address,), interfaces)


@contextlib.contextmanager
def keep_gloo_on_loopback(endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Let a gloo group that is created in this context listen on loopback.

    Only if these ranks share a host and the user has not chosen an interface.
    """
    interfaces = endpoints[0].interfaces
    loopback = next((n for n, address in interfaces.items() if sockets.is_loopback(address)), None)
    if loopback is None or GLOO in os.environ or len({each.network for each in endpoints}) > 1:
        yield
        return
    os.environ[GLOO] = loopback
    try:
        yield
    finally:
        del os.environ[GLOO]


def find_objection(endpoints: Sequence[Endpoint]) -> str | None:
    """Return why gloo cannot connect these ranks, without trying; None if it may."""
    for endpoint in endpoints:
        # Ranks of one host reach each other on any interface.
        other = next((other for other in endpoints if other.network != endpoint.network), None)
        for address in endpoint.listening if other else ():
            assert other is not None
            if sockets.is_loopback(address) or address in other.addresses:
                return (
                    f"{endpoint.name} {endpoint.reason}, so gloo would listen on {address}, which "
                    f"{other.host} cannot reach: {_advise(endpoint, other)}"
                )
    return None


def matches_names(value: str, name: str) -> bool:
    """Return whether a variable of NCCL allows this interface or adapter.

    NCCL takes "eth0,ib" as beginnings of names, "=eth0" as a whole name, "^docker" as an exclusion.
    """
    patterns = [
        entry + ("" if "=" in value[:2] else "*") for entry in value.lstrip("^=").split(",")
    ]
    return any(fnmatchcase(name, pattern) for pattern in patterns) != value.startswith("^")


def _resolve_own_name(host: str) -> tuple[str, str]:
    """Return the address that gloo uses if no interface is requested, and the reason."""
    addresses = []
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            addresses.append(str(address[0]))
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind(address)
                plain = sockets.plain_address(addresses[-1])
                return plain, f"resolves its own name to {addresses[-1]}"
    if addresses:
        return "127.0.0.1", f"resolves its own name to {addresses[0]}, an address it does not have"
    return "127.0.0.1", "cannot resolve its own name"


def _advise(endpoint: Endpoint, other: Endpoint) -> str:
    """Return what to set on a host so that the other reaches it: an interface on their subnet."""
    networks = {ip_interface(address).network for address in other.interfaces.values()}
    usable = {
        name: ip_interface(address).network
        for name, address in endpoint.interfaces.items()
        if not sockets.is_loopback(address) and address.partition("/")[0] not in other.addresses
    }
    names = [name for name, network in usable.items() if network in networks] or list(usable)
    return f"on {endpoint.host} export {GLOO}={' or '.join(names) or 'an interface'}"
