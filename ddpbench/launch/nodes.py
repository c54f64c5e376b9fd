"""Nodes that hold unequal numbers of ranks: which node is which, and whether all agree.

Each node's launcher announces what it was started with, in a store that node 0 keeps. Node 0
compares the announcements and answers all of them before any rank starts. No torch is imported
before nodes meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ddpbench.launch import placement, rendezvous
from ddpbench.launch.placement import Refused

if TYPE_CHECKING:
    import torch.distributed as dist

KEYS = "ddpbench/nodes"
LATE_SECONDS = 10.0  # for the remaining nodes, once two disagree
ANSWER_SECONDS = 5.0  # of the store, while ranks run


@dataclass(frozen=True)
class Nodes:
    """The number of ranks on each node, in order of rank, and the nodes' names if known."""

    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return sum(self.ranks)

    def label(self, index: int) -> str:
        """ "2 (vm3)", for sentences."""
        return f"{index} ({self.names[index]})" if self.names else str(index)

    def environ(self, index: int, address: str, port: int) -> list[dict[str, str]]:
        """The variables that torchrun would set for each rank of one node."""
        first = sum(self.ranks[:index])
        return [
            {
                "RANK": str(first + local),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(self.ranks[index]),
                "GROUP_RANK": str(index),
                "GROUP_WORLD_SIZE": str(len(self.ranks)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                # The store listens already, in node 0's launcher: it outlives any rank.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            for local in range(self.ranks[index])
        ]


def read_hosts(path: Path) -> Nodes:
    """The nodes of a file with a line "NAME slots=N" or "NAME N" each; `#` begins a comment.

    Raises Refused with the first line that is not of this form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(f"--hosts {path} cannot be read: {reason}") from None
    names, ranks = [], []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = re.fullmatch(r"(\S+)\s+(?:slots=)?([1-9]\d*)", entry)
        if match is None:
            raise Refused(
                f"--hosts {path}, line {number}: {entry!r} is not a node: write NAME slots=N"
            )
        names.append(match[1])
        ranks.append(int(match[2]))
    if not names:
        raise Refused(f"--hosts {path} names no node: write a line NAME slots=N for each")
    return Nodes(tuple(ranks), tuple(names))


def find_local_nodes(nodes: Nodes) -> list[int]:
    """Indices of the named nodes that are this machine, by its name or addresses."""
    own_names = {socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn()}
    addresses = {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    }
    return [
        index
        for index, name in enumerate(nodes.names)
        if name in own_names or _resolve(name) & addresses
    ]


def _resolve(name: str) -> set[str]:
    with contextlib.suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    return set()


@dataclass(frozen=True)
class Announcement:
    """What one node's launcher was started with."""

    node: int
    host: str  # by the name in its list, else by its own
    pid: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def node_list(self) -> str:
        """The node's list, for sentences: "4,2", or "vm1:4,vm2:2"."""
        if not self.names:
            return ",".join(map(str, self.ranks))
        return ",".join(f"{n}:{r}" for n, r in zip(self.names, self.ranks, strict=True))

    def agrees_with(self, other: Announcement) -> bool:
        """Whether both describe the same nodes, as far as both name them."""
        names = not self.names or not other.names or self.names == other.names
        return names and self.ranks == other.ranks


def find_objection(announcements: Sequence[Announcement]) -> str | None:
    """Why these nodes cannot run together, naming them; None if they can."""
    if not all(announcement.agrees_with(announcements[0]) for announcement in announcements):
        lists: dict[str, list[str]] = {}
        for announcement in sorted(announcements, key=lambda announcement: announcement.node):
            label = f"{announcement.node} ({announcement.host})"
            lists.setdefault(announcement.node_list, []).append(label)
        statements = "; ".join(
            f"{'nodes' if len(labels) > 1 else 'node'} {', '.join(labels)} with {node_list}"
            for node_list, labels in lists.items()
        )
        return (
            f"the nodes were started with different numbers of ranks: {statements}; start all with "
            "the same --ranks-per-node or --hosts"
        )
    first: dict[int, Announcement] = {}
    for this in announcements:
        other = first.setdefault(this.node, this)
        if other is not this:
            return (
                f"node {this.node} was started twice, on {other.host} (pid {other.pid}) and on "
                f"{this.host} (pid {this.pid}): give each node its own --node-rank"
            )
    return None


@dataclass(frozen=True)
class Meeting:
    """All nodes, once they have met: what a launcher shares with the others while its ranks run."""

    store: dist.Store
    nodes: Nodes
    index: int

    def has_failed(self) -> bool:
        """Whether ranks of another node have failed, or node 0 has left."""
        try:
            return self.store.check([f"{KEYS}/failed"])
        except RuntimeError:
            return True

    def end(self, code: int) -> int:
        """Report how this node's ranks ended; returns the code, on node 0 the highest of all."""
        with contextlib.suppress(RuntimeError):
            if code not in (0, 130):
                self.store.set(f"{KEYS}/failed", str(code))
            self.store.set(f"{KEYS}/end/{self.index}", str(code))
            if self.index == 0:  # the store lives here: the others need it to their own end
                others = [f"{KEYS}/end/{i}" for i in range(1, len(self.nodes.ranks))]
                deadline = time.monotonic() + 2 * LATE_SECONDS
                while not (complete := self.store.check(others)) and time.monotonic() < deadline:
                    time.sleep(0.05)
                if not complete:
                    others = [key for key in others if self.store.check([key])]
                return max([code, *(int(self.store.get(key)) for key in others)])
        return code


def meet(nodes: Nodes, index: int, address: str, port: int, seconds: float) -> Meeting:
    """Wait for all nodes.

    Raises Refused, the same on all that came, if some do not come in time or disagree.
    """
    # c10d warns of every address that has no name; Refused says what matters in one sentence.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed as dist

    if index:
        _await_port(nodes, index, address, port, seconds)
    else:
        _require_own(address)
        placement.require_free(port)
    try:
        timeout = timedelta(seconds=seconds)
        if index:
            store = dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)
        else:
            store = rendezvous.serve(address, port, timeout, one_host=len(nodes.ranks) == 1)
        host = nodes.names[index] if nodes.names else socket.gethostname()
        announcement = Announcement(index, host, os.getpid(), nodes.ranks, nodes.names)
        ticket = store.add(f"{KEYS}/tickets", 1)
        store.set(f"{KEYS}/said/{ticket}", json.dumps(asdict(announcement)))
        if index == 0:
            _decide(store, nodes, seconds)
        _await_verdict(store, nodes, index, ticket, seconds + 2 * LATE_SECONDS)
        store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise Refused(
            f"node {nodes.label(index)} lost the connection to node {nodes.label(0)} at "
            f"{address}:{port}, where the nodes meet: {reason}"
        ) from None
    return Meeting(store, nodes, index)


def _require_own(address: str) -> None:
    """Raises Refused unless the address is this machine's, where node 0 listens."""
    try:
        candidates = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, socket_address in candidates:
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.bind(socket_address)
                return
    except socket.gaierror as error:
        raise Refused(_explain_unresolved(address, error)) from None
    raise Refused(
        f"{address} is not an address of this host ({socket.gethostname()}), where node 0 must "
        "listen: start node 0 on the host with that address, or give an address of this host as "
        "--master-addr on all nodes"
    )


def _explain_unresolved(address: str, error: OSError) -> str:
    return (
        f"this host cannot resolve the name of node 0, {address} ({error.strerror}): give its IP "
        "address as --master-addr"
    )


def _await_port(nodes: Nodes, index: int, address: str, port: int, seconds: float) -> None:
    """Wait until node 0 listens; done here because c10d would warn at every attempt."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=min(left, 2.0)).close()
        except socket.gaierror as error:
            raise Refused(_explain_unresolved(address, error)) from None
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise Refused(
        f"node {nodes.label(index)} could not reach node 0 at {address}:{port} within "
        f"{seconds:g} s (--timeout): start node 0, or check what blocks its port"
    )


def _decide(store: dist.Store, nodes: Nodes, seconds: float) -> None:
    """On node 0: read the announcements that come in time, and tell all whether they may start."""
    announcements: list[Announcement] = []
    deadline, objection = time.monotonic() + seconds, None
    while True:
        for ticket in range(len(announcements) + 1, store.add(f"{KEYS}/tickets", 0) + 1):
            fields = json.loads(store.get(f"{KEYS}/said/{ticket}"))
            lists = {name: tuple(fields[name]) for name in ("ranks", "names")}
            announcements.append(Announcement(**{**fields, **lists}))
        absent = set(range(len(nodes.ranks))) - {each.node for each in announcements}
        if objection is None and (objection := find_objection(announcements)) is not None:
            deadline = min(deadline, time.monotonic() + LATE_SECONDS)
        if not absent or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    objection = find_objection(announcements)
    if objection is None and absent:
        objection = (
            f"{len(absent)} of {len(nodes.ranks)} nodes did not join within {seconds:g} s "
            f"(--timeout): {', '.join(nodes.label(i) for i in sorted(absent))}; check why they did "
            "not start"
        )
    verdict = {"wrong": objection, "tickets": len(announcements)}
    store.set(f"{KEYS}/verdict", json.dumps(verdict))
    if objection is not None:  # the store lives here: stay until all that came have read it
        deadline = time.monotonic() + ANSWER_SECONDS
        others = len(announcements) - 1
        while store.add(f"{KEYS}/read", 0) < others and time.monotonic() < deadline:
            time.sleep(0.02)


def _await_verdict(
    store: dist.Store, nodes: Nodes, index: int, ticket: int, seconds: float
) -> None:
    """Wait for node 0's answer. Raises Refused if it objects or does not answer."""
    deadline = time.monotonic() + seconds
    while not store.check([f"{KEYS}/verdict"]):
        if time.monotonic() > deadline:
            raise Refused(f"node {nodes.label(0)} did not answer within {seconds:g} s")
        time.sleep(0.02)
    verdict = json.loads(store.get(f"{KEYS}/verdict"))
    store.add(f"{KEYS}/read", 1)
    if verdict["wrong"] is not None:
        raise Refused(verdict["wrong"])
    if ticket > verdict["tickets"]:
        raise Refused(
            f"node {nodes.label(index)} started after all nodes had met: "
            "give each node its own --node-rank, and each run its own --master-port"
        )
