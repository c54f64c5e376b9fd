"""Nodes that hold unequal numbers of ranks: who is which, and that all were told the same.

Each node's launcher says in a store, which node 0 keeps, what it was started with; node 0 compares
and answers all of them, before any rank starts. No torch is imported before nodes meet.
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
LATE_SECONDS = 10.0  # for the nodes still to come, once two were found to disagree
ANSWER_SECONDS = 5.0  # of the store, while ranks run


@dataclass(frozen=True)
class Nodes:
    """How many ranks each node holds, in order of rank; the nodes' names where they are known."""

    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return sum(self.ranks)

    def named(self, index: int) -> str:
        """ "2 (vm3)", for sentences."""
        return f"{index} ({self.names[index]})" if self.names else str(index)

    def environ(self, index: int, address: str, port: int) -> list[dict[str, str]]:
        """What torchrun would tell each rank of one node."""
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

    Raises Refused with the line that is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(f"--hosts {path} cannot be read: {reason}") from None
    names, ranks = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        found = re.fullmatch(r"(\S+)\s+(?:slots=)?([1-9]\d*)", words)
        if found is None:
            raise Refused(
                f"--hosts {path}, line {number}: {words!r} is no node: write NAME slots=N"
            )
        names.append(found[1])
        ranks.append(int(found[2]))
    if not names:
        raise Refused(f"--hosts {path} names no node: write a line NAME slots=N for each")
    return Nodes(tuple(ranks), tuple(names))


def here(nodes: Nodes) -> list[int]:
    """Which of the named nodes are this machine, by its name or by its addresses."""
    mine = {socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn()}
    addresses = {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    }
    return [i for i, name in enumerate(nodes.names) if name in mine or _resolved(name) & addresses]


def _resolved(name: str) -> set[str]:
    with contextlib.suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    return set()


@dataclass(frozen=True)
class Said:
    """What one node's launcher was started with."""

    node: int
    host: str  # by the name in its list, else by its own
    pid: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def told(self) -> str:
        """Its list, for sentences."""
        if not self.names:
            return ",".join(map(str, self.ranks))
        return ",".join(f"{n}:{r}" for n, r in zip(self.names, self.ranks, strict=True))

    def like(self, other: Said) -> bool:
        """Whether both describe the same nodes, as far as both say it."""
        names = not self.names or not other.names or self.names == other.names
        return names and self.ranks == other.ranks


def objection(heard: Sequence[Said]) -> str | None:
    """Why these nodes cannot run together, naming them; None when nothing speaks against it."""
    first = heard[0]
    if not all(each.like(first) for each in heard):
        lists: dict[str, list[str]] = {}
        for each in sorted(heard, key=lambda each: each.node):
            lists.setdefault(each.told, []).append(f"{each.node} ({each.host})")
        says = "; ".join(
            f"node{'s' if len(who) > 1 else ''} {', '.join(who)} "
            f"{'say' if len(who) > 1 else 'says'} {told}"
            for told, who in lists.items()
        )
        return (
            f"the nodes disagree about the ranks on each: {says}; start all with the same "
            "--ranks-per-node or --hosts"
        )
    for number, each in enumerate(heard):
        for other in heard[:number]:
            if other.node == each.node:
                return (
                    f"node {each.node} was started twice, on {other.host} (pid {other.pid}) and on "
                    f"{each.host} (pid {each.pid}): give each node its own --node-rank"
                )
    return None


@dataclass(frozen=True)
class Meeting:
    """All nodes, met: what one node's launcher shares with the others while its ranks run."""

    store: dist.Store
    nodes: Nodes
    index: int

    def lost(self) -> bool:
        """Whether ranks of another node have failed, or node 0 has left."""
        try:
            return self.store.check([f"{KEYS}/failed"])
        except RuntimeError:
            return True

    def end(self, code: int) -> int:
        """Tell how this node's ranks ended; in node 0 the highest code of all nodes."""
        with contextlib.suppress(RuntimeError):
            if code not in (0, 130):
                self.store.set(f"{KEYS}/failed", str(code))
            self.store.set(f"{KEYS}/end/{self.index}", str(code))
            if self.index == 0:  # the store lives here: the others need it to their own end
                others = [f"{KEYS}/end/{i}" for i in range(1, len(self.nodes.ranks))]
                until = time.monotonic() + 2 * LATE_SECONDS
                while not (came := self.store.check(others)) and time.monotonic() < until:
                    time.sleep(0.05)
                if not came:
                    others = [key for key in others if self.store.check([key])]
                return max([code, *(int(self.store.get(key)) for key in others)])
        return code


def meet(nodes: Nodes, index: int, address: str, port: int, seconds: float) -> Meeting:
    """Wait for all nodes. Raises Refused, the same in all that came, when some do not come in time
    or were told otherwise."""
    # c10d warns of every address that has no name; what matters here is told in one sentence.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed as dist

    if index:
        _await_port(nodes, index, address, port, seconds)
    else:
        _require_own(address)
        placement.require_free(port)
    try:
        patience = timedelta(seconds=seconds)
        if index:
            store = dist.TCPStore(address, port, timeout=patience, wait_for_workers=False)
        else:
            store = rendezvous.serve(address, port, patience, one_host=len(nodes.ranks) == 1)
        host = nodes.names[index] if nodes.names else socket.gethostname()
        mine = Said(index, host, os.getpid(), nodes.ranks, nodes.names)
        ticket = store.add(f"{KEYS}/tickets", 1)
        store.set(f"{KEYS}/said/{ticket}", json.dumps(asdict(mine)))
        if index == 0:
            _decide(store, nodes, seconds)
        _obey(store, nodes, index, ticket, seconds + 2 * LATE_SECONDS)
        store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise Refused(
            f"node {nodes.named(index)} lost node {nodes.named(0)}, where the nodes meet "
            f"({address}:{port}): {reason}"
        ) from None
    return Meeting(store, nodes, index)


def _require_own(address: str) -> None:
    """Node 0 listens on this machine, so the others must find it under an address of its own."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.bind(where)
                return
    except socket.gaierror as error:
        raise Refused(_unresolved(address, error)) from None
    raise Refused(
        f"{address} is no address of this machine ({socket.gethostname()}), where node 0 would "
        "listen: start node 0 there, or give node 0's own as --master-addr on all nodes"
    )


def _unresolved(address: str, error: OSError) -> str:
    return (
        f"the name of node 0, {address}, cannot be looked up here ({error.strerror}): give its IP "
        "address as --master-addr"
    )


def _await_port(nodes: Nodes, index: int, address: str, port: int, seconds: float) -> None:
    """Until node 0 listens; looked for here because c10d would warn at every attempt."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=min(left, 2.0)).close()
        except socket.gaierror as error:
            raise Refused(_unresolved(address, error)) from None
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise Refused(
        f"node {nodes.named(index)} found no node 0 at {address}:{port} within {seconds:g} s "
        "(--timeout): start node 0 too, or see what keeps its port closed"
    )


def _decide(store: dist.Store, nodes: Nodes, seconds: float) -> None:
    """Node 0 hears all nodes, or those that come in time, and tells whether they may start."""
    heard: list[Said] = []
    until, wrong = time.monotonic() + seconds, None
    while True:
        for ticket in range(len(heard) + 1, store.add(f"{KEYS}/tickets", 0) + 1):
            raw = json.loads(store.get(f"{KEYS}/said/{ticket}"))
            heard.append(
                Said(**{**raw, "ranks": tuple(raw["ranks"]), "names": tuple(raw["names"])})
            )
        absent = set(range(len(nodes.ranks))) - {each.node for each in heard}
        if wrong is None and (wrong := objection(heard)) is not None:
            until = min(until, time.monotonic() + LATE_SECONDS)
        if not absent or time.monotonic() > until:
            break
        time.sleep(0.02)
    wrong = objection(heard)
    if wrong is None and absent:
        wrong = (
            f"of {len(nodes.ranks)} nodes these did not come within {seconds:g} s (--timeout): "
            f"{', '.join(nodes.named(i) for i in sorted(absent))}; see why they did not start"
        )
    store.set(f"{KEYS}/verdict", json.dumps({"wrong": wrong, "tickets": len(heard)}))
    if wrong is not None:  # the store lives here: until all that came have read it
        until = time.monotonic() + ANSWER_SECONDS
        while store.add(f"{KEYS}/read", 0) < len(heard) - 1 and time.monotonic() < until:
            time.sleep(0.02)


def _obey(store: dist.Store, nodes: Nodes, index: int, ticket: int, seconds: float) -> None:
    """Raises Refused when node 0 says so."""
    until = time.monotonic() + seconds
    while not store.check([f"{KEYS}/verdict"]):
        if time.monotonic() > until:
            raise Refused(f"node {nodes.named(0)} gave no answer within {seconds:g} s")
        time.sleep(0.02)
    verdict = json.loads(store.get(f"{KEYS}/verdict"))
    store.add(f"{KEYS}/read", 1)
    if verdict["wrong"] is not None:
        raise Refused(verdict["wrong"])
    if ticket > verdict["tickets"]:
        raise Refused(
            f"node {nodes.named(index)} came when all nodes were there and "
            "had begun: give each node its own --node-rank, and each run its own --master-port"
        )
