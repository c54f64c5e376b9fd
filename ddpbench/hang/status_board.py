"""The ranks' processes, and the board on which ranks publish their status: a part of their store.

A request never blocks the caller for longer than it allows, because the host of the store may be
stopped itself. Each rank keeps the last heartbeat of rank 0, which usually has the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import psutil

from ddpbench.hang.verdict import ALIVE, DIED, ENDED, LEFT, STOPPED, RankStatus, SilentRank
from ddpbench.launch import cleanup
from ddpbench.launch.supervise import Clock
from ddpbench.records import codec, redact
from ddpbench.records.terminal_text import escape_lines

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
ANSWER_SECONDS = 1.0  # a living store answers within this time
PRINT_SECONDS = 2.0
POLL_SECONDS = 0.05  # between two looks at a key
STORE_TIMEOUT = timedelta(seconds=5)
CLOSE_SECONDS = 0.5


@dataclass(frozen=True)
class RankIdentity:
    """The process of a rank: its name in messages, and how to observe it from its own host."""

    rank: int
    host: str
    pid: int
    boot_id: str  # identifies the machine
    network: str = ""  # identifies the network namespace: each is a host, even on one machine
    processes: str = ""  # identifies the namespace of the pid

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def sees(self, other: RankIdentity) -> bool:
        """Return whether this rank's process can observe the other's."""
        return (self.boot_id, self.processes) == (other.boot_id, other.processes)


def identify(rank: int) -> RankIdentity:
    """Return this process's identity as a rank."""
    host = socket.gethostname()
    boot_id = cleanup.read_text(Path("/proc/sys/kernel/random/boot_id")).strip() or host
    network, processes = (str(Path("/proc/self/ns", kind).readlink()) for kind in ("net", "pid"))
    return RankIdentity(rank, host, os.getpid(), boot_id, network, processes)


def observe_state(identity: RankIdentity, own: RankIdentity) -> str:
    """Return the state of another rank's process, as the end of "rank 3 (host, pid 7) …"."""
    if not own.sees(identity):
        return "did not answer (stopped, dead or cut off)"
    try:
        status = psutil.Process(identity.pid).status()
    except psutil.Error:
        return DIED
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return DIED
    return STOPPED if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ALIVE


class Address(NamedTuple):
    """Where a TCPStore serves, and how long the job itself waits for it."""

    host: str
    port: int
    timeout: timedelta


class StoreClient:
    """A separate connection to the ranks' store, used by a thread that may hang with it."""

    def __init__(self, place: Address | dist.Store) -> None:
        import torch.distributed as dist

        self.gone = False  # whether a request has failed
        if not isinstance(place, Address):
            self.store = place
        else:
            self.store = dist.TCPStore(
                *place[:2], is_master=False, timeout=place.timeout, wait_for_workers=False
            )
            self.store.set_timeout(STORE_TIMEOUT)
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="ddpbench-store", daemon=True)
        self._thread.start()

    def request(self, seconds: float, function: Callable[[dist.Store], T]) -> T | None:
        """Return what the function of the store returns, None if it fails or takes longer."""
        answers: list[T] = []
        done = threading.Event()

        def attempt() -> None:
            try:
                answers.append(function(self.store))
            except (RuntimeError, ValueError):
                self.gone = True
            done.set()

        if not self.gone:
            self._requests.put(attempt)
            done.wait(seconds)
        return answers[0] if answers else None

    def close(self) -> None:
        """End the thread, unless the store does not answer it."""
        self._requests.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        while (attempt := self._requests.get()) is not None:
            attempt()


def find_store(store: dist.Store) -> Address | dist.Store:
    """Return the address of the server behind a store; the store itself if it has no server.

    A reference to a TCPStore would keep its server alive after the process group.
    """
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        server: Any = store  # torch's stubs lack its timeout
        return Address(server.host, server.port, server.timeout)
    return store


@dataclass(frozen=True)
class Heartbeat:
    """A rank's identity, and its brief status."""

    identity: RankIdentity
    status: RankStatus


class Board:
    """One rank's view of the statuses that all ranks publish.

    identities: by rank; None for one of which no heartbeat was read.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        identity: RankIdentity,
        identities: Sequence[RankIdentity | None],
        clock: Clock = time,
    ) -> None:
        self.client, self.clock = StoreClient(find_store(store)), clock
        self.identity, self.rank, self.identities = identity, identity.rank, list(identities)
        self._prefix = prefix
        self._heartbeat_0: bytes | None = None

    def key(self, *parts: object) -> str:
        """Return a key of the store."""
        return "/".join([self._prefix, *map(str, parts)])

    def publish(self, record: Any, *parts: object) -> bool:
        """Store a record as JSON under a key; return whether the store answered in time."""
        text, key = codec.encode(record, None).decode(), self.key(*parts)

        def put(store: dist.Store) -> bool:
            store.set(key, text)
            return store.check([key])

        return self.client.request(ANSWER_SECONDS, put) is not None

    def mark(self, *parts: object) -> bool:
        """Create a key; return whether this rank is the first to, or the store does not answer."""
        key = self.key(*parts)
        first = self.client.request(ANSWER_SECONDS, lambda store: store.add(key, 1) == 1)
        return first is not False

    def await_keys(self, keys: list[str], seconds: float) -> bytes | None:
        """Return the value of the first key once all exist, None after this time."""
        until = self.clock.monotonic() + seconds

        def read(store: dist.Store) -> bytes | None:
            while not (complete := store.check(keys)) and self.clock.monotonic() < until:
                self.clock.sleep(POLL_SECONDS)
            return store.get(keys[0]) if complete else None

        return self.client.request(seconds + ANSWER_SECONDS, read)

    def publish_heartbeat(self, status: RankStatus, seconds: float = ANSWER_SECONDS) -> bool:
        """Publish a heartbeat and fetch rank 0's; return whether the store answered in time."""
        text = codec.encode(Heartbeat(self.identity, status), None).decode()
        key_0 = self.key("beat", 0)

        def exchange(store: dist.Store) -> bool:
            store.set(self.key("beat", self.rank), text)
            if self.rank and store.check([key_0]):
                self._heartbeat_0 = store.get(key_0)
            return True

        return self.client.request(seconds, exchange) is not None

    def read_heartbeats(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the last heartbeats of the ranks that have published one; of rank 0 even if the
        store does not answer."""
        found = {0: self._heartbeat_0} if self._heartbeat_0 is not None else {}
        found |= self._read("beat", ranks) or {}
        heartbeats = {r: codec.decode(Heartbeat, json.loads(data)) for r, data in found.items()}
        for rank, heartbeat in heartbeats.items():
            self.identities[rank] = heartbeat.identity
        return {rank: heartbeat.status for rank, heartbeat in heartbeats.items()}

    def collect_statuses(
        self, topic: str, status: RankStatus, seconds: float
    ) -> tuple[dict[int, RankStatus], list[SilentRank], bool]:
        """Publish this rank's status under a topic and read those of the others.

        Returns the statuses by rank, the ranks that did not answer, and whether the store answered:
        its host may have failed. Does not wait for ranks that have left, died or are stopped.
        """
        statuses, left, ranks = {self.rank: status}, set[int](), range(len(self.identities))
        until = self.clock.monotonic() + seconds
        answers = self.publish(status, topic, self.rank)
        self.read_heartbeats(ranks)
        while answers and (absent := set(ranks) - set(statuses)):
            found, gone = self._read(topic, absent), self._read("left", absent)
            answers = found is not None and gone is not None
            left |= set(gone or ())
            for rank, data in (found or {}).items():
                statuses[rank] = codec.decode(RankStatus, json.loads(data))
            states = {self.observe(rank) for rank in absent - left - set(statuses)}
            if states <= {DIED, STOPPED} or self.clock.monotonic() > until:
                break
            self.clock.sleep(POLL_SECONDS)
        heartbeats = self.read_heartbeats(ranks)
        silent = []
        for rank, identity in enumerate(self.identities):
            if rank not in statuses:
                state = LEFT if rank in left else self.observe(rank)
                if rank == 0 and self.client.gone and state in (ALIVE, DIED):
                    state = ENDED
                name = str(identity or f"rank {rank}")
                silent.append(SilentRank(rank, name, state, heartbeats.get(rank)))
        return statuses, silent, answers

    def observe(self, rank: int) -> str:
        """Return the state of a rank's process, as the end of "rank 3 (host, pid 7) …"."""
        identity = self.identities[rank]
        if identity is None:
            return "has not called ddpbench.watchdog"
        return observe_state(identity, self.identity)

    def kill_ranks(self, ranks: Iterable[int]) -> None:
        """Kill these ranks if they are on this host, because a launcher waits for a stopped one."""
        for rank in ranks:
            identity = self.identities[rank]
            if identity is not None and self.identity.sees(identity):
                with contextlib.suppress(OSError):
                    os.kill(identity.pid, signal.SIGKILL)

    def await_ends(self, ranks: Iterable[int], seconds: float) -> None:
        """Return when all visible ones of these ranks have ended, or after this time.

        A launcher ends all ranks when the first one ends.
        """
        until = self.clock.monotonic() + seconds
        while ALIVE in map(self.observe, ranks) and self.clock.monotonic() < until:
            self.clock.sleep(POLL_SECONDS)

    def _read(self, topic: str, ranks: Iterable[int]) -> dict[int, bytes] | None:
        """Return what ranks have published under a topic; None if the store does not answer."""
        keys = {rank: self.key(topic, rank) for rank in ranks}
        return self.client.request(
            ANSWER_SECONDS,
            lambda store: {r: store.get(key) for r, key in keys.items() if store.check([key])},
        )


def print_message(text: str) -> None:
    """Write to stderr; give up if it does not accept the text soon."""
    text = redact.text(text)

    def write() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(escape_lines(text))
            sys.stderr.flush()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(PRINT_SECONDS)


def end_process(code: int) -> NoReturn:
    """End this process now, even if other threads wait, and all processes that it has started, so
    that a reader of their output does not wait for them."""
    cleanup.kill_descendants()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if "mpi4py.MPI" in sys.modules:
        from ddpbench.mpi_backend import library as mpi_library

        mpi_library.abort(code)  # ends the ranks that hang inside MPI, too
    os._exit(code)
