"""The result of a call over MPI, a group's queue of calls, and their deadline.

A group's queued calls run one after the other, in the thread that has the queue's turn: its worker,
or a thread that waits for one of them while the turn is free.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpbench.mpi_backend import library as mpi_library
from ddpbench.mpi_backend.library import mpi
from ddpbench.mpi_backend.tensors import on_device

LOOK_SECONDS = 2e-4  # between two polls of the queue by an awake worker
AWAKE_SECONDS = 5e-3  # after the last call that was queued

# A call as a queue records it: its number, counted from 1, its name, dtype and bytes.
Noted = tuple[int, str, torch.dtype | None, int]
KEPT = 64  # of the latest

_QUEUES: weakref.WeakKeyDictionary[CallQueue, None] = weakref.WeakKeyDictionary()
_DROPPED: list[Request] = []
_ENDING = threading.Lock()  # to end a call; so brief that one lock suffices for all


def failure(name: str, rank: int, error: BaseException) -> Exception:
    """Return a DistBackendError with operation, rank and text, for an error of MPI or the call."""
    if isinstance(error, dist.DistBackendError):
        return error
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

    def outcome(self, timeout: timedelta | None) -> bool:
        """Return True on success. Raises the call's error, or one if it has not ended in time."""
        if not self.ended:
            text = f"{self.name} on rank {self.rank} has not ended within {timeout}"
            raise dist.DistBackendError(text)
        if self.error is not None:
            raise self.error.with_traceback(None)  # a traceback would grow with each wait
        return True


class Call(Work):
    """A collective in a queue."""

    def __init__(
        self, name: str, queue: CallQueue, run: Callable[[], Any], outputs: list[Tensor]
    ) -> None:
        super().__init__(name, queue.rank, outputs)
        self._run: Callable[[], Any] | None = run  # keeps alive memory known to MPI only
        self._queue = queue
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None
        self._gate = threading.Lock()  # locked until the end: far cheaper than an Event
        self._gate.acquire()

    def run(self) -> None:
        """Make the call, in the thread that has the queue's turn."""
        error: Exception | None = None
        self._queue.current = self
        try:
            if self._run is not None:
                self._run()
        except BaseException as raised:
            error = failure(self.name, self.rank, raised)
            if not isinstance(raised, Exception):
                raise  # Ctrl-C in a waiting thread that makes the call
        finally:
            self._queue.current = None  # callbacks may make further calls
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
            # In a new thread GPU 0 is current: torch and callbacks would begin to use it.
            end = partial(futures[0].set_result, None)
            (on_device(end, self.outputs[0]) if self.outputs else end)()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else -1  # zero is C++'s kNoTimeout
        # A thread that waits without a time-out makes the call itself. Otherwise two threads wake
        # each other, which takes half the time of a small call.
        if not self.ended:
            self._queue.advance(self, take_turn=seconds < 0)
        if not self.ended and self._gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self._gate.release()
        return self.outcome(timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        if not self.ended:
            self._queue.advance(self, take_turn=False)  # C++ may wait, and cannot make the call
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

    def __init__(self, works: list[Any]) -> None:
        super().__init__("coalesced calls", -1, [t for work in works for t in work.outputs])
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        return next((error for work in self._works if (error := work.exception())), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        every = torch.futures.collect_all([work.get_future() for work in self._works])

        def joined(done: torch.futures.Future[Any]) -> list[Tensor]:
            return [tensor for future in done.value() for tensor in future.value()]

        return every.then(joined)


class Request(Work):
    """A send or a receive, posted on the caller's thread. It has no future, as on gloo.

    In a queue, which runs calls in order, two ranks that both receive first would deadlock.
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
        self._testing = threading.Lock()

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

    def __del__(self) -> None:
        if not self.is_completed():  # dropped without a wait: MPI still needs the memory
            _DROPPED[:] = [request for request in _DROPPED if not request.is_completed()] + [self]


class CallQueue:
    """A group's queued calls, the turn to run them, their record, and their time-out.

    `call` makes every collective, in the caller's thread or in the one that has the turn. The
    deadline thread only reads, and breaks the queue if a call is late.
    """

    def __init__(self, rank: int, timeout: timedelta, group: str) -> None:
        self.calls: deque[Call] = deque()
        self.turn = threading.Lock()
        self.running: Noted | None = None  # the call inside MPI, a new tuple for each
        self.current: Call | None = None  # the same, if it was queued
        self.rank, self.timeout, self.group = rank, timeout, group
        self.past: deque[Noted] = deque(maxlen=KEPT)
        self.posted = 0  # sends and receives
        self._count, self._keep = itertools.count(1).__next__, self.past.append
        self._taken = self.turn.locked
        self._holder: int | None = None  # ident of the thread that has the turn
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._awake = False  # the worker polls the queue
        self._submitted = 0.0  # when the last call was
        self._broken: Exception | None = None
        self._seen: Noted | None = None
        self._since = 0.0
        _QUEUES[self] = None
        _start_watch()

    def call(
        self,
        opts: Any,
        name: str,
        dtype: torch.dtype | None,
        nbytes: int,
        function: Callable[..., Any],
        *arguments: Any,
    ) -> bool:
        """Make and record an MPI call on a tensor of this dtype and size, in this thread.

        With options, only if the caller waits for the result and no other call is queued before it.
        Raises DistBackendError with operation and rank for any error.
        """
        try:
            if opts is not None and (opts.asyncOp or self.calls or self._taken()):
                return False
        except AttributeError:  # with the options of older torch, the caller may not wait
            return False
        self.running = noted = (self._count(), name, dtype, nbytes)
        self._keep(noted)
        try:
            function(*arguments)
        except Exception as error:
            raise failure(name, self.rank, error) from error
        finally:
            self.running = None
        return True

    def recorded(self) -> tuple[int, int, list[Noted], int]:
        """Return the number of the last call made, the number of the last that ended, the latest
        calls, and the number of all calls with sends and receives."""
        past, running = list(self.past), self.running
        begun = past[-1][0] if past else 0
        ended = begun if running is None else max(0, running[0] - 1)
        started = begun + len(self.calls)
        return started, ended, past, started + self.posted

    def submit(self, call: Call) -> None:
        """Queue a call. In a callback of one of these calls, make it now."""
        if self._holder == threading.get_ident() and self._broken is None:
            call.run()  # in the queue it would wait for the thread that issued it
            return
        self.calls.append(call)
        self._submitted = time.monotonic()
        if self._broken is not None:
            call.end(self._broken)
        elif self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpi4py worker", daemon=True)
            self._thread.start()
            self._wake.put(True)
        elif not self._awake:
            self._wake.put(True)

    def advance(self, call: Call, take_turn: bool) -> None:
        """Run the queue up to this call if this thread has the turn, as in a callback, or takes it
        because it is free. Otherwise wake the worker."""
        holds = self._holder == threading.get_ident()
        if holds:
            self._drain(call)
        elif take_turn and self.turn.acquire(blocking=False):
            try:
                self._drain(call)
            finally:
                self.turn.release()
        if not call.ended and not holds:
            self._wake.put(True)

    def _drain(self, last: Call | None) -> None:
        before = self._holder  # a callback may wait for a later call
        self._holder = threading.get_ident()
        try:
            while self._broken is None and self.calls and not (last is not None and last.ended):
                self.calls.popleft().run()
        finally:
            self._holder = before

    def _serve(self) -> None:
        # Waking an idle thread takes three times as long as a small call. Therefore the worker,
        # once awake, polls for a while; a thread that waits at once makes its call before that.
        is_open = True
        while is_open and self._broken is None:
            self._awake = time.monotonic() - self._submitted < AWAKE_SECONDS
            with contextlib.suppress(Empty):
                # It reads the queue after it has set _awake, and so misses no call.
                is_open = self._wake.get(
                    timeout=LOOK_SECONDS if self._awake or self.calls else None
                )
            if self.calls:
                yield_core, first = mpi_library.find_yield_switch()
                with self.turn:
                    yield_core(True)  # so that another thread can compute meanwhile
                    self._drain(None)
                    yield_core(first)

    def close(self) -> str | None:
        """Run the queued calls and end the thread; return a sentence if that takes too long."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.put(False)
            thread.join(1 if self._broken else self.timeout.total_seconds())
            if thread.is_alive():
                name = self.running[1] if self.running else "a call"
                return f"{name} on rank {self.rank} has not ended"
            self._thread = None
        return None

    def check(self, now: float) -> None:
        """End a call that has taken longer than the group's time-out."""
        running, call = self.running, self.current
        if running is None or running is not self._seen:
            self._seen, self._since = running, now
        elif now - self._since > self.timeout.total_seconds():
            text = f"{running[1]} on rank {self.rank} has not ended within {self.timeout}"
            if call is None or self._thread is None or self._holder != self._thread.ident:
                # A thread of the user is inside MPI, and an exception cannot end that call.
                with contextlib.suppress(Exception):  # a notebook's stderr is not a file
                    faulthandler.dump_traceback(all_threads=True)
                mpi_library.abort(mpi_library.HUNG, text)
                return
            self._broken = dist.DistBackendError(text)
            for late in (call, *self.calls):
                late.end(self._broken)
            if not self.calls:  # never empty again: synchronous calls must queue behind it
                self.calls.append(call)


def live_queues() -> list[CallQueue]:
    """Return the queues of all groups that exist."""
    # Not list(_QUEUES): the set may grow in another thread meanwhile.
    return [queue for ref in _QUEUES.keyrefs() if (queue := ref()) is not None]


@cache
def _start_watch() -> None:
    threading.Thread(target=_check_queues, name="mpi4py deadline", daemon=True).start()
    atexit.register(_close_queues)  # MPI has started: this comes before its end


def _check_queues() -> None:
    while True:
        shortest = min((queue.timeout.total_seconds() for queue in live_queues()), default=10.0)
        time.sleep(min(1.0, shortest / 4))
        now = time.monotonic()
        for queue in live_queues():
            queue.check(now)


def _close_queues() -> None:
    """End the workers of all groups; abort the job if one cannot be ended."""
    for queue in live_queues():
        if reason := queue.close():
            mpi_library.abort(mpi_library.HUNG, reason)
