"""Connections and addresses of this process and host."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_interface
from typing import Any

import psutil

FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class Connection:
    """One established TCP connection."""

    local: str
    local_port: int
    remote: str


def list_connections() -> frozenset[Connection]:
    """The connections of this process; empty if they cannot be read."""
    process: Any = psutil.Process()
    # psutil 6 renamed the method.
    read: Callable[..., Any] = getattr(process, "net_connections", None) or process.connections
    try:
        return frozenset(
            Connection(
                plain_address(entry.laddr.ip), entry.laddr.port, plain_address(entry.raddr.ip)
            )
            for entry in read(kind="tcp")
            if entry.status == psutil.CONN_ESTABLISHED
        )
    except psutil.Error:
        return frozenset()


def local_addresses(connections: Iterable[Connection], remote: frozenset[str]) -> list[str]:
    """Local addresses of the connections to these remote addresses, the most used first."""
    used = [connection.local for connection in connections if connection.remote in remote]
    return sorted(set(used), key=lambda address: (-used.count(address), address))


def try_connections(
    targets: Sequence[tuple[str, int]], seconds: float
) -> dict[tuple[str, int], str]:
    """Connect to addresses and ports at once: target → reason, for those that fail."""

    def attempt(target: tuple[str, int]) -> str:
        try:
            socket.create_connection(target, seconds).close()
        except OSError as error:
            return error.strerror or f"no answer in {seconds:g} s"
        return ""

    with ThreadPoolExecutor(max(1, len(targets))) as threads:
        reasons = zip(targets, threads.map(attempt, targets), strict=True)
        return {target: reason for target, reason in reasons if reason}


def wrap_file(number: int) -> socket.socket:
    """Return a socket of an open file, whose flags stay as they are. Not for calls that block.

    Without SOCK_NONBLOCK, Python makes the file non-blocking for all who share it, such as the
    library that opened it, where the program has called socket.setdefaulttimeout. With it, Python
    takes the file to be so already. Raises OSError if it is no socket.
    """
    return socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, fileno=number)


def list_interfaces() -> dict[str, str]:
    """Interfaces that have an IP address: name → "10.0.0.1/24"; IPv4 before IPv6, as in gloo."""
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
    """Whether only this host reaches an address, given with or without a prefix."""
    return ip_interface(address).is_loopback


def address_family(address: str) -> socket.AddressFamily:
    """The family of an IPv4 or IPv6 address."""
    return FAMILIES[":" in address]


def plain_address(address: str) -> str:
    """The address without a scope; an IPv4 address inside IPv6 as IPv4."""
    return address.partition("%")[0].removeprefix("::ffff:")
