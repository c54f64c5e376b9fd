"""How far a host's clock is ahead of rank 0's while a job runs, found by ping-pongs over TCP.

Each round the leader of a host connects to rank 0 and exchanges a few messages. The shortest
exchange of each round bounds the offset at its time. A line through those of the last minute
follows the drift. The clock is the system clock, which torch uses for the times of its calls.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpbench.analysis import clocks
from ddpbench.launch import sockets

PINGS = 8  # in a round
ROUNDS = 12  # that the line follows: a minute
CONNECT_SECONDS, ANSWER_SECONDS = 0.2, 0.1
IDLE_SECONDS = 2.0  # after which rank 0 closes a connection that is silent
MOST_DRIFT = 500e-6  # that clocks are known to have
SURE_DRIFT = 50e-6  # largest error of a drift that is worth following
UNKNOWN_NS = 10**15
TOKEN_NBYTES = 16

Stamps = npt.NDArray[np.int64]
now_ns: Callable[[], int] = time.time_ns


@dataclass(frozen=True)
class Line:
    """How far a clock is ahead of rank 0's: ahead_ns at the time at_ns, and what it gains per ns.

    bound_ns: the largest error; UNKNOWN_NS if nobody has compared the clocks.
    """

    ahead_ns: float = 0.0
    bound_ns: float = 0.0
    drift: float = 0.0
    at_ns: int = 0

    def ahead(self, stamps: Stamps) -> Stamps:
        """Return how far the clock was ahead at these times of it, in ns."""
        found = self.ahead_ns + self.drift * (stamps - self.at_ns)
        return np.asarray(np.rint(found), dtype=np.int64)

    def correct(self, stamps: Stamps) -> Stamps:
        """Return what rank 0's clock showed at these times."""
        return stamps - self.ahead(stamps)


SAME = Line()
UNKNOWN = Line(bound_ns=UNKNOWN_NS)


class Offset:
    """What the latest rounds of ping-pongs say about this host's clock."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float, float]] = deque(maxlen=ROUNDS)
        self.line = UNKNOWN

    def add(self, exchanges: Stamps) -> None:
        """Learn from a round: int64 [exchange, 3], this clock's stamps around rank 0's, in ns."""
        bounds = clocks.ahead(exchanges)  # of rank 0's clock against this one
        ahead, bound = -bounds.middle_ns, bounds.off_ns(bounds.middle_ns)
        at = int(exchanges[-1, 0])
        if self._points and self._contradicts(at, ahead, bound):
            self._points.clear()  # somebody has set a clock
        self._points.append((at, ahead, bound))
        self.line = _fit(self._points)

    def _contradicts(self, at: int, ahead: float, bound: float) -> bool:
        since = at - self._points[-1][0]
        expected = float(self.line.ahead(np.array([at]))[0])
        allowed = bound + self.line.bound_ns + MOST_DRIFT * abs(since)
        return since < 0 or abs(ahead - expected) > allowed


def _fit(points: Sequence[tuple[int, float, float]]) -> Line:
    """The line through points, the surest of which count most."""
    at = points[-1][0]
    times, ahead, bounds = np.array([(t - at, a, b) for t, a, b in points], dtype=float).T
    weights = 1 / np.maximum(bounds, 1.0) ** 2
    middle = float(weights @ times / weights.sum())
    spread = float(weights @ (times - middle) ** 2)
    drift = 0.0
    if spread * SURE_DRIFT**2 > 1:
        drift = float(weights @ ((times - middle) * ahead)) / spread
        drift = min(max(drift, -MOST_DRIFT), MOST_DRIFT)
    weights /= weights.sum()
    now = float(weights @ ahead) - drift * middle
    off = np.abs(ahead - now - drift * times)
    return Line(now, float(weights @ np.maximum(off, bounds)), drift, at)


def ping(addresses: Sequence[str], port: int, token: bytes) -> Stamps | None:
    """Exchange messages with rank 0; None if none of its addresses answers.

    Returns int64 [exchange, 3]: this clock's stamp of a question, rank 0's, this clock's stamp of
    the answer. Takes at most a few tenths of a second.
    """
    targets = [(address, port) for address in addresses]
    failed = sockets.try_connections(targets, CONNECT_SECONDS) if len(targets) > 1 else {}
    for target in targets:
        if target not in failed:
            with contextlib.suppress(OSError):
                return _exchange(target, token)
    return None


def _exchange(target: tuple[str, int], token: bytes) -> Stamps:
    with socket.create_connection(target, CONNECT_SECONDS) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exchanges = [sockets.exchange_stamps(connection, token, now_ns) for _ in range(PINGS)]
    return np.array(exchanges, dtype=np.int64)


class ClockServer:
    """Rank 0's part: a thread for each connection, which answers each token with the time."""

    def __init__(self, token: bytes) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._token = token
        self._server = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=dual, backlog=1024
        )
        self._server.settimeout(IDLE_SECONDS)
        self.port = int(self._server.getsockname()[1])
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="ddpbench-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # which ends a wait for a connection
        self._thread.join(2 * IDLE_SECONDS)

    def _serve(self) -> None:
        with self._server:
            while not self._closing:
                with contextlib.suppress(OSError):
                    connection, _ = self._server.accept()
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(IDLE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._closing:
                sockets.answer_stamp(connection, self._token, now_ns)
