"""The watchdog of a rank: what commands and scripts share, and the watchdog of ddpbench's commands.

At a verdict each living rank publishes its status under a topic. The first rank judges all of them
and publishes the judgement, which the others read: all ranks act on the same one.

In a command, the thread sleeps between deadlines, so it takes no time from a timed span. When a
deadline is renewed, about once a second, the rank publishes a heartbeat. At the end the lowest
living rank prints the verdict: which rank causes the hang, where, and which ranks wait.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from ddpbench.hang import places, verdict
from ddpbench.hang.flight_recorder import Flight
from ddpbench.hang.status_board import Board, RankIdentity, end_process, print_message
from ddpbench.hang.verdict import ALIVE, DIED, STOPPED, RankStatus, SilentRank
from ddpbench.launch import cleanup
from ddpbench.records import codec

if TYPE_CHECKING:
    import torch.distributed as dist

GRACE_SECONDS = 4.0  # for the statuses of the other ranks
STACK_FRAMES = 30  # the innermost frames of a reported stack
BEAT_SECONDS = 1.0
BEAT_PATIENCE_SECONDS = 0.2  # how long a heartbeat waits for the store
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# After a signal, how long the ranks may take to stop together at the next repetition.
SIGNAL_SECONDS = 10.0
HURRIED_SECONDS = 0.5  # after SIGTERM of an MPI's launcher, which may kill after a second


@dataclass(frozen=True)
class Judgement:
    """One rank's examination of all ranks.

    sentence: the verdict; heard: the ranks that answered; failed: those of them with an error,
    which another rank may have caused; stacks: of the ranks that answered; interrupted: whether no
    rank has a cause of its own; store_answers: whether the other ranks can read this.
    """

    sentence: str
    heard: tuple[int, ...]
    failed: tuple[int, ...]
    silent: tuple[SilentRank, ...]
    stacks: str
    interrupted: bool
    store_answers: bool
    stopped: tuple[int, ...]

    def speaks(self, rank: int) -> bool:
        """Return whether this rank prints for all: the lowest one that answered or, without the
        store, that lives on this host."""
        alive = [r.rank for r in self.silent if r.state == ALIVE and not self.store_answers]
        return rank == min([*self.heard, *alive])


def read_status(
    flight: Flight, phase: str = "", place: str = "", heartbeat: bool = False
) -> RankStatus:
    """Return this rank's status.

    place: the line of an error that has unwound the stack already; heartbeat: only the place of the
    main thread and the numbers of collectives.
    """
    if place:
        return RankStatus(place, "", flight.read_logs("", whole=True), phase)
    frame = places.find_main_frame()
    inside = places.find_distributed_call(frame)
    logs = flight.read_logs(inside, whole=not heartbeat)
    status = RankStatus(places.find_place(frame), inside, logs, phase)
    if heartbeat:
        return status
    return replace(status, stack="".join(traceback.format_stack(frame)[-STACK_FRAMES:]))


class Watchdog:
    """The part that commands and scripts share. Waits are by the clock of the board."""

    def __init__(self, board: Board, flight: Flight, timeout: float) -> None:
        self._board, self._rank, self._clock = board, board.rank, board.clock
        self._flight, self._timeout, self._phase = flight, timeout, ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ddpbench-watchdog", daemon=True)

    def _watch(self) -> None:
        raise NotImplementedError

    def _agree_judgement(
        self, topic: str, cause: str, late: bool = False, place: str = ""
    ) -> Judgement:
        """Judge all ranks if this one is the first, else return the first rank's judgement.

        cause, late: as in RankStatus; place: the line of an error. Judges after all if the first
        rank is lost, or the store does not answer.
        """
        board = self._board
        status = replace(read_status(self._flight, self._phase, place), cause=cause, late=late)
        if not board.mark(topic, "judge"):
            board.publish(status, topic, self._rank)
            key = board.key(topic, "judgement")
            if text := board.await_keys([key], GRACE_SECONDS + 1.0):
                judgement = codec.decode(Judgement, json.loads(text))
                board.read_heartbeats([*judgement.failed, *judgement.stopped])  # to observe them
                return judgement
        judgement = self._judge(topic, status)
        if judgement.store_answers:
            board.publish(judgement, topic, "judgement")
        return judgement

    def _judge(self, topic: str, status: RankStatus) -> Judgement:
        collected = self._board.collect_statuses(topic, status, GRACE_SECONDS)
        statuses, silent, store_answers = collected
        return Judgement(
            sentence=verdict.explain_hang(silent, statuses, store_answers),
            heard=tuple(statuses),
            failed=tuple(r for r, s in statuses.items() if s.cause and not s.late),
            silent=tuple(replace(rank, seen=None) for rank in silent),
            stacks="".join(f"rank {rank}:\n{s.stack}" for rank, s in sorted(statuses.items())),
            interrupted=verdict.is_interrupted(statuses),
            store_answers=store_answers,
            stopped=tuple(rank.rank for rank in silent if rank.state == STOPPED),
        )


class CommandWatchdog(Watchdog):
    """The watchdog of one of ddpbench's ranks: ends it when a deadline passes or a signal comes.

    `begin_phase` names the rank's current work and sets a deadline.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        identities: Sequence[RankIdentity],
        timeout_seconds: float,
        *,
        terminate_seconds: float = SIGNAL_SECONDS,
        is_on: bool = True,
    ) -> None:
        """terminate_seconds: as SIGNAL_SECONDS, for SIGTERM; is_on: whether a missed deadline ends
        this rank."""
        board = Board(store, "ddpbench/watch", identities[rank], identities)
        super().__init__(board, Flight(), timeout_seconds)
        self._terminate_seconds, self._is_on = terminate_seconds, is_on
        self._phase, self._beat_time = "start", -math.inf
        self._lock = threading.Lock()
        self.signal: int | None = None
        self._gets_signal = False
        self.on_end: Callable[[str, str, int], None] = lambda state, sentence, code: None
        self._deadline = time.monotonic() + timeout_seconds if is_on else math.inf
        # The C-level handler writes here at once, even while the main thread is inside MPI.
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake_end, False)
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        self._thread.start()

    def begin_phase(self, name: str) -> None:
        """Name this rank's next phase, which must end within the time-out."""
        self._phase, self._beat_time = name, -math.inf
        self.rearm()

    def rearm(self) -> None:
        """Let the deadline count from now: the rank made progress. Call it outside timed spans."""
        if not self._is_on:
            return
        if self.signal is None:
            self._deadline = time.monotonic() + self._timeout
        if time.monotonic() - self._beat_time > BEAT_SECONDS:
            heartbeat = read_status(self._flight, self._phase, heartbeat=True)
            self._board.publish_heartbeat(heartbeat, BEAT_PATIENCE_SECONDS)
            self._beat_time = time.monotonic()

    def expect_signal(self) -> None:
        """Act as if this rank had received another rank's signal: its own may come late."""
        self._gets_signal = True

    def close(self) -> None:
        """End the thread and restore the program's signal handlers; ignore signals if one has come.

        After a signal to any rank this one stores its end, and Slurm may signal again meanwhile.
        """
        self._closed.set()
        os.write(self._wake_end, b"\0")
        self._thread.join()
        self._board.client.close()
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            ignored = self.signal is not None or self._gets_signal
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    def end(self, cause: str, late: bool = False, place: str = "") -> NoReturn:
        """Judge with the other ranks, let one print the verdict, and end this process.

        cause: why this rank ends, e.g. the text of an error; place: its line, by default where the
        main thread is. Never returns; a second thread that calls it waits for the process's end.
        """
        self._lock.acquire()
        code = 5
        try:
            code = self._report(cause, late, place)
        finally:  # end this process even if stderr or the disk fails
            end_process(code)

    def _note(self, number: int, frame: object) -> None:
        self.signal = number

    def _watch(self) -> None:
        while not self._closed.is_set():
            wait = self._deadline - time.monotonic()
            if wait <= 0 and self.signal is not None:
                self.end(f"{verdict.BY_SIGNAL}{signal.Signals(self.signal).name}")
            if wait <= 0:
                self.end(f"missed the deadline of {self._timeout:g} s (--timeout)", late=True)
            # Without a deadline now, wait no longer: one may be set meanwhile.
            if select.select([self._wake], [], [], min(wait, self._timeout))[0]:
                for byte in os.read(self._wake, 64):
                    self._handle_signal(byte)

    def _handle_signal(self, number: int) -> None:
        if number not in SIGNALS:
            return
        self.signal = number
        # A launcher that lost a rank kills the others soon after.
        lost = DIED in map(self._board.observe, range(len(self._board.identities)))
        allowed = self._terminate_seconds if number == signal.SIGTERM else SIGNAL_SECONDS
        self._deadline = min(self._deadline, time.monotonic() + (0.0 if lost else allowed))

    def _report(self, cause: str, late: bool, place: str) -> int:
        """Let one rank print the verdict; return the exit code of this rank."""
        judgement = self._agree_judgement("end", cause, late, place)
        # After a failed rank, the launcher also signals the other ranks.
        alone = judgement.interrupted and not judgement.silent
        interrupted = self.signal is not None and alone
        code, key = 130 if interrupted else 5, self._board.key("end", "printed")
        if not judgement.speaks(self._rank):
            self._board.await_keys([key], GRACE_SECONDS)
            return code
        print_message(f"ddpbench: {judgement.sentence}\n")
        cleanup.report_verdict(judgement.sentence)
        self.on_end("interrupted" if interrupted else "failed", judgement.sentence, code)
        silent = [rank.rank for rank in judgement.silent]
        self._board.kill_ranks(silent if late else judgement.stopped)
        self._board.mark("end", "printed")
        return code
