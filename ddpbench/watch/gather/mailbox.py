"""Datagrams from the ranks of a host to its leader: the rank that has bound the job's socket.

The socket has an abstract name, of which each network namespace has its own. The kernel frees the
name when the leader ends, however it ends, and the next rank that sends in vain binds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import time
from typing import Any

import msgspec

from ddpbench.watch.gather import offsets
from ddpbench.watch.window import Window, decode, encode

SEND_SECONDS = 0.3  # for a leader that has not read the others' datagrams yet
JOIN_SECONDS = 0.4  # for the host's other ranks, in each round
LAST_SECONDS = 1.5  # and at the job's end
MISSED = 3  # rounds without a window, after which a rank is not waited for
MOST_NBYTES = 200_000  # of a message: sockets take little more
HEADER = struct.Struct("!16sq")  # token, round
ANSWER = struct.Struct("!16sq")  # token, ns that the host's clock is ahead


class Clock:
    """How a rank reads the time and waits; a test gives it time of its own."""

    def monotonic(self) -> float:
        """Return seconds that no one can set."""
        return time.monotonic()

    def now_ns(self) -> int:
        """Return the time of the system clock."""
        return offsets.now_ns()

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    def receive(self, inbox: socket.socket, seconds: float) -> tuple[bytes, Any]:
        """Return a datagram and its sender; raise OSError if none comes within this time."""
        inbox.settimeout(seconds)
        return inbox.recvfrom(2 * MOST_NBYTES)


CLOCK = Clock()


class Mailbox:
    """One rank's end of its host's socket.

    token: of the job; expected: ranks on this host, as far as known. ahead_ns: how far the leader
    has found the host's clock ahead of rank 0's, as of the round before.
    """

    def __init__(self, token: bytes, expected: int, clock: Clock = CLOCK) -> None:
        self.token, self.leads, self.ahead_ns = token, False, 0
        self._clock = clock
        self._name = b"\0ddpbench-" + hashlib.blake2b(token, digest_size=16).hexdigest().encode()
        self._expected = expected
        self.ranks: set[int] = set()  # of this host that the leader has ever heard
        self._heard: dict[int, int] = {}  # rank → round of its latest window
        self._ended: dict[int, Window] = {}  # ranks that have ended → what to pass on
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # the kernel chooses a name, for the leader's answers

    def lead(self) -> bool:
        """Become the leader of this host; return whether no other rank is."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            server.bind(self._name)
        except OSError:
            server.close()
            return False
        self._socket.close()
        self._socket, self.leads = server, True
        return True

    def close(self) -> None:
        """Close the socket: another rank may lead now."""
        self._socket.close()

    def send(self, number: int, window: Window) -> bool:
        """Send this rank's window of a round; return whether there is a leader.

        It is lost if the leader reads nothing in time.
        """
        self._socket.settimeout(SEND_SECONDS)
        try:
            self._socket.sendto(HEADER.pack(self.token, number) + encode(window), self._name)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True

    def collect(self, number: int, own: Window, ahead_ns: int) -> list[Window]:
        """Return the windows of this host's ranks in a round.

        Those of ranks that have ended are their last ones, and empty from the next round on.
        ahead_ns: for the ranks' answers: they take it for the time of the next round.
        """
        windows = {own.ranks[0]: own}
        until = self._clock.monotonic() + (LAST_SECONDS if own.last else JOIN_SECONDS)
        while True:
            # What has come already is read in any case, or the queue would fill.
            complete = self._is_complete(number, windows)
            left = 0.0 if complete else until - self._clock.monotonic()
            try:
                data, sender = self._clock.receive(self._socket, max(left, 0.0))
            except OSError:
                if left <= 0:
                    break
                continue
            if (frame := _unpack(data, self.token)) is None:
                continue
            sent, window = frame
            (rank,) = window.ranks
            self._heard[rank] = sent
            if window.last:
                self._ended[rank] = window
            elif sent == number:
                windows[rank] = window
            with contextlib.suppress(OSError, TypeError):  # a sender without a name
                answer = ANSWER.pack(self.token, ahead_ns)
                self._socket.sendto(answer, socket.MSG_DONTWAIT, sender)
        self.ahead_ns = ahead_ns
        self._expected = 0
        self.ranks |= windows.keys() | self._heard.keys()
        ended = self._ended
        self._ended = {
            rank: window if rank in windows else window.without_news()
            for rank, window in ended.items()
        }
        return [*(ended | windows).values()]

    def read_answers(self) -> None:
        """Learn from the leader how far this host's clock is ahead."""
        if self.leads:
            return
        self._socket.settimeout(0.0)
        with contextlib.suppress(OSError):
            while True:
                data = self._socket.recv(ANSWER.size)
                if len(data) == ANSWER.size and data.startswith(self.token):
                    self.ahead_ns = ANSWER.unpack(data)[1]

    def _is_complete(self, number: int, windows: dict[int, Window]) -> bool:
        present = windows.keys() | self._ended.keys()
        active = {rank for rank, latest in self._heard.items() if latest > number - MISSED}
        return len(present) >= self._expected and active <= present


def _unpack(data: bytes, token: bytes) -> tuple[int, Window] | None:
    """The round and window of a datagram; None if it is not from a rank of this job."""
    if len(data) < HEADER.size or not data.startswith(token):
        return None
    try:
        window = decode(data[HEADER.size :])
    except msgspec.MsgspecError:
        return None
    return HEADER.unpack_from(data)[1], window
