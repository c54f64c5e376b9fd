"""Nothing hangs: a thread ends this rank when a deadline passes or a signal comes.

At the end it publishes this rank's last words in the store, collects the others' for a moment, and
the lowest rank that lives prints one sentence: who is to blame, where, and who waits. It sleeps
between deadlines, so it takes no time from a timed span; heartbeats are made where a deadline is
set anew, about one a second.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from ddpbench.hang.board import Board, say
from ddpbench.hang.flight import Flight
from ddpbench.hang.self_report import Who, heartbeat, last_words, state_of
from ddpbench.hang.status import ALIVE, DIED, STOPPED, RankStatus
from ddpbench.hang.verdict import verdict
from ddpbench.launch import siblings

if TYPE_CHECKING:
    import torch.distributed as dist

GRACE_SECONDS = 4.0  # for the other ranks' last words
BEAT_SECONDS = 1.0
BEAT_PATIENCE_SECONDS = 0.2  # for the store, at a heartbeat
# After a signal, how long the ranks may take to stop together at the next repetition.
SIGNAL_SECONDS = {signal.SIGINT: 10.0, signal.SIGTERM: 10.0, signal.SIGUSR1: 10.0}
# torchrun and Slurm kill half a minute after SIGTERM; an MPI's launcher may do so after a second.
HURRIED_SECONDS = {**SIGNAL_SECONDS, signal.SIGTERM: 0.5}


class Watchdog:
    """One a rank. `phase` names what the rank does and sets the deadline for it."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        who: Sequence[Who],
        timeout_seconds: float,
        leave: Callable[[int], NoReturn],
        signal_seconds: Mapping[signal.Signals, float] = SIGNAL_SECONDS,
        mode: str = "end",
    ) -> None:
        """store: a client of its own, used by nobody else; leave: ends the process; mode: what
        comes at a deadline, "end", "tell" (and go on) or "off"."""
        self._signal_seconds = signal_seconds
        self._board, self._rank = Board(store, "ddpbench/watch", rank, who), rank
        self._timeout, self._leave, self._mode = timeout_seconds, leave, mode
        self._flight, self._beaten, self._told_times = Flight(fresh=True), -math.inf, 0
        self._phase, self._closed = "start", False
        self._lock = threading.Lock()
        self.signal: int | None = None
        self.on_end: Callable[[str, str, int], None] = lambda state, sentence, code: None
        self._deadline = self._next_deadline()
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        # The C-level handler writes here at once, even while the main thread is inside MPI.
        self._wake_end = wake
        self._previous = {number: signal.signal(number, self._note) for number in SIGNAL_SECONDS}
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="ddpbench-watchdog", daemon=True)
        self._thread.start()

    def phase(self, what: str) -> None:
        """This rank now does `what`, and is done with it within the time-out."""
        self._phase, self._beaten = what, -math.inf
        self.rearm()

    def rearm(self) -> None:
        """The rank made progress: the deadline counts from now. Not within a timed span."""
        if self.signal is None:
            self._deadline = self._next_deadline()
        if self._mode != "off" and time.monotonic() - self._beaten > BEAT_SECONDS:
            self._board.beat(heartbeat(self._flight, self._phase), BEAT_PATIENCE_SECONDS)
            self._beaten = time.monotonic()

    def close(self) -> None:
        """End the thread; signals are the program's again, unless one has come: who was told to end
        is about to store the end, and Slurm tells it more than once."""
        self._closed = True
        os.write(self._wake_end, b"\0")
        self._thread.join()
        self._board.line.close()
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler if self.signal is None else signal.SIG_IGN)

    def _next_deadline(self) -> float:
        return math.inf if self._mode == "off" else time.monotonic() + self._timeout

    def _note(self, number: int, frame: object) -> None:
        self.signal = number

    def _watch(self) -> None:
        while not self._closed:
            wait = self._deadline - time.monotonic()
            if wait <= 0:
                self._due()
                continue
            # Where there is no deadline now, one may be set meanwhile.
            if select.select([self._wake], [], [], min(wait, self._timeout))[0]:
                for byte in os.read(self._wake, 64):
                    self._signalled(byte)

    def _due(self) -> None:
        """A deadline has passed: that of a signal, or the rank's own."""
        if self.signal is not None:
            self.end(f"ended by {signal.Signals(self.signal).name}")
        cause = f"missed the deadline of {self._timeout:g} s (--timeout)"
        if self._mode == "end":
            self.end(cause, late=True)
        self._deadline = math.inf  # until the rank makes progress
        self._told_times += 1
        self._tell(f"tell/{self._told_times}", self._words(cause, True), False)

    def _signalled(self, number: int) -> None:
        if number not in SIGNAL_SECONDS:
            return
        again = self.signal == number and number == signal.SIGINT and self._interrupted
        self.signal = number
        self._interrupted = True
        # A launcher that lost a rank kills the others soon after.
        me = self._board.me
        lost = DIED in (state_of(who, me) for who in self._board.who if who is not None)
        allowed = 0.0 if again or lost else self._signal_seconds[signal.Signals(number)]
        self._deadline = min(self._deadline, time.monotonic() + allowed)

    _interrupted = False

    def end(self, cause: str, late: bool = False, place: str = "") -> NoReturn:
        """Report, find out who is silent, tell it once, and end this process.

        cause: why this rank ends, e.g. the text of an error; place: where in the code, by default
        where the main thread is. Never returns; a second thread that calls it waits for the end of
        the process.
        """
        self._lock.acquire()
        code = 5
        try:
            code = self._tell("end", self._words(cause, late, place), True)
        finally:  # whatever happens to stderr or the disk: this process ends
            self._leave(code)

    def _words(self, cause: str, late: bool, place: str = "") -> RankStatus:
        return replace(last_words(self._flight, self._phase, place), cause=cause, late=late)

    def _tell(self, name: str, mine: RankStatus, ending: bool) -> int:
        """Report under this name, collect, and let one rank tell; the exit code."""
        words, together = self._board.collect(name, mine, GRACE_SECONDS)
        silent = self._board.silent(words, together)
        interrupted = self.signal is not None and not silent
        code = 130 if interrupted else 5
        # Without the store, the lowest rank that lives on this host speaks.
        unheard = ALIVE in (each.state for each in silent if each.rank < self._rank)
        tells = min(words) == self._rank and (together or not unheard)
        if not tells or (together and self._told(name, 0.0)):
            if ending:
                self._told(name, GRACE_SECONDS)
            return code
        sentence = verdict(silent, words, together)
        say(f"ddpbench: {sentence}\n")
        if ending:
            siblings.report_verdict(sentence)
            self.on_end("interrupted" if interrupted else "failed", sentence, code)
            self._board.kill(e.rank for e in silent if e.state == STOPPED or mine.late)
        self._board.line.ask(1.0, lambda store: store.set(self._board.key(name, "told"), "1"))
        return code

    def _told(self, name: str, seconds: float) -> bool:
        """Whether another rank has told it, or tells it within this time."""
        key, until = self._board.key(name, "told"), time.monotonic() + seconds

        def ask(store: dist.Store) -> bool:
            while not store.check([key]) and time.monotonic() < until:
                time.sleep(0.05)
            return store.check([key])

        return self._board.line.ask(seconds + 1.0, ask) or False
