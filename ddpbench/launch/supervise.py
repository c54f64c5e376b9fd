"""The watch over the ranks of a launch, in the process that started them; without torch.

The ranks have watchdogs with more information, but only while they are connected. This watch names
and ends ranks that are stopped before, after, or in spite of that, and ranks that do not end when
asked to. It names a rank that was killed if no other rank has done so.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from ddpbench.launch.cleanup import MARK, Family, process_environ
from ddpbench.launch.placement import ORDERLY, PASSED_ON, Refused, read_placement
from ddpbench.records.terminal_text import tell

# Seconds between looks while ranks start, how long that lasts, and seconds between looks later.
FIND_SECONDS, START_SECONDS, LOOK_SECONDS = 0.05, 10.0, 0.5
LATE_SECONDS = 6.0  # beyond the deadline, for the ranks to report by themselves before the starter
REPORTING_SECONDS = 4.0  # for the starter to end the ranks after that
END_SECONDS = 20.0  # for the ranks to end after a signal
GRACE_SECONDS = (0.0, 30.0)  # once a rank has failed: until SIGTERM, then until SIGKILL
WHO_STOPS = "Next: find what stopped it (a debugger, a batch system, kill -STOP), and start again"
WHO_KILLS = "Next: check in `dmesg` whether memory ran out, else find what killed it"


class Clock(Protocol):
    """The part of the module `time` that waits use. Tests replace it."""

    def time(self) -> float: ...
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class Child(Protocol):
    """A process that this one has started."""

    pid: int
    returncode: int | None  # as `poll` has returned it

    def poll(self) -> int | None:
        """Return the exit code, below 0 if a signal ended it; None while it runs."""


@dataclass(frozen=True)
class Deadline:
    """The longest time that ranks may be stopped, and what happens then."""

    seconds: float = 60.0  # --timeout
    ends: bool = True  # whether stopped ranks are ended (--watchdog)
    report: Callable[[str], None] = tell  # takes the sentence that names the stopped ranks


@dataclass
class Watch:
    """The ranks of one launch, as the process that started them sees them."""

    kin: Family
    nproc: int
    deadline: Deadline
    received: Sequence[int] = ()  # the signals that were passed on to the ranks
    starter: int | None = None  # pid of mpirun, if it starts the ranks
    pids: dict[int, int] = field(default_factory=dict)  # rank → pid
    sentence: str = ""  # the verdict of this watch
    _began: float = field(default_factory=time.monotonic)
    _end_requested: float = math.inf  # when all ranks were asked to end
    _stopped_since: dict[int, float] = field(default_factory=dict)  # by pid
    _gone: dict[int, float] = field(default_factory=dict)  # rank → when its end was seen

    def wait(self, children: Iterable[int]) -> None:
        """Look after the ranks, then sleep until a process ends, or until the next look.

        Ends the launch if a rank has been stopped for too long, or does not end after a signal.
        """
        if self.received:
            self._end_requested = min(self._end_requested, time.monotonic())
            for pid in filter(_is_stopped, self.pids.values()):
                send_signal(pid, signal.SIGKILL)  # it cannot end
        names = {}
        if self.starter is not None:
            names[self.starter] = "mpirun"
            if len(self.pids) < self.nproc:
                self._find_ranks()
        names |= {pid: f"rank {rank}" for rank, pid in self.pids.items()}
        sentence = self._describe_stopped(names)
        if time.monotonic() > self._end_requested + END_SECONDS:
            sentence = f"{_name_all(names)} did not end within {END_SECONDS:g} s: killed"
        if sentence and not self.sentence:
            if not self.kin.verdict:
                self.deadline.report(sentence)
            self.sentence = sentence
            self.kin.kill()
            for pid in self.pids.values():
                send_signal(pid, signal.SIGKILL)  # it may not have reached its own session
        living = {pid: rank for rank, pid in self.pids.items() if rank not in self._gone}
        starting = len(self.pids) < self.nproc and time.monotonic() < self._began + START_SECONDS
        ended = await_first_end({*children, *living}, FIND_SECONDS if starting else LOOK_SECONDS)
        now = time.monotonic()
        self._gone |= {living[pid]: now for pid in ended if pid in living}

    def _find_ranks(self) -> None:
        with contextlib.suppress(psutil.Error, Refused):
            for process in psutil.Process(self.starter).children(recursive=True):
                if (placement := read_placement(process_environ(process))) is not None:
                    self.pids.setdefault(placement.rank, process.pid)

    def _describe_stopped(self, names: Mapping[int, str]) -> str:
        """Return a sentence on processes that have been stopped for too long; "" if none."""
        now, limit = time.monotonic(), self.deadline.seconds + LATE_SECONDS
        stopped = [pid for pid in names if _is_stopped(pid)]
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        late = {pid: names[pid] for pid in stopped if now - self._stopped_since[pid] >= limit}
        if not late or not self.deadline.ends:
            return ""
        return (
            f"{_name_all(late)} {'is' if len(late) == 1 else 'are'} stopped (SIGSTOP) for longer "
            f"than {self.deadline.seconds:g} s (--timeout). {WHO_STOPS}"
        )

    def await_mpirun(self, process: Child) -> int:
        """Wait for mpirun. Return the exit code of the launch: 5 if a process was lost.

        Names that process unless a rank has. mpirun's code is above 128 if a rank was killed.
        """
        await_children([process], self.wait)
        code = process.poll() or 0
        if code < 0:
            self.report_death(describe_process("mpirun", process.pid), -code)
        elif code > 130:
            lost = [f"rank {rank}" for rank in range(self.nproc) if rank not in self.pids]
            if not lost:
                first = min(self._gone.values(), default=0.0)
                pids = {rank: self.pids[rank] for rank, gone in self._gone.items() if gone == first}
                lost = [describe_process(f"rank {rank}", pid) for rank, pid in pids.items()]
            elif len(lost) > 1:
                lost = []  # any of those that were never found may be the one
            self.report_death("; ".join(lost) or "one of the ranks", code - 128)
        return 5 if self.sentence or not 0 <= code <= 130 or code in (128, 129) else code

    def report_death(self, name: str, number: int) -> None:
        """Name processes that this signal has ended, unless a rank has reported a verdict."""
        if not self.sentence and not self.kin.verdict:
            self.sentence = describe_death(name, number)
            self.deadline.report(self.sentence)


def _name_all(names: Mapping[int, str]) -> str:
    return "; ".join(describe_process(name, pid) for pid, name in names.items())


def describe_process(name: str, pid: int) -> str:
    """Return "rank 1 (host, pid 7)", for a process on this host."""
    return f"{name} ({socket.gethostname()}, pid {pid})"


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def add_patience(seconds: float) -> float:
    """Return how long ranks that have not met wait for each other if their deadline is `seconds`.

    The process that started them names a rank that is stopped; ranks see only that it is missing.
    """
    return seconds + (LATE_SECONDS + REPORTING_SECONDS if MARK in os.environ else 0.0)


def describe_death(name: str, number: int) -> str:
    """Return a sentence on a process that a signal has ended, and what to do."""
    cause = f"signal {number}"
    with contextlib.suppress(ValueError):
        cause = f"{signal.Signals(number).name} ({number})"
    return f"{name} was killed by {cause}. {WHO_KILLS}"


def await_children(
    children: Sequence[Child],
    wait: Callable[[list[int]], object],
    received: Sequence[int] = (),
    grace_seconds: tuple[float, float] = GRACE_SECONDS,
) -> list[int]:
    """Wait for all children. Return the indices of those that failed first.

    wait: sleeps for a moment; takes the pids of the children that run. received: the signals that
    were passed on; whatever ends after one has not failed. Once a child has failed, the others get
    SIGTERM, then SIGKILL, after these seconds.
    """
    failed: list[int] = []
    blows: dict[int, float] = {}  # signal → when it is due
    while True:
        codes, now = [child.poll() for child in children], time.monotonic()
        running = [child.pid for child, code in zip(children, codes, strict=True) if code is None]
        if not blows and any(code not in (None, *ORDERLY) for code in codes):
            failed = [i for i, code in enumerate(codes) if code not in (None, *ORDERLY)]
            failed = [] if received else failed
            blows = {signal.SIGTERM: now + grace_seconds[0]}
            blows[signal.SIGKILL] = blows[signal.SIGTERM] + grace_seconds[1]
        for number in [number for number, due in blows.items() if due <= now]:
            blows[number] = float("inf")
            for pid in running:
                send_signal(pid, number)
        if not running:
            return failed
        wait(running)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended; SIGKILL goes to its group, too."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)
        if number == signal.SIGKILL and os.getpgid(pid) == pid:
            os.killpg(pid, number)


def await_first_end(pids: Iterable[int], seconds: float) -> list[int]:
    """Sleep until one of these processes ends, at most for `seconds`. Return those that ended.

    Polling every few ms instead would take cores from the ranks while they measure.
    """
    ends, files, ended = select.poll(), {}, []
    for pid in pids:
        try:
            files[file := os.pidfd_open(pid)] = pid
            ends.register(file, select.POLLIN)
        except ProcessLookupError:
            ended.append(pid)
    try:
        ended += [files[file] for file, _ in ends.poll(0 if ended else seconds * 1000)]
    finally:
        for file in files:
            os.close(file)
    return ended


@contextlib.contextmanager
def forward_signals(
    children: Sequence[Child],
    others: Iterable[signal.Signals] = (),
    send: Callable[[int, int], None] = os.kill,
) -> Iterator[list[int]]:
    """Meanwhile pass PASSED_ON, and other signals, on to these children; yield those received."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        for child in children:
            if child.returncode is None:
                with contextlib.suppress(OSError):
                    send(child.pid, number)

    previous: Mapping[int, object] = {
        number: signal.signal(number, handle) for number in (*PASSED_ON, *others)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
