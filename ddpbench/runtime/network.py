"""Where gloo would listen in every rank, and why the ranks could not connect there: found out over
the store, before gloo would wait for them in vain.

gloo listens on the interfaces of GLOO_SOCKET_IFNAME, else on the address that the host's own name
resolves to, else on loopback. Of two ranks the one with the higher address connects.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address, ip_interface

from ddpbench.launch import sockets

GLOO = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class NetPlace:
    """One rank's place in the network."""

    rank: int
    host: str  # its name
    network: str  # equal for ranks of one host
    why: str  # what makes gloo listen there
    listening: Mapping[str, int]  # address of gloo → port, on which this rank listens for a test
    interfaces: Mapping[str, str]  # of the host: name → "10.0.0.1/24"
    absent: str | None = None  # an interface it was told, which the host does not have

    @property
    def who(self) -> str:
        return f"{self.host} (rank {self.rank})"

    @property
    def has(self) -> str:
        """The host's interfaces, in words."""
        return ", ".join(f"{name} {address}" for name, address in self.interfaces.items())

    @property
    def addresses(self) -> frozenset[str]:
        """All of the host."""
        return frozenset(address.partition("/")[0] for address in self.interfaces.values())


@contextlib.contextmanager
def standing(rank: int, network: str, said: str | None) -> Iterator[NetPlace]:
    """This rank's place; it listens where gloo would while the context lasts.

    said: the value of GLOO_SOCKET_IFNAME.
    """
    interfaces, host = sockets.interfaces(), socket.gethostname()
    names = said.split(",") if said and len(said) > 1 else []  # torch ignores a single letter
    if names:
        wanted = [interfaces[n].partition("/")[0] for n in names if n in interfaces]
        why = f"has {GLOO}={said}"
    else:
        address, why = _of_own_name(host)
        wanted = [address]
    listening = {}
    with contextlib.ExitStack() as servers:
        for address in wanted:
            server = servers.enter_context(socket.socket(sockets.family(address)))
            with contextlib.suppress(OSError):
                server.bind((address, 0))
                server.listen(1024)
                listening[address] = int(server.getsockname()[1])
        absent = next((name for name in names if name not in interfaces), None)
        yield NetPlace(rank, host, network, why, listening, interfaces, absent)


@contextlib.contextmanager
def kept_on_loopback(places: Sequence[NetPlace]) -> Iterator[None]:
    """A gloo group made meanwhile listens on loopback, where these ranks share a host and nobody
    has chosen an interface."""
    has = places[0].interfaces
    loopback = next((name for name, address in has.items() if sockets.is_loopback(address)), None)
    if loopback is None or GLOO in os.environ or len({place.network for place in places}) > 1:
        yield
        return
    os.environ[GLOO] = loopback
    try:
        yield
    finally:
        del os.environ[GLOO]


def objection(places: Sequence[NetPlace]) -> str | None:
    """Why gloo cannot connect these ranks, known without trying; None where it may."""
    for place in places:
        if place.absent is not None:
            return (
                f"{place.who} {place.why}, and there is no interface {place.absent} with an "
                f"address: it has {place.has}; correct {GLOO} there"
            )
    users: dict[str, NetPlace] = {}
    for place in places:
        other = next((each for each in places if each.network != place.network), None)
        if other is None:
            return None  # ranks of one host reach each other on whatever it has
        for address in place.listening:
            user = users.setdefault(address, place)
            if sockets.is_loopback(address):
                return (
                    f"{place.who} {place.why}, so gloo would listen on {address}, which "
                    f"{other.host} cannot reach: {_advice(place, other)}"
                )
            if user.network != place.network:
                return (
                    f"{user.who} and {place.who} have the same address {address} for gloo: "
                    f"{_advice(user, place)}, {_advice(place, user)}"
                )
    return None


def unreached(rank: int, places: Sequence[NetPlace], seconds: float) -> str | None:
    """Why this rank cannot connect to where another host's gloo listens, after trying in the
    direction in which gloo would; None where it can.

    seconds: how long an answer may take.
    """
    me, first = places[rank], {place.network: place for place in reversed(places)}
    if first[me.network] is not me:
        return None  # one rank tries for its host
    mine = max((ip_address(address).packed for address in me.listening), default=b"")
    targets = {
        (address, port): place
        for place in first.values()
        for address, port in place.listening.items()
        if place.network != me.network and ip_address(address).packed < mine
    }
    for target, why in sockets.failures(list(targets), seconds).items():
        place = targets[target]
        return (
            f"{me.who} cannot connect to {place.who} at {target[0]}, where gloo would listen, "
            f"because it {place.why} ({why}; {me.host} has {me.has}): {_advice(place, me)}, "
            f"{_advice(me, place)}"
        )
    return None


def misnamed(
    variable: str, several_hosts: bool, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Why no interface of this host fits what NCCL was told in a variable; None where one does.

    NCCL takes "eth0,ib" as beginnings of names, "=eth0" as a whole name, "^docker" as what not.
    """
    said, interfaces = environ.get(variable, ""), sockets.interfaces()
    words = [word + ("" if "=" in said[:2] else "*") for word in said.lstrip("^=").split(",")]
    fitting = [
        name
        for name, address in interfaces.items()
        if any(fnmatchcase(name, word) for word in words) != said.startswith("^")
        and not (several_hosts and sockets.is_loopback(address))
    ]
    if not said or fitting:
        return None
    there = ", ".join(f"{name} {address}" for name, address in interfaces.items())
    reached = "that other hosts can reach " if several_hosts else ""
    return (
        f"{variable}={said} fits no interface {reached}on {socket.gethostname()}, which has {there}"
    )


def unknown(name: str) -> str | None:
    """Why ranks cannot meet at a host of this name; None where it resolves here."""
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return (
            f"{socket.gethostname()} cannot resolve {name}, where the ranks are to meet "
            f"({error.strerror}): give --master-addr an address, or add the name to /etc/hosts"
        )
    return None


def _of_own_name(host: str) -> tuple[str, str]:
    """The address that gloo takes when it is told no interface, and why."""
    found = []
    with contextlib.suppress(OSError):
        for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            found.append(str(entry[4][0]))
            with contextlib.suppress(OSError), socket.socket(entry[0]) as probe:
                probe.bind(entry[4])
                return sockets.plain(found[-1]), f"resolves its own name to {found[-1]}"
    if found:
        return "127.0.0.1", f"resolves its own name to {found[0]}, which is not its own"
    return "127.0.0.1", "cannot resolve its own name"


def _advice(place: NetPlace, other: NetPlace) -> str:
    """What to set on a host so that the other reaches it: an interface on a subnet of both."""
    usable = {n: ip_interface(a) for n, a in place.interfaces.items() if not sockets.is_loopback(a)}
    theirs = [ip_interface(address) for address in other.interfaces.values()]
    shared = [
        name
        for name, mine in usable.items()
        if any(mine.network == each.network and mine.ip != each.ip for each in theirs)
    ]
    if names := shared or list(usable):
        return f"on {place.host} export {GLOO}={' or '.join(names)}"
    return f"give {place.host} an address first"
