"""The way of a watch's windows: from all ranks to rank 0.

Ranks find the job's token and rank 0's addresses in the job's store. A rank connects in each round.
It first compares its clock with rank 0's, and then sends its window. Rounds begin at multiples of a
period, by rank 0's clock, so that the windows of all ranks have steps in common. All stamps are of
the system clock, which torch uses for the times of its calls.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ddpbench.analysis.clocks import Ahead
from ddpbench.hang.status_board import STORE_TIMEOUT, Address, StoreClient, find_store, identify
from ddpbench.launch import placement, sockets
from ddpbench.measure.offsets import ask_ahead
from ddpbench.watch.window import Round, Window, decode, encode, shift

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
PERIOD = 5.0  # seconds from one round to the next, for each so many ranks:
ROUND_RANKS = 256
ROUND_SECONDS, LAST_SECONDS = 0.6, 3.0  # for all ranks, in a round and at the job's end,
RANK_SECONDS = 1e-3  # and as much more for each rank
STORE_SECONDS = 0.5  # for an answer of the store
CONNECT_SECONDS, ANSWER_SECONDS = 0.3, 3.0  # rank 0 answers one rank after the other
IDLE_SECONDS = 0.3  # after which rank 0 closes a connection that is silent
POLL_SECONDS = 0.02
AFTER_SECONDS = 0.001  # the beginning of a round, so that no clock is before it
TOKEN_NBYTES = 16
QUESTIONS = 6  # about the receiver's clock, in each connection
SIZE = struct.Struct("!q")  # of a window


class Job(msgspec.Struct, frozen=True):
    """The job's token, the host of rank 0, and where it receives windows."""

    token: bytes
    host: str
    addresses: list[str]
    port: int


class Inbox:
    """Receives windows in a thread of its own, and answers questions about the time.

    server: a socket that listens; token: of the job, which every sender must have; now_ns: the
    time.
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
            return self._ended + len(present) >= ranks

        with self._changed:
            self._changed.wait_for(is_complete, seconds)
            windows = [w for w in self._windows if w.last or w.number == number]
            self._windows = [w for w in self._windows if not w.last and w.number > number]
            self._ended += sum(window.last for window in windows)
            return windows

    def close(self) -> None:
        """Receive no more."""
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
            with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
                connection.settimeout(IDLE_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        self._world_size, self._now_ns = world_size, now_ns
        self._period_ns = round(period * 1e9) * (1 + world_size // ROUND_RANKS)
        self._prefix = f"{prefix}/{placement.read_restarts()}"
        self._place = find_store(store)
        self._client: StoreClient | None = None
        if isinstance(self._place, Address):  # a watch waits for less than the job itself
            self._place = self._place._replace(timeout=STORE_TIMEOUT)
        identity = identify(rank)
        self._host = f"{identity.boot_id}/{identity.network}"
        self._job: Job | None = None
        self._address = ""  # of rank 0, which answered
        self._ahead_ns = 0  # of rank 0's clock
        self._latest = 0  # round
        self._inbox: Inbox | None = None  # in rank 0
        if rank == 0 and world_size > 1:
            self._open_inbox()
        elif world_size > 1:
            self._find_job(0.0)  # connects now: a short job has ended its store before a round

    def seconds_to_round(self) -> float:
        """Return the time until the next round begins."""
        now_ns = self._now_ns() + self._ahead_ns
        number = -(-now_ns // self._period_ns)
        number += number == self._latest  # this clock was just set back
        return (number * self._period_ns - now_ns) * 1e-9 + AFTER_SECONDS

    def begin_round(self) -> Round:
        """Return the round that has just begun, or is near."""
        job_ns = self._now_ns() + self._ahead_ns
        self._latest = (job_ns + self._period_ns // 2) // self._period_ns
        return Round(self._latest, self._latest * self._period_ns - self._ahead_ns)

    def exchange(self, window: Window) -> list[Window]:
        """Hand over this rank's window of a round.

        Returns all ranks' windows in rank 0, none in other ranks. Blocks up to about 1 s; for a
        last window 3 s in rank 0, if other ranks do not end.
        """
        if self._world_size == 1:
            return [window]
        if self._inbox is None:
            self._send(window)
            return []
        seconds = LAST_SECONDS if window.last else ROUND_SECONDS
        seconds += RANK_SECONDS * self._world_size
        others = self._inbox.collect(window.number, self._world_size - 1, seconds, window.last)
        return [window, *others]

    def publish_folder(self, folder: str) -> None:
        """Let the other ranks know the folder of the stored run. Only rank 0 calls it."""
        self._ask_store(lambda store: store.set(f"{self._prefix}/folder", folder))

    def find_folder(self) -> str:
        """Return the folder of the stored run; "" if there is none, or it cannot be known."""
        return (self._read("folder") or b"").decode()

    def close(self) -> None:
        """Close all connections."""
        if self._inbox is not None:
            self._inbox.close()
        self._close_store()

    def _open_inbox(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=4096)
        addresses = [text.partition("/")[0] for text in sockets.list_interfaces().values()]
        addresses.sort(key=sockets.is_loopback)  # the last resort of ranks on this host
        token = secrets.token_bytes(TOKEN_NBYTES)
        job = Job(token, self._host, addresses, int(server.getsockname()[1]))
        self._inbox = Inbox(server, token, self._now_ns)
        text = msgspec.json.encode(job).decode()
        self._ask_store(lambda store: store.set(f"{self._prefix}/job", text))

    def _find_job(self, seconds: float) -> Job | None:
        """Return the job; None if rank 0 does not publish it within this time."""
        if self._job is None and (data := self._read("job", seconds)):
            self._job = msgspec.json.decode(data, type=Job)
            self._close_store()  # it need not serve all ranks twice
        return self._job

    def _send(self, window: Window) -> None:
        """Send a window to rank 0, and learn how far its clock is ahead."""
        job = self._find_job(STORE_SECONDS if window.last else 0.0)
        if job is None:
            return
        for address in [self._address] if self._address else job.addresses:
            opened = connect((address, job.port), job.token, self._now_ns)
            with contextlib.suppress(OSError), opened as (connection, ahead):
                # Ranks of one host have one clock.
                self._address = address
                self._ahead_ns = 0 if job.host == self._host else ahead.middle_ns
                send(connection, shift(window, self._ahead_ns))
                return

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

    def _read(self, name: str, seconds: float = 0.0) -> bytes | None:
        """Return the value of a key, None if it does not exist by then: `get` would wait for it."""
        key, until = f"{self._prefix}/{name}", time.monotonic() + seconds

        def poll(store: dist.Store) -> bytes | None:
            while not (exists := store.check([key])) and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            return store.get(key) if exists else None

        return self._ask_store(poll)

    def _close_store(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None


@contextlib.contextmanager
def connect(
    target: tuple[str, int], token: bytes, now_ns: Callable[[], int]
) -> Iterator[tuple[socket.socket, Ahead]]:
    """Yield a connection to an inbox, and how far its clock is ahead of this one.

    target: address and port; now_ns: this clock. Raises OSError.
    """
    with socket.create_connection(target, CONNECT_SECONDS) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection, ask_ahead(connection, token, QUESTIONS, now_ns)


def send(connection: socket.socket, window: Window) -> None:
    """Send a window over a connection to an inbox."""
    data = encode(window)
    connection.sendall(SIZE.pack(len(data)) + data)
