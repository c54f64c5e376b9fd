"""A watchdog for any script that trains with torch.distributed:

    torch.distributed.init_process_group(…)
    ddpbench.watchdog(timeout=300)

From then on a thread leaves this rank's heartbeat in the store about twice a second: where its main
thread is, which collectives it has called. When a collective of a rank has not ended within the
time-out, or an exception ends a rank, all that live publish their last words, one of them judges,
and each prints the verdict.

A rank has waited too long when, for the time-out,
- a collective that it has called, on any group, has not ended; or
- its main thread is in a function of torch.distributed, in `wait()` of what it has begun before, or
  in the store, and no call of any group is made or ends meanwhile.
Who only computes, however long, never raises that alarm. But a wait may be of a kind that is not
recognised: when a rank has called nothing of torch.distributed for a quarter longer than that, the
ranks say once where each is, and the job goes on.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import os
import sys
import threading
import time
from collections.abc import Hashable
from dataclasses import asdict, dataclass, replace
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING

from ddpbench.hang import board, self_report, verdict
from ddpbench.hang.board import Board
from ddpbench.hang.flight import Flight
from ddpbench.hang.places import described, main_frame, position
from ddpbench.hang.status import ALIVE, DIED, ENDED, OVER, STOPPED, RankStatus
from ddpbench.records import codec

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self

BEAT_SECONDS = 0.5
# For the other ranks' last words; the verdict comes within the time-out and 5 s.
GRACE_SECONDS = 3.0
LEAVE_SECONDS = 1.0  # for the others to have told the verdict too
SETTLE_SECONDS = 1.0  # for a rank that has ended its groups to say how it ends itself
CLOSE_SECONDS = 2.0
LINGER_SECONDS = 3.0  # of a rank that ends and takes the store along, for the others to end too

_on: Guard | None = None
_times = 0  # that one was switched on: all ranks do so equally often


def watchdog(timeout: float = 300.0, end: bool = True) -> Guard:
    """Watch this process's ranks from now on; all of them call it, after init_process_group.

    timeout: seconds within which every collective, send and receive must end; end: leave with exit
    code 5 after the verdict, otherwise tell it and go on. Where nothing is known to be late but
    nothing moves either, places are told and the job goes on whatever `end` is. What is returned
    can be closed, or used with `with`.
    Raises ValueError for a time-out that is none, RuntimeError without a process group or where a
    watchdog is on already.
    """
    global _on, _times
    import torch.distributed as dist

    if not 0 < timeout < math.inf:
        raise ValueError(f"ddpbench.watchdog: timeout is {timeout!r}: give seconds above 0")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "ddpbench.watchdog: there is no process group yet: call it after "
            "torch.distributed.init_process_group"
        )
    if _on is not None:
        raise RuntimeError("ddpbench.watchdog: one is on already: close it first")
    from torch.distributed import distributed_c10d

    store = board.client(distributed_c10d._get_default_store(), dist.get_world_size())
    _times += 1
    # torchrun's store outlives the ranks that it starts again.
    name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_times}"
    _heed_terminate()
    _on = Guard(store, dist.get_rank(), dist.get_world_size(), timeout, end, name)
    return _on


@cache
def _heed_terminate() -> object:
    """From now on, where C++ gives up, the verdict comes before its own message and end.

    gloo does so when sizes differ, in a thread of its own. Returns what must be kept for it.
    """
    kind = ctypes.CFUNCTYPE(None)
    try:
        change = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return None
    change.argtypes, change.restype = [ctypes.c_void_p], ctypes.c_void_p

    def given_up() -> None:
        if _on is not None:
            _on.ending("C++ gives up")
        if before:
            kind(before)()

    handler = kind(given_up)
    before = change(ctypes.cast(handler, ctypes.c_void_p))
    return handler


@dataclass(frozen=True)
class Verdict:
    """What one rank has found for all, "" nothing yet; heard: who had a part in it; stacks: of
    these, for one of them to print; together: whether the store answers; notice: no reason to end
    the job."""

    sentence: str
    heard: tuple[int, ...]
    stopped: tuple[int, ...]
    stacks: str
    together: bool
    notice: bool


class Guard:
    """The watchdog of one rank."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: float, end: bool, name: str
    ) -> None:
        """store: a client of its own; name: the same in all ranks, of no other watchdog."""
        self._board = Board(store, f"ddpbench/guard/{name}", rank, [None] * size)
        self._rank, self._timeout, self._end = rank, timeout, end
        self._flight, self._pid = Flight(), os.getpid()
        self._since: dict[Hashable, float] = {}
        self._newest: dict[Hashable, list[int]] = {}
        self._put_off: set[Hashable] = set()  # as long as another rank waits, its alarm tells more
        self._failure: tuple[str, str] | None = None  # an error that ends this rank, its place
        self._told: set[Hashable] = set()
        self._round, self._leaving = 0, False
        self._judging = threading.RLock()
        self._closed = threading.Event()
        self._board.introduce(self_report.whoami(rank))
        self._last = self_report.heartbeat(self._flight)
        self._board.beat(self._last)
        self._hooked = sys.excepthook
        sys.excepthook = self._raised
        atexit.register(self.close, at_exit=True)
        self._thread = threading.Thread(target=self._watch, name="ddpbench-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What nobody catches comes to sys.excepthook next, where it is judged.
        if kind is None or not issubclass(kind, Exception):
            self.close()

    def close(self, at_exit: bool = False) -> None:
        """Watch no longer; the other ranks see that this one has left.

        at_exit: this process ends, and the store with it if it lives here: the others may need it
        to learn who has left.
        """
        global _on
        if self._closed.is_set() or os.getpid() != self._pid:  # a child by os.fork has no thread
            return
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        if sys.excepthook == self._raised:
            sys.excepthook = self._hooked
        atexit.unregister(self.close)
        last = self_report.last_words(self._flight, at=self._last.place)  # at exit no line is left
        self._board.say_left(replace(last, left=True), CLOSE_SECONDS)
        if at_exit and self._rank == 0 and board.is_here(self._board.line.store):
            self._board.await_leaving(LINGER_SECONDS)
        self._board.line.close()
        self._thread.join(CLOSE_SECONDS)  # see Line.close
        _on = None

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._last = beat = self_report.heartbeat(self._flight)
            reached = self._board.beat(beat)
            if None in self._board.who:
                self._board.introduce(self._board.me)
            if reached and self._is_there("alarm"):
                self._settle(beat)
                self._alarm()
            elif self._waits_too_long(beat, progress := _progress(beat)):
                self._alarm(f"has waited longer than {self._timeout:g} s", late=True)
            elif self._stands_still(progress):
                self._alarm(f"no progress for {self._patience():g} s", still=True)

    def _settle(self, beat: RankStatus) -> None:
        """Let a rank that ends its groups leave, or fail, before it has its part in a verdict."""
        until = time.monotonic() + SETTLE_SECONDS
        ends = beat.destroyed or beat.inside == "destroy_process_group"
        while ends and not self._failure and not self._closed.is_set() and time.monotonic() < until:
            if self._is_there("verdict"):
                return
            time.sleep(board.LOOK_SECONDS)

    def _patience(self) -> float:
        return 1.25 * self._timeout + 2 * BEAT_SECONDS

    def _is_there(self, what: str) -> bool:
        key = self._board.key(what, self._round)
        return self._board.line.ask(board.ANSWER_SECONDS, lambda store: store.check([key])) or False

    def _waits_too_long(self, beat: RankStatus, progress: Hashable) -> bool:
        """Whether this rank has waited in something for too long, and has not told so yet."""
        now, before = time.monotonic(), self._since
        self._since = {what: before.get(what, now) for what in (*_waits(beat), progress)}
        self._newest = {what: n for what, n in self._newest.items() if what in self._since}
        ages = {what: now - self._since[what] for what in set(_waits(beat)) - self._told}
        for what, age in ages.items():
            if age >= self._timeout / 2 and what not in self._newest:
                self._newest[what] = self._flight.newest()
        late = {what for what, age in ages.items() if age >= self._timeout}
        if not late:
            return False
        # gloo's threads may count ends out of order, and so leave a number behind; what is noted of
        # each call is right. And nccl counts no sends and receives, but keeps them.
        true = late & set(_waits(self_report.last_words(self._flight)))
        newest = self._flight.newest()
        true = {what for what in true if len(what) == 2 or self._newest.get(what) == newest}
        for what in late - true:
            self._since[what] = now
            self._newest.pop(what, None)
        return bool(true)

    def _stands_still(self, progress: Hashable) -> bool:
        """Whether nothing of this rank has moved for even longer, and that is not told yet."""
        stood = time.monotonic() - self._since[progress]
        return stood >= self._patience() and progress not in self._told

    def _raised(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """In place of sys.excepthook: the traceback first, then the verdict."""
        fails = isinstance(error, Exception) and trace is not None
        if fails and self._failure is None:
            self._failure = described(error)
        self._await_end()  # where the verdict is told, this error comes of another rank's end
        self._hooked(kind, error, trace)
        if fails:
            self._alarm()
            self._await_end()

    def _await_end(self) -> None:
        while self._leaving:
            time.sleep(1.0)

    def ending(self, cause: str) -> None:
        """This rank ends by itself as soon as the verdict is told."""
        self._alarm(cause, leave=False)

    def _alarm(
        self, cause: str = "", late: bool = False, still: bool = False, leave: bool = True
    ) -> None:
        """Say the last words, have one rank judge, print its verdict; then end, or go on.

        cause: why this rank raises the alarm, "" where another has or an error is on its way; late,
        still: as in RankStatus; leave: end this process.
        """
        with self._judging:
            if self._closed.is_set() or self._leaving or os.getpid() != self._pid:
                return
            found = self._last_words(cause, late, still)
            alarm = self._board.key("alarm", self._round)
            count = self._board.line.ask(board.ANSWER_SECONDS, lambda store: store.add(alarm, 1))
            verdict = None if count in (None, 1) else self._verdict_of_another(found)
            verdict = verdict or self._judge(found)
            self._print(verdict)
            self._round += 1
            now = self_report.heartbeat(self._flight)
            progress = _progress(now)
            (self._told if verdict.sentence else self._put_off).add(progress)
            self._since[progress] = time.monotonic()
            if verdict.notice:
                if found.cause and not still:  # the others have not heard it: once more
                    self._alarm(cause, late, still, leave)
                return
            self._told |= set(_waits(now))
            self._leaving = self._end or not leave
            if self._leaving:
                self._await_told(verdict)
            if self._end and leave:
                self._board.kill(verdict.stopped)
                board.leave(5)

    def _last_words(self, cause: str, late: bool, still: bool) -> RankStatus:
        error, place = self._failure or ("", "")
        last = self_report.last_words(self._flight, at=place)
        return replace(last, cause=error or cause, late=late and not error, still=still)

    def _print(self, verdict: Verdict) -> None:
        first = self._rank == min(verdict.heard) or not verdict.together
        stacks = verdict.stacks if first and not verdict.notice else ""
        if verdict.sentence and (first or not verdict.notice):
            board.say(f"ddpbench: {verdict.sentence}\n{stacks}")

    def _judge(self, mine: RankStatus) -> Verdict:
        """The verdict from all that answer, left for the others."""
        heard, together = self._board.collect(f"words/{self._round}", mine, GRACE_SECONDS)
        silent = self._board.silent(heard, together)
        if self._board.line.gone and silent and silent[0].rank == 0:
            state = {ALIVE: ENDED, DIED: OVER}.get(silent[0].state, silent[0].state)
            silent[0] = replace(silent[0], state=state)
        notice = verdict.is_notice(heard)
        waited = notice and any(_waits(each) for each in heard.values())
        early = waited and _progress(mine) not in self._put_off
        found = Verdict(
            "" if early else verdict.verdict(silent, heard, together),
            tuple(heard),
            tuple(each.rank for each in silent if each.state == STOPPED),
            "".join(f"rank {rank}:\n{each.stack}" for rank, each in sorted(heard.items())),
            together,
            notice,
        )
        key, text = self._board.key("verdict", self._round), json.dumps(asdict(found))
        if together:
            self._board.line.ask(board.ANSWER_SECONDS, lambda store: store.set(key, text))
        return found

    def _verdict_of_another(self, mine: RankStatus) -> Verdict | None:
        """That of the rank that was the first to raise the alarm; None where it does not come."""
        key, own = self._board.key("verdict", self._round), json.dumps(asdict(mine))
        name = self._board.key("words", self._round, self._rank)
        until = time.monotonic() + GRACE_SECONDS + 1.0

        def ask(store: dist.Store) -> bytes:
            store.set(name, own)
            while not store.check([key]) and time.monotonic() < until:
                time.sleep(board.LOOK_SECONDS)
            return store.get(key) if store.check([key]) else b""

        text = self._board.line.ask(GRACE_SECONDS + 1.0, ask)
        return codec.decode(Verdict, json.loads(text)) if text else None

    def _await_told(self, verdict: Verdict) -> None:
        """Let all tell the verdict before this process ends: a launcher ends all with the first."""
        keys = [self._board.key("told", self._round, rank) for rank in verdict.heard]
        until = time.monotonic() + LEAVE_SECONDS

        def ask(store: dist.Store) -> None:
            store.set(self._board.key("told", self._round, self._rank), "1")
            while not store.check(keys) and time.monotonic() < until:
                time.sleep(board.LOOK_SECONDS)

        if verdict.together:
            self._board.line.ask(LEAVE_SECONDS, ask)
        if self._rank == 0:  # the store mostly lives here
            time.sleep(LEAVE_SECONDS / 4)


def _waits(beat: RankStatus) -> list[tuple[Hashable, ...]]:
    """What a rank waits in, open collectives as pairs; the same as long as nothing moves."""
    waits: list[tuple[Hashable, ...]] = [
        (log.group, log.started) for log in beat.logs if log.started > log.finished
    ]
    moves = [log.moves for log in beat.logs]
    if beat.inside and min(moves, default=-1) >= 0:  # a receive in a loop looks the same but moves
        waits.append((beat.inside, beat.place, *_counts(beat)))
    return waits


def _counts(beat: RankStatus) -> list[int]:
    return [n for log in beat.logs for n in (log.started, log.finished, log.moves)]


def _progress(beat: RankStatus) -> tuple[Hashable, ...]:
    """The same as long as a rank calls nothing of torch.distributed; where no calls are counted, as
    long as its main thread stays where it is."""
    counts = _counts(beat)
    moved = any(n > 0 for n in counts)
    return ("progress", *counts) if moved else ("progress", beat.place, *position(main_frame()))
