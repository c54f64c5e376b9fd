"""Windows on their way: from the ranks of a host to its leader, from leaders to rank 0.

A sender connects in each round. It first compares its clock with the receiver's, which answers in
rank 0's time, and then sends its window.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from ddpbench.analysis.clocks import Ahead
from ddpbench.launch import sockets
from ddpbench.measure.offsets import ask_ahead
from ddpbench.watch.window import Window, decode, encode

TOKEN_NBYTES = 16
QUESTIONS = 6  # about the receiver's clock, in each connection
CONNECT_SECONDS, ANSWER_SECONDS = 0.3, 0.5
RETRY_SECONDS = 0.05
IDLE_SECONDS = 2.0  # after which a receiver closes a connection that is silent
HEADER = struct.Struct("!qqiq")  # sender, round, ranks, size of the window
Target = bytes | tuple[str, int]


class Delivery(msgspec.Struct, frozen=True):
    """A window that has arrived. number: of its round; ranks: for how many ranks it stands."""

    number: int
    ranks: int
    window: Window


class Inbox:
    """Receives windows in threads of its own, and answers questions about the time.

    server: a socket that listens; token: of the job, which every sender must have; now_ns: rank 0's
    time, as far as this rank knows it.
    """

    def __init__(self, server: socket.socket, token: bytes, now_ns: Callable[[], int]) -> None:
        self._server, self._token, self._now_ns = server, token, now_ns
        self._deliveries: dict[int, Delivery] = {}  # the newest by sender
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="ddpbench-inbox", daemon=True)
        self._thread.start()

    def collect(self, number: int, ranks: int, seconds: float, last: bool = False) -> list[Window]:
        """Return the windows of a round, and those of senders that have ended.

        Waits until they stand for so many ranks, or for this time. Each window is returned once; a
        last one is returned again, but empty. last: wait for last windows alone.
        """

        def is_complete() -> bool:
            present = [
                delivery.ranks
                for delivery in self._deliveries.values()
                if delivery.window.last or (delivery.number == number and not last)
            ]
            return sum(present) >= ranks

        with self._changed:
            self._changed.wait_for(is_complete, seconds)
            windows = []
            for sender, delivery in list(self._deliveries.items()):
                window = delivery.window
                if window.last or delivery.number == number:
                    windows.append(window)
                if window.last:
                    ended = window.without_news()
                    self._deliveries[sender] = Delivery(number, delivery.ranks, ended)
                elif delivery.number <= number:
                    del self._deliveries[sender]
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
                time.sleep(RETRY_SECONDS)
                continue
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, msgspec.MsgspecError):
            connection.settimeout(IDLE_SECONDS)
            _send_at_once(connection)
            for _ in range(QUESTIONS):
                sockets.answer_stamp(connection, self._token, self._now_ns)
            header = sockets.receive(connection, HEADER.size)
            sender, number, ranks, nbytes = HEADER.unpack(header)
            window = decode(sockets.receive(connection, nbytes))
            with self._changed:
                self._deliveries[sender] = Delivery(number, ranks, window)
                self._changed.notify_all()


@contextlib.contextmanager
def open_connection(
    target: Target, token: bytes, now_ns: Callable[[], int]
) -> Iterator[tuple[socket.socket, Ahead]]:
    """Yield a connection to an inbox, and how far its clock is ahead of this one.

    target: name of a Unix socket, or address and port; now_ns: this clock. Raises OSError,
    ConnectionRefusedError if there is no inbox.
    """
    is_local = isinstance(target, bytes)
    family = socket.AF_UNIX if is_local else sockets.address_family(str(target[0]))
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(target)
        connection.settimeout(ANSWER_SECONDS)
        _send_at_once(connection)
        yield connection, ask_ahead(connection, token, QUESTIONS, now_ns)


def send(connection: socket.socket, sender: int, delivery: Delivery) -> None:
    """Send a window over a connection. sender: a number that no other sender has."""
    data = encode(delivery.window)
    header = HEADER.pack(sender, delivery.number, delivery.ranks, len(data))
    connection.sendall(header + data)


def _send_at_once(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
