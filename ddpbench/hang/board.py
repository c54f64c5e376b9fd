"""The board on which ranks leave what they say of themselves: a part of the store they share.

Who asks the store never waits longer than it wants to: the store's own host may be the one that is
stopped. Each rank keeps the last heartbeat of rank 0, where the store mostly lives.
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
from dataclasses import asdict
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ddpbench.hang.self_report import Who, state_of
from ddpbench.hang.status import DIED, LEFT, STOPPED, RankStatus, Silent
from ddpbench.launch import family
from ddpbench.records import codec, redact
from ddpbench.records.visible import escape_lines

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
ANSWER_SECONDS = 1.0  # of a store that lives
SAY_SECONDS = 2.0
CLOSE_SECONDS = 6.0  # longer than the time-out of a client of the store
LOOK_SECONDS = 0.05  # between looks at what the others say


class Line:
    """A store of one's own, asked by a thread that may hang with it."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.gone = store, False  # gone: it has closed the connection
        self._open = _connection(store)
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="ddpbench-store", daemon=True)
        self._thread.start()

    def ask(self, seconds: float, question: Callable[[dist.Store], T]) -> T | None:
        """The answer; None when the store fails, or does not answer in time."""
        answers: list[T] = []
        done = threading.Event()

        def attempt() -> None:
            try:
                if self._has_left():  # asked all the same, it would print a stack
                    raise RuntimeError("the store has gone")
                answers.append(question(self.store))
            except (RuntimeError, ValueError):  # its host has gone: it would only complain again
                self.gone = True
            done.set()

        if not self.gone:
            self._asked.put(attempt)
            done.wait(seconds)
        return answers[0] if answers else None

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the thread, and wait for it.

        Where the interpreter ends while a thread of it is in C++, that thread cannot come back: C++
        calls std::terminate, and the process ends with SIGABRT.
        """
        self._asked.put(None)
        self._thread.join(seconds)

    def _has_left(self) -> bool:
        try:
            return self._open is not None and self._open.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _serve(self) -> None:
        while (attempt := self._asked.get()) is not None:
            attempt()
        if self._open is not None:
            self._open.close()


def _connection(store: dist.Store) -> socket.socket | None:
    """A connection to the store's host on which nothing is said: its end shows that of the host."""
    import torch.distributed as dist

    if isinstance(store, dist.TCPStore):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((store.host, store.port), ANSWER_SECONDS)
            connection.setblocking(False)
            return connection
    return None


class Board:
    """One rank's view of what all say; who[r] is None as long as rank r has not come."""

    def __init__(
        self, store: dist.Store, prefix: str, rank: int, who: Sequence[Who | None]
    ) -> None:
        """store: a client of its own, used by nobody else."""
        self.line, self.rank, self.who = Line(store), rank, list(who)
        self._prefix = prefix
        self._first: bytes | None = None  # rank 0's last heartbeat

    def key(self, *parts: object) -> str:
        """A key of the store."""
        return "/".join([self._prefix, *map(str, parts)])

    @property
    def me(self) -> Who:
        """This rank."""
        mine = self.who[self.rank]
        assert mine is not None
        return mine

    def beat(self, words: RankStatus, seconds: float = ANSWER_SECONDS) -> bool:
        """Leave a heartbeat and fetch rank 0's; whether the store answered in this time."""
        text, first = json.dumps(asdict(words)), self.key("beat", 0)

        def exchange(store: dist.Store) -> bool:
            store.set(self.key("beat", self.rank), text)
            if self.rank and (self._first is not None or store.check([first])):
                self._first = store.get(first)
            return True

        return self.line.ask(seconds, exchange) is not None

    def say_left(self, words: RankStatus, seconds: float) -> None:
        """Leave a last heartbeat, in which this rank has left."""
        text = json.dumps(asdict(words))

        def leave(store: dist.Store) -> None:
            store.set(self.key("beat", self.rank), text)
            store.set(self.key("left", self.rank), "1")
            store.add(self.key("left"), 1)

        self.line.ask(seconds, leave)

    def await_leaving(self, seconds: float) -> None:
        """Return when all ranks have left, or after this time."""
        until = time.monotonic() + seconds

        def wait(store: dist.Store) -> None:
            while store.add(self.key("left"), 0) < len(self.who) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)

        self.line.ask(seconds, wait)

    def introduce(self, me: Who) -> None:
        """Say who this rank is, and learn who the others are as far as they have come."""
        self.who[self.rank] = me

        def exchange(store: dist.Store) -> None:
            store.set(self.key("who", me.rank), json.dumps(asdict(me)))
            for rank, each in enumerate(self.who):
                if each is None and store.check([self.key("who", rank)]):
                    found = json.loads(store.get(self.key("who", rank)))
                    self.who[rank] = codec.decode(Who, found)

        self.line.ask(ANSWER_SECONDS, exchange)

    def collect(
        self, what: str, mine: RankStatus, seconds: float
    ) -> tuple[dict[int, RankStatus], bool]:
        """The last words, under this name, of all ranks that answer in time; this one's too.

        And whether the store answered: its host may be the one that is gone. Nobody waits for a
        rank that has left, or is seen to be dead or stopped.
        """
        words = {self.rank: mine}
        left: set[int] = set()
        until = time.monotonic() + seconds

        def put(store: dist.Store) -> bool:
            store.set(self.key(what, self.rank), json.dumps(asdict(mine)))
            return store.check([self.key(what, self.rank)])

        def read(store: dist.Store) -> dict[int, RankStatus]:
            absent = [rank for rank in range(len(self.who)) if rank not in words]
            keys = {rank: self.key(what, rank) for rank in absent}
            found = {r: store.get(key) for r, key in keys.items() if store.check([key])}
            left.update(r for r in absent if store.check([self.key("left", r)]))
            return {rank: _words(data) for rank, data in found.items()}

        together = self.line.ask(ANSWER_SECONDS, put) is not None
        while together and len(words) < len(self.who):
            found = self.line.ask(ANSWER_SECONDS, read)
            together = found is not None
            words |= found or {}
            absent = [r for r in range(len(self.who)) if r not in words]
            hopeless = all(r in left or self._seen_as(r) in (DIED, STOPPED) for r in absent)
            if hopeless or time.monotonic() > until:
                break
            time.sleep(LOOK_SECONDS)
        return words, together

    def beats(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """The last heartbeats of these ranks, as far as there are any."""

        def read(store: dist.Store) -> dict[int, bytes]:
            keys = {rank: self.key("beat", rank) for rank in ranks}
            return {r: store.get(key) for r, key in keys.items() if store.check([key])}

        found = self.line.ask(ANSWER_SECONDS, read) or {}
        return {rank: _words(data) for rank, data in found.items()}

    def silent(self, words: Iterable[int], together: bool) -> list[Silent]:
        """The ranks that are not among these: what is seen of them, their last heartbeats.

        together: whether the store answers.
        """
        absent = sorted(set(range(len(self.who))) - set(words))
        if together and None in (self.who[rank] for rank in absent):
            self.introduce(self.me)  # one that has left may have come since the last look
        beats = self.beats(absent) if absent and together else {}
        if 0 in absent and 0 not in beats and self._first is not None:
            beats[0] = _words(self._first)
        found = []
        for rank in absent:
            who, seen = self.who[rank], beats.get(rank)
            state = LEFT if seen is not None and seen.left else self._seen_as(rank)
            found.append(Silent(rank, str(who) if who else f"rank {rank}", state, seen))
        return found

    def _seen_as(self, rank: int) -> str:
        who = self.who[rank]
        return "has not called ddpbench.watchdog" if who is None else state_of(who, self.me)

    def kill(self, ranks: Iterable[int]) -> None:
        """End these ranks if they are on this host: a stopped one keeps its launcher waiting."""
        for rank in ranks:
            who = self.who[rank]
            if who is not None and self.me.sees(who):
                with contextlib.suppress(OSError):
                    os.kill(who.pid, signal.SIGKILL)


def _words(data: bytes) -> RankStatus:
    return codec.decode(RankStatus, json.loads(data))


def is_here(store: dist.Store) -> bool:
    """Whether rank 0 has this store in its own process, and not torchrun in its."""
    import torch.distributed as dist

    return (
        isinstance(store, dist.TCPStore)
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )


def client(store: dist.Store, world_size: int) -> dist.Store:
    """A connection of its own to the same store, for a watchdog."""
    import torch.distributed as dist

    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.TCPStore):
        return dist.TCPStore(
            base.host,
            base.port,
            is_master=False,
            timeout=timedelta(seconds=5),
            wait_for_workers=False,
        )
    if isinstance(base, dist.FileStore):
        path: str = base.path  # type: ignore[attr-defined]
        return dist.FileStore(path, world_size)
    return base


def say(text: str) -> None:
    """Write to stderr; what does not take it within a moment goes without."""
    text = redact.text(text)

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(escape_lines(text))
            sys.stderr.flush()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(SAY_SECONDS)


def leave(code: int) -> NoReturn:
    """End this process now, whatever its other threads wait for, and all that it has started: who
    reads what these print waits for them too."""
    family.kill_descendants()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if "mpi4py.MPI" in sys.modules:
        from ddpbench.mpi_backend import library as mpi_library

        mpi_library.abort(code)  # takes the ranks along that hang inside MPI
    os._exit(code)
