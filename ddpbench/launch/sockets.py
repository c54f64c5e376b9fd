"""What sockets say: which connections this process has, and whether new ones come about."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
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


def connections() -> frozenset[Connection]:
    """Those of this process; none where they cannot be read."""
    process: Any = psutil.Process()
    # psutil 6 renamed it
    ask: Callable[..., Any] = getattr(process, "net_connections", None) or process.connections
    try:
        return frozenset(
            Connection(plain(one.laddr.ip), one.laddr.port, plain(one.raddr.ip))
            for one in ask(kind="tcp")
            if one.status == psutil.CONN_ESTABLISHED
        )
    except psutil.Error:
        return frozenset()


def local_addresses(those: Iterable[Connection], remote: frozenset[str]) -> list[str]:
    """The local ends of the connections to these remote addresses, the most used first."""
    used = [one.local for one in those if one.remote in remote]
    return sorted(set(used), key=lambda address: (-used.count(address), address))


def failures(targets: Sequence[tuple[str, int]], seconds: float) -> dict[tuple[str, int], str]:
    """Why no connection came about in time, of those addresses and ports to which none did."""
    failed: dict[tuple[str, int], str] = {}
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as sockets, selectors.DefaultSelector() as waiting:
        for target in targets:
            attempt = sockets.enter_context(socket.socket(family(target[0])))
            attempt.setblocking(False)
            code = attempt.connect_ex(target)
            if code in (0, errno.EINPROGRESS):
                waiting.register(attempt, selectors.EVENT_WRITE, (target, attempt))
            else:
                failed[target] = os.strerror(code)
        while waiting.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                target, attempt = waiting.unregister(key.fileobj).data
                if code := attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[target] = os.strerror(code)
        silent = [key.data[0] for key in waiting.get_map().values()]
    return failed | dict.fromkeys(silent, f"no answer in {seconds:g} s")


def interfaces() -> dict[str, str]:
    """All with an IP address, IPv4 before IPv6 as gloo takes it: name → "10.0.0.1/24"."""
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in sorted(entries, key=lambda entry: entry.family):
            if entry.family in FAMILIES and name not in found:
                address = plain(entry.address)
                mask = entry.netmask if entry.family == socket.AF_INET else None
                found[name] = ip_interface(f"{address}/{mask}" if mask else address).with_prefixlen
    return found


def is_loopback(address: str) -> bool:
    """Whether only this host itself reaches it; with or without a prefix."""
    return ip_interface(address).is_loopback


def family(address: str) -> socket.AddressFamily:
    """IPv4's or IPv6's."""
    return FAMILIES[":" in address]


def plain(address: str) -> str:
    """Without a scope, and of an IPv4 address within IPv6 the IPv4 one."""
    return address.partition("%")[0].removeprefix("::ffff:")
