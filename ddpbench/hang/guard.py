"""A watchdog for any script that trains with torch.distributed:

    torch.distributed.init_process_group(…)
    ddpbench.watchdog(timeout=300)

A thread publishes this rank's heartbeat about twice a second: the place of its main thread, and the
collectives that it has called. When a collective does not end within the time-out, or an exception
ends a rank, all living ranks publish their status, one of them judges, and each prints the verdict.

A rank has waited too long when, for the time-out,
- a collective that it has called, on any group, has not ended; or
- its main thread is in a function of torch.distributed, in `wait()` of an earlier call, or in the
  store, and no call of any group begins or ends meanwhile.
Computing never raises this alarm.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import math
import os
import sys
import threading
from collections.abc import Callable, Hashable
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING

from ddpbench.hang import status_board
from ddpbench.hang.flight_recorder import Flight
from ddpbench.hang.places import describe_error
from ddpbench.hang.status_board import Board
from ddpbench.hang.verdict import RankStatus
from ddpbench.hang.watchdog import Watchdog, read_status
from ddpbench.launch import placement
from ddpbench.records.store import End

if TYPE_CHECKING:
    from typing_extensions import Self

BEAT_SECONDS = 0.5
LEAVE_SECONDS = 3.0  # for the other ranks to print the verdict, and for a watch to print its table
SETTLE_SECONDS = 1.0  # for a rank that has destroyed its groups, or lost a peer, to end or fail
CLOSE_SECONDS = 2.0
HANG, FAILURE = 5, 1  # exit codes; the second is that of Python after an exception
END_SECONDS = 10.0  # for a rank that has failed to end as Python does, with its own handlers
LINGER_SECONDS = 3.0  # how long the rank with the store waits in `close` for the others

Key = tuple[Hashable, ...]  # of a wait: it stays equal as long as nothing happens

before_end: list[Callable[[End], object]] = []  # called with a verdict that ends this process
_on: Guard | None = None
_times = 0  # how often a watchdog was switched on, equal in all ranks


def watchdog(timeout: float = 300.0, end: bool = True) -> Guard:
    """Watch all ranks of this job for hangs. Call it in every rank, after init_process_group.

    timeout: seconds within which every collective, send and receive must end.
    end: after a verdict, exit with code 5; False: print the verdict and continue. A job that ends
    with an exception keeps its own exit code.
    Returns a guard: call `close()` to stop, or use it in `with`. If a watchdog is already running,
    as under `ddpbench watch --timeout`, returns that one.
    Raises ValueError if timeout is not above 0 and finite, RuntimeError without a process group.
    """
    global _on, _times
    import torch.distributed as dist

    if not 0 < timeout < math.inf:
        raise ValueError(f"ddpbench.watchdog: timeout={timeout!r}: expected seconds above 0")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "ddpbench.watchdog: no process group exists yet: call it after "
            "torch.distributed.init_process_group"
        )
    if _on is not None:
        return _on
    from torch.distributed import distributed_c10d

    _times += 1
    prefix = f"ddpbench/guard/{placement.read_restarts()}/{_times}"
    _handle_terminate()
    identity, absent = status_board.identify(dist.get_rank()), [None] * dist.get_world_size()
    # Keep no variable with the store: this frame may live until a garbage collection.
    board = Board(distributed_c10d._get_default_store(), prefix, identity, absent)
    guard = Guard(board, Flight(), timeout, end)
    guard.start()
    _on = guard
    return guard


@cache
def _handle_terminate() -> object:
    """Print the verdict before C++ ends the process, as gloo does in a thread when sizes differ.

    Returns an object to keep alive.
    """
    kind = ctypes.CFUNCTYPE(None)
    set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p

    def handle() -> None:
        if _on is not None:
            _on._alarm("C++ calls std::terminate", leave=False)
        if previous:
            kind(previous)()

    handler = kind(handle)
    previous = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    return handler


class Guard(Watchdog):
    """The watchdog of one rank of a script."""

    def __init__(self, board: Board, flight: Flight, timeout: float, end: bool) -> None:
        super().__init__(board, flight, timeout)
        self._end, self._pid = end, os.getpid()
        self._since: dict[Key, float] = {}  # when each wait began
        self._reported: set[Key] = set()
        self._failure: tuple[str, str] | None = None  # an error that ends this rank, its place
        self._round, self._ending = 0, False
        self._code = 0  # with which this process is about to end
        self._judging = threading.RLock()

    def start(self) -> None:
        """Introduce this rank to the others, and watch it in a thread."""
        self._heartbeat = read_status(self._flight, heartbeat=True)
        self._board.publish_heartbeat(self._heartbeat)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._handle_exception
        atexit.register(self.close)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # sys.excepthook receives an uncaught error next, and judges it.
        if kind is None or not issubclass(kind, Exception):
            self.close()

    def close(self) -> None:
        """Stop watching, and report to the other ranks that this one has left.

        Rank 0, which usually has the store, waits for the others, whose `close` needs it.
        """
        global _on
        if self._closed.is_set() or os.getpid() != self._pid:  # a child by os.fork has no thread
            return
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        if sys.excepthook == self._handle_exception:
            sys.excepthook = self._previous_hook
        atexit.unregister(self.close)
        if not self._code:  # else the others leave, too
            # At exit the main thread no longer has a line.
            status = read_status(self._flight, place=self._heartbeat.place)
            self._board.publish_heartbeat(status, CLOSE_SECONDS)
            self._board.mark("left", self._rank)
            if self._rank == 0:
                ranks = range(len(self._board.identities))
                self._board.await_keys([self._board.key("left", r) for r in ranks], LINGER_SECONDS)
        self._board.client.close()
        _on = None

    def _watch(self) -> None:
        while not (self._closed.wait(BEAT_SECONDS) or self._code):
            self._beat()

    def _beat(self) -> None:
        import torch.distributed as dist

        self._heartbeat = read_status(self._flight, heartbeat=True)
        answered = self._board.publish_heartbeat(self._heartbeat)
        key = self._board.key(f"round {self._round}", "judge")
        if answered and self._board.await_keys([key], 0.0) is not None:
            # A rank that ends its groups may leave or fail before it takes part in a verdict.
            if self._heartbeat.inside == "destroy_process_group" or not dist.is_initialized():
                self._closed.wait(SETTLE_SECONDS)
            self._alarm()
        elif self._waits_too_long():
            self._alarm(f"has waited longer than {self._timeout:g} s", late=True)

    def _waits_too_long(self) -> bool:
        now, since = self._clock.monotonic(), self._since
        waits = find_waits(self._heartbeat)
        self._since = {wait: since.get(wait, now) for wait in waits}
        late = {wait for wait in waits if now - self._since[wait] >= self._timeout}
        late -= self._reported
        if not late:
            return False
        # A heartbeat assumes that each group's last call is open: only its entry is right.
        logs = self._flight.read_logs(self._heartbeat.inside, whole=True)
        open_groups = {log.group for log in logs if log.is_open}
        confirmed = {wait for wait in late if len(wait) > 2 or wait[0] in open_groups}
        self._since |= dict.fromkeys(late - confirmed, now)
        return bool(confirmed)

    def _handle_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """As sys.excepthook: print the traceback first, then the verdict."""
        fails = isinstance(error, Exception) and trace is not None
        if fails and self._failure is None:
            self._failure = describe_error(error)
        if not self._code:  # else a verdict is printed: another rank's end caused this error
            self._previous_hook(kind, error, trace)
            if fails:
                self._alarm(leave=not self._end)
        while self._code == HANG:
            self._clock.sleep(1.0)  # until the thread ends this process
        if self._code:  # end like Python, with atexit handlers and buffered files
            self._ending = True
            faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=2)
            with self._judging:  # the other ranks may still print
                pass

    def _alarm(self, cause: str = "", *, late: bool = False, leave: bool = True) -> None:
        """Publish the status, let one rank judge, print its verdict; then end the process, or not.

        cause: why this rank raises the alarm, "" if another does or an error follows; late: as in
        RankStatus; leave: end this process, which otherwise may end by itself.
        """
        with self._judging:
            if self._closed.is_set() or self._code or os.getpid() != self._pid:
                return
            error, place = self._failure or ("", "")
            topic = f"round {self._round}"
            self._round += 1
            judgement = self._agree_judgement(topic, error or cause, late and not error, place)
            first = judgement.speaks(self._rank) or not judgement.store_answers
            stacks = judgement.stacks if first else ""
            status_board.print_message(f"ddpbench: {judgement.sentence}\n{stacks}")
            self._reported.update(find_waits(read_status(self._flight, heartbeat=True)))
            if self._end or not leave:
                self._code = FAILURE if judgement.failed or self._failure else HANG
                for call in before_end:
                    call(End("failed", judgement.sentence, self._code))
                # A launcher ends all ranks as soon as one has ended.
                if judgement.store_answers:
                    self._board.mark(topic, "printed", self._rank)
                    keys = [self._board.key(topic, "printed", r) for r in judgement.heard]
                    self._board.await_keys(keys, LEAVE_SECONDS)
                if self._rank == 0:  # it usually has the store
                    self._clock.sleep(LEAVE_SECONDS / 4)
            self._board.kill_ranks(judgement.stopped if self._end else ())
        if self._end and leave:
            if self._code == FAILURE:  # other ranks' ends may unblock this main thread, which ends
                self._board.await_ends(judgement.failed, END_SECONDS)
                self._clock.sleep(SETTLE_SECONDS)
            if not (self._ending or self._closed.is_set()):
                status_board.end_process(self._code)


def find_waits(status: RankStatus) -> list[Key]:
    """Return a key for each wait of a rank: pairs for open collectives."""
    waits: list[Key] = [(log.group, log.started) for log in status.logs if log.is_open]
    moves = [log.moves for log in status.logs]
    # A receive in a loop looks alike, but moves.
    if status.inside and min(moves, default=-1) >= 0:
        waits.append((status.inside, status.place, *moves))
    return waits
