"""The way of a watch's windows: from the ranks to their host's leader, from there to rank 0.

The leader of a host is the rank that has bound the job's Unix socket, of which each network
namespace has its own. The kernel frees the name when the leader ends, however it ends, and the next
rank that finds nobody there binds it. The leader of rank 0's host is rank 0. Ranks find the job's
token and rank 0's port in the job's store.

A sender connects in each round. It first compares its clock with the receiver's, which answers in
rank 0's time, and then sends its window. Rounds begin at multiples of a period, by rank 0's clock,
so that the windows of all ranks have steps in common. All stamps are of the system clock, which
torch uses for the times of its calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ddpbench.hang.status_board import STORE_TIMEOUT, Address, StoreClient, find_store
from ddpbench.launch import placement, sockets
from ddpbench.measure.offsets import ask_ahead
from ddpbench.watch.gather.joining import join_ranks
from ddpbench.watch.window import LINKS, Round, Window, decode, encode

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
PERIOD = 5.0  # seconds from one round to the next, for each so many ranks:
ROUND_RANKS = 4096
HOST_SECONDS, LAST_HOST_SECONDS = 0.4, 1.5  # for a host's ranks, in a round and at the job's end
JOB_SECONDS, LAST_JOB_SECONDS = 0.6, 3.0  # the same for all hosts
STORE_SECONDS = 0.5  # for an answer of the store
CONNECT_SECONDS, ANSWER_SECONDS = 0.3, 0.5
IDLE_SECONDS = 2.0  # after which a receiver closes a connection that is silent
POLL_SECONDS = 0.02
AFTER_SECONDS = 0.001  # the beginning of a round, so that no clock is before it
TOKEN_NBYTES = 16
QUESTIONS = 6  # about the receiver's clock, in each connection
SIZE = struct.Struct("!q")  # of a window
Target = bytes | tuple[str, int]  # the name of a Unix socket, or address and port


class Job(msgspec.Struct, frozen=True):
    """The job's token, and where rank 0 receives windows of other hosts."""

    token: bytes
    addresses: list[str]
    port: int


class Inbox:
    """Receives windows in threads of its own, and answers questions about the time.

    server: a socket that listens; token: of the job, which every sender must have; now_ns: rank 0's
    time, as far as this rank knows it.
    """

    def __init__(self, server: socket.socket, token: bytes, now_ns: Callable[[], int]) -> None:
        self._server, self._token, self._now_ns = server, token, now_ns
        self._windows: list[Window] = []
        self._ended = 0  # ranks whose last window was returned
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="ddpbench-inbox", daemon=True)
        self._thread.start()

    def collect(self, number: int, ranks: int, seconds: float, last: bool = False) -> list[Window]:
        """Return the windows of a round, and last ones of any round.

        Waits until they are of so many ranks, counting those that have ended before, or for this
        time. last: wait for last windows alone.
        """

        def is_complete() -> bool:
            present = [w for w in self._windows if w.last or (w.number == number and not last)]
            return self._ended + sum(len(window.ranks) for window in present) >= ranks

        with self._changed:
            self._changed.wait_for(is_complete, seconds)
            windows = [w for w in self._windows if w.last or w.number == number]
            self._windows = [w for w in self._windows if not w.last and w.number > number]
            self._ended += sum(len(window.ranks) for window in windows if window.last)
            return windows

    def close(self) -> None:
        """Receive no more; another rank may then take this one's place."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # which ends a wait for a connection
        self._server.close()
        self._thread.join(IDLE_SECONDS)

    def _serve(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or this process may open no more files
                time.sleep(POLL_SECONDS)
                continue
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
            connection.settimeout(IDLE_SECONDS)
            _send_at_once(connection)
            for _ in range(QUESTIONS):
                sockets.answer_stamp(connection, self._token, self._now_ns)
            (nbytes,) = SIZE.unpack(sockets.receive(connection, SIZE.size))
            window = decode(sockets.receive(connection, nbytes))
            with self._changed:
                self._windows.append(window)
                self._changed.notify_all()


class Transport:
    """One rank's part of it. Where something does not answer, windows are lost.

    prefix: of the keys in the store, the same in all ranks, another one for each watch of a job;
    period: seconds from one round to the next, the same in all ranks; now_ns: this host's clock.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        world_size: int,
        *,
        period: float = PERIOD,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._rank, self._world_size, self._now_ns = rank, world_size, now_ns
        self._local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # at most
        self._period_ns = round(period * 1e9) * (1 + world_size // ROUND_RANKS)
        self._prefix = f"{prefix}/{placement.read_restarts()}"
        self._place = find_store(store)
        self._client: StoreClient | None = None
        if isinstance(self._place, Address):  # a watch waits for less than the job itself
            self._place = self._place._replace(timeout=STORE_TIMEOUT)
        addresses = (address.partition("/")[0] for address in sockets.list_interfaces().values())
        outward = [address for address in addresses if not sockets.is_loopback(address)]
        self._addresses = outward[:LINKS]
        self._job: Job | None = None
        self._ahead_ns = 0  # of rank 0's clock
        self._latest = 0  # round
        self._ranks: Inbox | None = None  # for windows of this host's ranks, in its leader
        self._hosts: Inbox | None = None  # for those of other hosts, in rank 0
        self._target: tuple[str, int] | None = None  # rank 0's address that answers
        self._had_leader = False
        if rank == 0 and world_size > 1:
            self._open_job()
        elif world_size > 1:
            self._find_job(0.0)  # connects now: a short job has ended its store before a round

    def seconds_to_round(self) -> float:
        """Return the time until the next round begins."""
        now_ns = self._job_ns()
        number = -(-now_ns // self._period_ns)
        number += number == self._latest  # this clock was just set back
        return (number * self._period_ns - now_ns) * 1e-9 + AFTER_SECONDS

    def begin_round(self) -> Round:
        """Return the round that has just begun, or is near."""
        now_ns, job_ns = self._now_ns(), self._job_ns()
        self._latest = (job_ns + self._period_ns // 2) // self._period_ns
        return Round(self._latest, self._latest * self._period_ns + now_ns - job_ns)

    def exchange(self, window: Window) -> list[Window]:
        """Hand over this rank's window of a round.

        Returns all hosts' windows in rank 0, none in other ranks. Blocks up to about 1 s; for a
        last window 2.5 s in a host's leader and 5 s in rank 0, if other ranks do not end.
        """
        if self._world_size == 1:
            return [join_ranks([window], self._addresses, 0)]
        job = self._find_job(STORE_SECONDS if window.last else 0.0)
        if job is None or (self._ranks is None and not self._take_lead(job, window)):
            return []
        assert self._ranks is not None
        seconds = LAST_HOST_SECONDS if window.last else HOST_SECONDS
        others = self._ranks.collect(window.number, self._local_size - 1, seconds, window.last)
        if self._rank:
            self._report(job, [window, *others])
            return []
        assert self._hosts is not None
        own = join_ranks([window, *others], self._addresses, 0)
        seconds = LAST_JOB_SECONDS if window.last else JOB_SECONDS
        missing = self._world_size - len(own.ranks)
        return [own, *self._hosts.collect(window.number, missing, seconds, window.last)]

    def publish_folder(self, folder: str) -> None:
        """Let the other ranks know the folder of the stored run. Only rank 0 calls it."""
        self._ask_store(lambda store: store.set(f"{self._prefix}/folder", folder))

    def find_folder(self) -> str:
        """Return the folder of the stored run; "" if there is none, or it cannot be known."""
        folder = self._ask_store(lambda store: _read(store, f"{self._prefix}/folder", 0.0))
        return folder.decode() if folder else ""

    def close(self) -> None:
        """Close all connections."""
        for connection in (self._ranks, self._hosts, self._client):
            if connection is not None:
                connection.close()

    def _job_ns(self) -> int:
        """Return rank 0's time, as far as this rank knows it."""
        return self._now_ns() + self._ahead_ns

    def _open_job(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)
        token = secrets.token_bytes(TOKEN_NBYTES)
        self._job = Job(token, self._addresses, int(server.getsockname()[1]))
        self._hosts = Inbox(server, token, self._now_ns)
        self._ranks = self._lead(self._job)  # before any other rank knows the name
        text = msgspec.json.encode(self._job).decode()
        self._ask_store(lambda store: store.set(f"{self._prefix}/job", text))

    def _find_job(self, seconds: float) -> Job | None:
        """Return the job; None if rank 0 does not publish it within this time."""
        if self._job is None:
            data = self._ask_store(lambda store: _read(store, f"{self._prefix}/job", seconds))
            if data:
                self._job = msgspec.json.decode(data, type=Job)
                self._close_store()  # it need not serve all ranks twice
        return self._job

    def _ask_store(self, function: Callable[[dist.Store], T]) -> T | None:
        """Return what a function of the store returns, None if the store does not answer soon."""
        try:
            if self._client is None:
                if isinstance(self._place, Address):
                    # To a server that is absent, torch's client prints a C++ stack.
                    socket.create_connection(self._place[:2], CONNECT_SECONDS).close()
                self._client = StoreClient(self._place)
        except (OSError, RuntimeError):  # it may have ended with its process group
            return None
        answer = self._client.request(2 * STORE_SECONDS, function)
        if self._client.gone:
            self._close_store()
        return answer

    def _close_store(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _lead(self, job: Job) -> Inbox | None:
        """Become the leader of this host; return None if another rank is."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(_name_socket(job))
        except OSError:
            server.close()
            return None
        server.listen(1024)
        return Inbox(server, job.token, self._job_ns)

    def _take_lead(self, job: Job, window: Window) -> bool:
        """Send a window to this host's leader; if there is none, become it and return True."""
        for _ in range(2):  # another rank may become it meanwhile
            try:
                with self._connect(_name_socket(job), job) as connection:
                    send(connection, window)
                self._had_leader = True
                return False
            except ConnectionRefusedError:
                if window.last and self._had_leader:  # the leader has ended before
                    return False
                self._ranks = self._lead(job)
                if self._ranks is not None:
                    return True
            except OSError:  # the leader is stopped
                return False
        return False

    def _report(self, job: Job, windows: Sequence[Window]) -> None:
        """Send the windows of this host's ranks to rank 0, by whose clock their times are."""
        if self._target is None:
            targets = [(address, job.port) for address in job.addresses]
            failed = sockets.try_connections(targets, CONNECT_SECONDS)
            self._target = next((target for target in targets if target not in failed), None)
        if self._target is not None:
            with contextlib.suppress(OSError), self._connect(self._target, job) as connection:
                send(connection, join_ranks(windows, self._addresses, self._ahead_ns))

    @contextlib.contextmanager
    def _connect(self, target: Target, job: Job) -> Iterator[socket.socket]:
        """Yield a connection to an inbox, and learn how far rank 0's clock is ahead."""
        with open_connection(target) as connection:
            ahead = ask_ahead(connection, job.token, QUESTIONS, self._now_ns)
            self._ahead_ns = ahead.middle_ns
            yield connection


@contextlib.contextmanager
def open_connection(target: Target) -> Iterator[socket.socket]:
    """Yield a connection to an inbox. Raises OSError, ConnectionRefusedError if there is none."""
    is_local = isinstance(target, bytes)
    family = socket.AF_UNIX if is_local else sockets.address_family(str(target[0]))
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(target)
        connection.settimeout(ANSWER_SECONDS)
        _send_at_once(connection)
        yield connection


def send(connection: socket.socket, window: Window) -> None:
    """Send a window over a connection to an inbox, whose questions are answered."""
    data = encode(window)
    connection.sendall(SIZE.pack(len(data)) + data)


def _send_at_once(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _name_socket(job: Job) -> bytes:
    return b"\0ddpbench-" + hashlib.blake2b(job.token, digest_size=16).hexdigest().encode()


def _read(store: dist.Store, key: str, seconds: float) -> bytes | None:
    """Return the value of a key, None if it does not exist by then: `get` would wait for it."""
    until = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() >= until:
            return None
        time.sleep(POLL_SECONDS)
    return store.get(key)
