"""The result of a call over MPI, the order in which queued calls run, and their deadline.

A group's queued calls run one after the other, in the thread that has its lane's turn: the lane's
worker, or a thread that waits for one of them while the turn is free.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend import library as mpi_library
from ddpbench.mpi_backend.library import mpi
from ddpbench.mpi_backend.tensors import complete

LOOK_SECONDS = 2e-4  # between two polls of the queue by an awake worker
AWAKE_SECONDS = 5e-3  # after the last call that was queued

# A call as a lane records it: its number, counted from 1, its name, dtype and bytes.
Noted = tuple[int, str, torch.dtype | None, int]
KEPT = 64  # of the latest

_LANES: weakref.WeakKeyDictionary[Lane, None] = weakref.WeakKeyDictionary()
_DROPPED: list[Request] = []
_ENDING = threading.Lock()  # to end a call; so brief that one lock suffices for all


def failure(name: str, rank: int, error: BaseException) -> Exception:
    """Return a DistBackendError with operation, rank and text, for an error of MPI or the call."""
    own = str(error) or repr(error)
    text = error.Get_error_string() if isinstance(error, mpi().Exception) else own
    text = "; ".join(text.splitlines())
    converted = dist.DistBackendError(f"{name} failed on rank {rank}: {text}")
    converted.__cause__ = error
    return converted


class Work(dist.Work):
    """The base of calls and requests: the operation, its rank, and how it ended."""

    def __init__(self, name: str, rank: int, outputs: list[Tensor]) -> None:
        super().__init__()
        self.name, self.rank, self.outputs = name, rank, outputs
        self.ended = False
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.ended

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        return self.error

    def result(self) -> list[Tensor]:
        self.wait()
        return self.outputs

    def synchronize(self) -> None:
        self.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise NotImplementedError

    def outcome(self, timeout: timedelta | None) -> bool:
        """Return True on success. Raises the call's error, or one if it has not ended in time."""
        if not self.ended:
            text = f"{self.name} on rank {self.rank} has not ended within {timeout}"
            raise dist.DistBackendError(text)
        if self.error is not None:
            raise self.error.with_traceback(None)  # a traceback would grow with each wait
        return True


class Call(Work):
    """A collective in a lane; noted: as the lane has recorded it."""

    def __init__(
        self,
        noted: Noted,
        rank: int,
        outputs: list[Tensor],
        run: Callable[[], Any],
        *,
        lane: Lane,
    ) -> None:
        super().__init__(noted[1], rank, outputs)
        self.noted = noted
        self._run: Callable[[], Any] | None = run  # keeps alive memory known to MPI only
        self._lane = lane
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None
        self._gate = threading.Lock()  # locked until the end: far cheaper than an Event
        self._gate.acquire()

    def run(self) -> None:
        """Make the call, in the thread that has the lane's turn."""
        error = None
        try:
            if self._run is not None:
                self._run()
        except BaseException as raised:
            error = failure(self.name, self.rank, raised)
            if not isinstance(raised, Exception):
                raise  # Ctrl-C in a waiting thread that makes the call
        finally:
            self.end(error)
            self._run = None

    def end(self, error: Exception | None) -> None:
        """Mark the call as ended; only the first time counts."""
        with _ENDING:
            if self.ended:
                return
            self.error = error
            self.ended, futures = True, self._futures
        self._gate.release()
        if futures is not None:
            complete(futures[0], self.outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else -1  # zero is C++'s kNoTimeout
        # A thread that waits without a time-out makes the call itself. Otherwise two threads wake
        # each other, which takes half the time of a small call.
        if not self.ended and not (seconds < 0 and self._lane.advance(self)):
            self._lane.hurry(self)
            if self._gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
                self._gate.release()
        return self.outcome(timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        if not self.ended:
            self._lane.hurry(self)  # a thread that waits in C++ cannot make the call
        # Future.set_exception works in Python only: DDP would read the exception as a list of
        # tensors and crash. An exception raised in a chained callback is a failure in C++ too.
        with _ENDING:
            due = self.ended and self._futures is None
            if self._futures is None:
                first: torch.futures.Future[Any] = torch.futures.Future(
                    devices=list({t.device for t in self.outputs if t.device.type != "cpu"})
                )
                self._futures = first, first.then(self._result)
        if due:
            self._futures[0].set_result(None)
        return self._futures[1]

    def _result(self, _: Any) -> list[Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs


class JoinedWork(Work):
    """Several works as one, for a coalesced call."""

    def __init__(self, name: str, rank: int, works: list[Any]) -> None:
        outputs = [tensor for work in works for tensor in work.outputs]
        super().__init__(name, rank, outputs)
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        return next((error for work in self._works if (error := work.exception())), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        end = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            left = None if end is None else timedelta(seconds=max(1e-6, end - time.monotonic()))
            work.wait(left)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        every = torch.futures.collect_all([work.get_future() for work in self._works])

        def joined(done: torch.futures.Future[Any]) -> list[Tensor]:
            return [tensor for future in done.value() for tensor in future.value()]

        return every.then(joined)


class Request(Work):
    """A send or a receive, posted on the caller's thread. It has no future, as on gloo.

    In a lane, which runs calls in order, two ranks that both receive first would deadlock.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        tensor: Tensor,
        request: Any,
        *,
        finish: Callable[[Any], None],
        timeout: timedelta,
    ) -> None:
        super().__init__(name, rank, [tensor])
        self._request, self._finish, self._timeout = request, finish, timeout
        self._status = mpi().Status()
        # A second Test would see no message.
        self._testing = mpi_library.shared_lock() or threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        timeout = timeout or self._timeout  # zero is C++'s kNoTimeout
        began = time.monotonic()
        while not self.is_completed():
            waited = time.monotonic() - began
            if waited > timeout.total_seconds():
                break
            if waited > 0.01:  # MPI polls; after a long wait, save the core rather than latency
                time.sleep(5e-5)
        return self.outcome(timeout)

    def is_completed(self) -> bool:
        if not self.ended:
            with self._testing:
                try:
                    if not self.ended and self._request.Test(self._status):
                        self._finish(self._status)
                        self.ended = True
                except Exception as error:
                    self.error = failure(self.name, self.rank, error)
                    self.ended = True
        return self.ended

    def source_rank(self) -> int:
        self.wait()
        return int(self._status.Get_source())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        raise NotImplementedError(f"{self.name} over mpi4py has no future: use wait()")

    def __del__(self) -> None:
        if not self.is_completed():  # dropped without a wait: MPI still needs the memory
            _DROPPED[:] = [request for request in _DROPPED if not request.is_completed()] + [self]


class Lane:
    """A group's queued calls, the turn to run them, and their time-out.

    Callers add to the queue. The thread that has the turn takes calls from it, and sets _holder,
    _running and _doing. The deadline thread only reads, and breaks the lane if a call is late.

    inside: the record of a synchronous call while it runs on its caller's thread, a new tuple for
    each call. The most frequent calls use count() and past.append() directly.
    """

    def __init__(self, rank: int, timeout: timedelta, group: str, threaded: bool = True) -> None:
        self.calls: deque[Call] = deque()
        self.turn = threading.Lock()
        self.inside: Noted | None = None
        self.timeout, self.group = timeout, group
        self._threaded = threaded  # whether a worker may call MPI
        self.count = itertools.count(1).__next__
        self.past: deque[Noted] = deque(maxlen=KEPT)
        self.posted = 0  # sends and receives
        self._running: Call | None = None
        self._doing: Noted | None = None  # the running call, as `inside`
        self._rank = rank
        self._holder: int | None = None  # ident of the thread that has the turn
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._awake = False  # the worker polls the queue
        self._submitted = 0
        self._broken: Exception | None = None
        self._seen: Noted | None = None
        self._since = 0.0
        _LANES[self] = None
        _start_watch()

    def note(self, name: str, like: Tensor | None) -> Noted:
        """Record a call on a tensor like this."""
        noted: Noted = (self.count(), name, None, 0)
        if like is not None:
            noted = (*noted[:2], like.dtype, like.nbytes)
        self.past.append(noted)
        return noted

    def recorded(self) -> tuple[int, int, list[Noted], int]:
        """Return the number of the last call made, the number of the last that ended, the latest
        calls, and the number of all calls with sends and receives."""
        past = list(self.past)
        started = past[-1][0] if past else 0
        queued = next(iter(tuple(self.calls)), None)
        open_ = [self.inside, self._doing, queued.noted if queued else None]
        first = min((noted[0] for noted in open_ if noted), default=started + 1)
        return started, max(0, first - 1), past, started + self.posted

    def submit(self, call: Call) -> None:
        """Queue a call. Make it now without a worker, or in a callback of one of these calls."""
        if not self._threaded:
            self.inside = call.noted
            try:
                call.run()
            finally:
                self.inside = None
            return
        if self._holder == threading.get_ident() and self._broken is None:
            call.run()  # in the queue it would wait for the thread that issued it
            return
        self.calls.append(call)
        self._submitted += 1
        if self._broken is not None:
            call.end(self._broken)
        elif self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpi4py worker", daemon=True)
            self._thread.start()
            self._wake.put(True)
        elif not self._awake:
            self._wake.put(True)

    def hurry(self, call: Call) -> None:
        """Wake the worker; in a callback, whose thread has the turn, make the calls here."""
        if self._holder == threading.get_ident():
            self._drain(call)
        else:
            self._wake.put(True)

    def advance(self, call: Call) -> bool:
        """Run the queue up to this call. False if it has not ended: another thread has the turn."""
        holds = self._holder == threading.get_ident()
        if not holds and not self.turn.acquire(blocking=False):
            return False
        try:
            self._drain(call)
        finally:
            if not holds:
                self.turn.release()
        return call.ended

    def _drain(self, last: Call | None) -> None:
        before = self._holder, self._running, self._doing  # a callback may wait for a later call
        self._holder = threading.get_ident()
        try:
            while self._broken is None and self.calls and not (last is not None and last.ended):
                self._running = call = self.calls.popleft()
                self._doing = call.noted
                call.run()
                del call
        finally:
            self._holder, self._running, self._doing = before

    def _serve(self) -> None:
        # Waking an idle thread takes three times as long as a small call. Therefore the worker,
        # once awake, polls for a while; a thread that waits at once makes its call before that.
        seen, last, is_open = 0, 0.0, True
        while is_open and self._broken is None:
            if seen != self._submitted:
                seen, last = self._submitted, time.monotonic()
            self._awake = time.monotonic() - last < AWAKE_SECONDS
            with contextlib.suppress(Empty):
                # It reads the queue after it has set _awake, and so misses no call.
                is_open = self._wake.get(
                    timeout=LOOK_SECONDS if self._awake or self.calls else None
                )
            if self.calls:
                with self.turn, mpi_library.yield_core():
                    self._drain(None)

    def close(self) -> str | None:
        """Run the queued calls and end the thread; return a sentence if that takes too long."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.put(False)
            thread.join(1 if self._broken else self.timeout.total_seconds())
            if thread.is_alive():
                return f"{_name(self._doing)} on rank {self._rank} has not ended"
            self._thread = None
        return None

    def check(self, now: float) -> None:
        """End a call that has taken longer than the group's time-out."""
        doing = self.inside or self._doing
        if doing is None or doing is not self._seen:
            self._seen, self._since = doing, now
        elif now - self._since > self.timeout.total_seconds():
            text = f"{_name(doing)} on rank {self._rank} has not ended within {self.timeout}"
            if self.inside or self._thread is None or self._holder != self._thread.ident:
                # A thread of the user is inside MPI, and an exception cannot end that call.
                with contextlib.suppress(Exception):  # a notebook's stderr is not a file
                    faulthandler.dump_traceback(all_threads=True)
                mpi_library.abort(mpi_library.HUNG, text)
            if (running := self._running) is None:
                return  # it has just ended
            self._broken = dist.DistBackendError(text)
            for call in (running, *self.calls):
                call.end(self._broken)
            if not self.calls:  # never empty again: synchronous calls must queue behind it
                self.calls.append(running)


def _name(doing: Noted | None) -> str:
    return doing[1] if doing else "a call"


def recorded() -> list[tuple[str, int, int, list[Noted], int]]:
    """Return for each group its name and the record of its lane."""
    return [(lane.group, *lane.recorded()) for lane in live_lanes()]


def live_lanes() -> list[Lane]:
    # Not list(_LANES): the set may grow in another thread meanwhile.
    return [lane for ref in _LANES.keyrefs() if (lane := ref()) is not None]


@cache
def _start_watch() -> None:
    threading.Thread(target=_check_lanes, name="mpi4py deadline", daemon=True).start()


def _check_lanes() -> None:
    while True:
        shortest = min((lane.timeout.total_seconds() for lane in live_lanes()), default=10.0)
        time.sleep(min(1.0, shortest / 4))
        now = time.monotonic()
        for lane in live_lanes():
            lane.check(now)


def close_all() -> str | None:
    """End the workers of all groups; return a sentence if one cannot be ended."""
    sentences = [lane.close() for lane in live_lanes()]
    return next((sentence for sentence in sentences if sentence), None)


mpi_library.BEFORE_END.append(close_all)
