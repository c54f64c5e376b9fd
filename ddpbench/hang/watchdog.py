"""The watchdog of ddpbench's commands: end this rank when a deadline passes or a signal comes.

At the end its thread publishes this rank's status, collects those of the others for a moment, and
the lowest living rank prints one sentence: which rank causes the hang, where, and which ranks wait.
The thread sleeps between deadlines, so it takes no time from a timed span. When a deadline is
renewed, about once a second, the rank publishes a heartbeat.
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

from ddpbench.hang.flight_recorder import Flight
from ddpbench.hang.judge import judge
from ddpbench.hang.self_report import RankIdentity, observe_state, read_heartbeat, read_status
from ddpbench.hang.status import ALIVE, DIED, RankStatus
from ddpbench.hang.status_board import Board, print_message
from ddpbench.hang.verdict import BY_SIGNAL
from ddpbench.launch import siblings

if TYPE_CHECKING:
    import torch.distributed as dist

GRACE_SECONDS = 4.0  # for the statuses of the other ranks
BEAT_SECONDS = 1.0
BEAT_PATIENCE_SECONDS = 0.2  # how long a heartbeat waits for the store
# After a signal, how long the ranks may take to stop together at the next repetition.
SIGNAL_SECONDS = {signal.SIGINT: 10.0, signal.SIGTERM: 10.0, signal.SIGUSR1: 10.0}
# torchrun and Slurm kill half a minute after SIGTERM; an MPI's launcher may do so after a second.
HURRIED_SECONDS = {**SIGNAL_SECONDS, signal.SIGTERM: 0.5}


class Watchdog:
    """The watchdog of one rank. `begin_phase` names the rank's current work and sets a deadline."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        identities: Sequence[RankIdentity],
        timeout_seconds: float,
        *,
        leave: Callable[[int], NoReturn],
        signal_seconds: Mapping[signal.Signals, float] = SIGNAL_SECONDS,
        mode: str = "end",
    ) -> None:
        """leave: ends the process; mode: as --watchdog, for a missed deadline."""
        self._signal_seconds = signal_seconds
        self._board, self._rank = Board(store, "ddpbench/watch", rank, identities), rank
        self._timeout, self._leave, self._mode = timeout_seconds, leave, mode
        self._flight, self._beat_time, self._reports = Flight(fresh=True), -math.inf, 0
        self._phase, self._closed = "start", False
        self._lock = threading.Lock()
        self.signal: int | None = None
        self._interrupted = self._gets_signal = False
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

    def begin_phase(self, name: str) -> None:
        """Name this rank's next phase, which must end within the time-out."""
        self._phase, self._beat_time = name, -math.inf
        self.rearm()

    def rearm(self) -> None:
        """Let the deadline count from now: the rank made progress. Call it outside timed spans."""
        if self.signal is None:
            self._deadline = self._next_deadline()
        if self._mode != "off" and time.monotonic() - self._beat_time > BEAT_SECONDS:
            heartbeat = read_heartbeat(self._flight, self._phase)
            self._board.publish_heartbeat(heartbeat, BEAT_PATIENCE_SECONDS)
            self._beat_time = time.monotonic()

    def expect_signal(self) -> None:
        """Act as if this rank had received another rank's signal: its own may come late."""
        self._gets_signal = True

    def close(self) -> None:
        """End the thread and restore the program's signal handlers; ignore signals if one has come.

        After a signal to any rank this one stores its end, and Slurm may signal again meanwhile.
        """
        self._closed = True
        os.write(self._wake_end, b"\0")
        self._thread.join()
        self._board.client.close()
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            ignored = self.signal is not None or self._gets_signal
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    def _next_deadline(self) -> float:
        return math.inf if self._mode == "off" else time.monotonic() + self._timeout

    def _note(self, number: int, frame: object) -> None:
        self.signal = number

    def _watch(self) -> None:
        while not self._closed:
            wait = self._deadline - time.monotonic()
            if wait <= 0:
                self._handle_deadline()
                continue
            # Without a deadline now, wait no longer: one may be set meanwhile.
            if select.select([self._wake], [], [], min(wait, self._timeout))[0]:
                for byte in os.read(self._wake, 64):
                    self._handle_signal(byte)

    def _handle_deadline(self) -> None:
        if self.signal is not None:
            self.end(f"{BY_SIGNAL}{signal.Signals(self.signal).name}")
        cause = f"missed the deadline of {self._timeout:g} s (--timeout)"
        if self._mode == "end":
            self.end(cause, late=True)
        self._deadline = math.inf  # until the rank makes progress
        self._reports += 1
        self._report(f"report/{self._reports}", self._read_status(cause, True), False)

    def _handle_signal(self, number: int) -> None:
        if number not in SIGNAL_SECONDS:
            return
        again = self.signal == number and number == signal.SIGINT and self._interrupted
        self.signal = number
        self._interrupted = True
        # A launcher that lost a rank kills the others soon after.
        own = self._board.identity
        lost = DIED in (observe_state(other, own) for other in self._board.identities if other)
        allowed = 0.0 if again or lost else self._signal_seconds[signal.Signals(number)]
        self._deadline = min(self._deadline, time.monotonic() + allowed)

    def end(self, cause: str, late: bool = False, place: str = "") -> NoReturn:
        """Judge with the other ranks, let one print the verdict, and end this process.

        cause: why this rank ends, e.g. the text of an error; place: its line, by default where the
        main thread is. Never returns; a second thread that calls it waits for the process's end.
        """
        self._lock.acquire()
        code = 5
        try:
            code = self._report("end", self._read_status(cause, late, place), True)
        finally:  # end this process even if stderr or the disk fails
            self._leave(code)

    def _read_status(self, cause: str, late: bool, place: str = "") -> RankStatus:
        return replace(read_status(self._flight, self._phase, place), cause=cause, late=late)

    def _report(self, topic: str, status: RankStatus, ending: bool) -> int:
        judgement = judge(self._board, topic, status, GRACE_SECONDS)
        # After a failed rank, the launcher also signals the other ranks.
        alone = judgement.interrupted and not judgement.silent
        interrupted = self.signal is not None and alone
        code = 130 if interrupted else 5
        # Without the store, the lowest rank that lives on this host prints.
        unheard = any(r.state == ALIVE and r.rank < self._rank for r in judgement.silent)
        prints = min(judgement.heard) == self._rank and (judgement.store_answers or not unheard)
        key = self._board.key(topic, "told")
        # A rank that answers after the others' grace period has more statuses, but is too late.
        if not prints or (judgement.store_answers and not self._board.claim(topic, "speaker")):
            if ending:
                self._board.await_keys([key], GRACE_SECONDS)
            return code
        print_message(f"ddpbench: {judgement.sentence}\n")
        if ending:
            siblings.report_verdict(judgement.sentence)
            self.on_end("interrupted" if interrupted else "failed", judgement.sentence, code)
            silent = [rank.rank for rank in judgement.silent]
            self._board.kill_ranks(silent if status.late else judgement.stopped)
        self._board.publish("1", topic, "told")
        return code
