"""Nothing hangs: a thread ends this rank when a deadline passes or a signal comes.

At the end it publishes this rank's state in the store, collects the others' for a moment, and the
lowest rank that lives prints one sentence naming those that did not answer. It sleeps between
deadlines, so it takes no time from a timed span.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil

if TYPE_CHECKING:
    import torch.distributed as dist

GRACE_SECONDS = 4.0  # for the other ranks' reports
DIED, STOPPED, ALIVE = "has died", "is stopped (SIGSTOP)", "is alive but did not answer"
TOLD = "ddpbench/end/told"
# After a signal, how long the ranks may take to stop together at the next repetition.
SIGNAL_SECONDS = {signal.SIGINT: 10.0, signal.SIGTERM: 10.0, signal.SIGUSR1: 10.0}
# torchrun and Slurm kill half a minute after SIGTERM; an MPI's launcher may do so after a second.
HURRIED_SECONDS = {**SIGNAL_SECONDS, signal.SIGTERM: 0.5}


@dataclass(frozen=True)
class Who:
    """Where a rank runs, for naming it and for looking at it from its own host."""

    rank: int
    host: str
    pid: int
    boot_id: str  # names the machine
    network: str = ""  # names the network namespace: hosts to each other, even on one machine
    processes: str = ""  # names the namespace in which the pid means something

    def sees(self, other: Who) -> bool:
        """Whether the other's process can be looked at from this rank's."""
        return (self.boot_id, self.processes) == (other.boot_id, other.processes)


def state_of(who: Who, me: Who) -> str:
    """What can be seen of a silent rank from here, as the end of "rank 3 (host, pid 7) …"."""
    if not me.sees(who):
        return "did not answer (stopped, dead or cut off)"
    try:
        status = psutil.Process(who.pid).status()
    except psutil.NoSuchProcess:
        return DIED
    except psutil.Error:
        return ALIVE
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return DIED
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED
    return ALIVE


@dataclass(frozen=True)
class Report:
    """What a rank says of itself at the end."""

    phase: str
    cause: str
    late: bool  # it missed its deadline; otherwise an error or a signal ended it
    place: str  # where its main thread is in the code

    def __str__(self) -> str:
        return f"{self.cause}, at {self.place} (in {self.phase})"


def verdict(silent: Sequence[tuple[Who, str]], reports: dict[int, Report], teller: int) -> str:
    """One sentence: which rank is to blame, what it did, where the others were.

    A silent rank that lives is to blame only where the deadline is over: it should have spoken.
    """
    blamed = [(who, state) for who, state in silent if state != ALIVE or reports[teller].late]
    if blamed:
        ranks = "; ".join(f"rank {w.rank} ({w.host}, pid {w.pid}) {state}" for w, state in blamed)
        waiting = ", ".join(map(str, sorted(reports)))
        noun = "rank" if len(reports) == 1 else "ranks"
        return f"{ranks}, while {noun} {waiting} waited in {reports[teller].phase}"
    alike: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        alike.setdefault(str(report), []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in alike.items()
    )


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
    ) -> None:
        """store: a client of its own, used by no other thread; leave: ends the process."""
        self._signal_seconds = signal_seconds
        self._store, self._rank, self._who = store, rank, who
        self._timeout, self._leave = timeout_seconds, leave
        self._phase, self._deadline = "start", time.monotonic() + timeout_seconds
        self._closed = False
        self._lock = threading.Lock()
        self.signal: int | None = None
        self.on_end: Callable[[str, str, int], None] = lambda state, sentence, code: None
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
        self._phase = what
        self.rearm()

    def rearm(self) -> None:
        """The rank made progress: the deadline counts from now."""
        if self.signal is None:
            self._deadline = time.monotonic() + self._timeout

    def close(self) -> None:
        """End the thread; signals are the program's again, unless one has come: who was told to end
        is about to store the end, and Slurm tells it more than once."""
        self._closed = True
        os.write(self._wake_end, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler if self.signal is None else signal.SIG_IGN)

    def _note(self, number: int, frame: object) -> None:
        self.signal = number

    def _watch(self) -> None:
        while not self._closed:
            wait = self._deadline - time.monotonic()
            if wait <= 0:
                if self.signal is not None:
                    cause = f"ended by {signal.Signals(self.signal).name}"
                else:
                    cause = f"missed the deadline of {self._timeout:g} s (--timeout)"
                self.end(cause, late=self.signal is None)
            if select.select([self._wake], [], [], wait)[0]:
                for byte in os.read(self._wake, 64):
                    self._signalled(byte)

    def _signalled(self, number: int) -> None:
        if number not in SIGNAL_SECONDS:
            return
        again = self.signal == number and number == signal.SIGINT and self._interrupted
        self.signal = number
        self._interrupted = True
        # A launcher that lost a rank kills the others soon after.
        lost = DIED in (state_of(who, self._who[self._rank]) for who in self._who)
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
            code = self._tell_end(Report(self._phase, cause, late, place or _main_place()))
        finally:  # whatever happens to stderr or the disk: this process ends
            self._leave(code)

    def _tell_end(self, mine: Report) -> int:
        """Report, collect, and let one rank tell the end; the exit code."""
        reports, together = self._collect(mine)
        me = self._who[self._rank]
        silent = [(who, state_of(who, me)) for who in self._who if who.rank not in reports]
        interrupted = self.signal is not None and not silent
        code = 130 if interrupted else 5
        # Without the store, the lowest rank that lives on this host speaks.
        lower = [state for who, state in silent if who.rank < self._rank]
        tells = min(reports) == self._rank and (together or ALIVE not in lower)
        if tells and not self._told(0.0):
            sentence = verdict(silent, reports, self._rank)
            sys.stderr.write(f"ddpbench: {sentence}\n")
            sys.stderr.flush()
            self.on_end("interrupted" if interrupted else "failed", sentence, code)
            self._kill([who for who, state in silent if state == STOPPED or mine.late])
            _within(1.0, self._tell)
        else:
            self._told(GRACE_SECONDS)
        return code

    def _collect(self, mine: Report) -> tuple[dict[int, Report], bool]:
        """The reports of the ranks that answer within the grace time, this one's among them.

        And whether the store answered: its host may be the one that is gone.
        """
        reports, me = {self._rank: mine}, self._who[self._rank]

        def ask() -> bool:
            self._store.set(f"ddpbench/end/{self._rank}", json.dumps(asdict(mine)))
            until = time.monotonic() + GRACE_SECONDS
            while len(reports) < len(self._who) and time.monotonic() < until:
                absent = [who for who in self._who if who.rank not in reports]
                for who in absent:
                    key = f"ddpbench/end/{who.rank}"
                    if self._store.check([key]):
                        reports[who.rank] = Report(**json.loads(self._store.get(key)))
                hopeless = [w for w in absent if state_of(w, me) in (DIED, STOPPED)]
                if len(reports) + len(hopeless) >= len(self._who):
                    break
                time.sleep(0.05)
            return True

        together = _within(GRACE_SECONDS + 1.0, ask)
        return dict(reports), together

    def _told(self, seconds: float) -> bool:
        """Whether another rank has told the end, or tells it within this time."""

        def ask() -> bool:
            until = time.monotonic() + seconds
            while not self._store.check([TOLD]) and time.monotonic() < until:
                time.sleep(0.05)
            return self._store.check([TOLD])

        return _within(seconds + 1.0, ask)

    def _tell(self) -> bool:
        self._store.set(TOLD, "1")
        return True

    def _kill(self, ranks: Sequence[Who]) -> None:
        """End these ranks if they are on this host: a stopped one keeps its launcher waiting."""
        for who in ranks:
            if self._who[self._rank].sees(who):
                with contextlib.suppress(OSError):
                    os.kill(who.pid, signal.SIGKILL)


def _within(seconds: float, ask: Callable[[], bool]) -> bool:
    """What `ask` says of the store; False when it raises, or hangs on a store that is stopped."""
    answers: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers) and answers[0]


def _main_place() -> str:
    """The innermost frame of the main thread: "all_reduce (distributed_c10d.py:3251)"."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return place_of(frame)


def place_of(frame: FrameType) -> str:
    """A line of code as "function (file:line)"."""
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
