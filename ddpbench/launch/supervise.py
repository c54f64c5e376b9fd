"""The watch over the ranks of a launch, in the process that started them; without torch.

The ranks have watchdogs with more information, but only while they are connected. The watch names
and ends ranks that are stopped before, after, or in spite of that, and ranks that do not end when
asked to. It names a rank that was killed if no other rank has done so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import psutil

from ddpbench.launch import siblings
from ddpbench.launch.family import Family
from ddpbench.records.terminal_text import tell

# Seconds between looks while ranks start, how long that lasts, and seconds between looks later.
FIND_SECONDS, START_SECONDS, LOOK_SECONDS = 0.05, 10.0, 0.5
# Beyond the deadline, for the ranks to report by themselves: while they connect, and once their
# watchdogs run; and for them to end after a signal.
JOIN_SECONDS, LATER_SECONDS, END_SECONDS = 1.0, 4.0, 20.0
WHEN = {
    "": "before it joined the other ranks",
    siblings.JOINS: "while it joined the other ranks",
    siblings.MET: "while the ranks worked",
    siblings.LEFT: "at its end",
}
WHO_KILLS = "Next: check in `dmesg` whether memory ran out, else find what killed it"


@dataclass(frozen=True)
class Deadline:
    """The longest time that ranks may be stopped, and what happens then."""

    seconds: float = 60.0  # --timeout
    ends: bool = True  # even once the ranks are connected (--watchdog)
    report: Callable[[str], None] = tell  # takes the sentence that names the stopped ranks


@dataclass
class Watch:
    """The ranks of one launch, as the process that started them sees them."""

    kin: Family
    nproc: int
    deadline: Deadline
    mpirun: psutil.Process | None = None  # if it started the ranks
    ranks: dict[int, psutil.Process] = field(default_factory=dict)
    sentence: str = ""  # the verdict of this watch
    end_requested: float | None = None  # when all ranks were asked to end
    _since: dict[int, float] = field(default_factory=dict)  # pid → when it was first seen stopped
    _gone: list[list[int]] = field(default_factory=list)  # ranks that ended, by look

    def name(self, rank: int) -> str:
        """Return "rank 1 (host, pid 7)"."""
        return siblings.describe_process(f"rank {rank}", self.ranks[rank].pid)

    def request_end(self) -> None:
        """Note that the ranks have been asked to end; kill stopped ones, which cannot."""
        self.end_requested = self.end_requested or time.monotonic()
        for process in self.ranks.values():
            with contextlib.suppress(psutil.Error):
                if siblings.is_stopped(process.pid):
                    process.kill()

    def final_code(self, code: int) -> int:
        """Return the exit code of the launch: 5 if a process was killed or stopped.

        Name that process unless a rank has. code: of the starter; below 0 if it was killed, above
        128 if a rank was.
        """
        if not self.sentence and not self.kin.verdict:
            self._report(self._explain_code(code))
        return 5 if self.sentence or not 0 <= code <= 130 or code in (128, 129) else code

    def report_killed(self, rank: int, number: int) -> None:
        """Name a rank that this signal has ended, unless another rank has."""
        if not self.sentence and not self.kin.verdict:
            self._report(describe_death(self.name(rank), number, WHEN[self.kin.stage(rank)]))

    def _explain_code(self, code: int) -> str:
        if code < 0 and self.mpirun is not None:
            return describe_death(siblings.describe_process("mpirun", self.mpirun.pid), -code)
        if code <= 130:
            return ""
        missing = [rank for rank in range(self.nproc) if rank not in self.ranks]
        if len(missing) == 1:
            return describe_death(f"rank {missing[0]}", code - 128, WHEN[""])
        early = [r for r in next(iter(self._gone), []) if self.kin.stage(r) != siblings.LEFT]
        if missing or not early:
            return describe_death("one of the ranks", code - 128, WHEN[""] if missing else "")
        return describe_death(
            " or ".join(map(self.name, early)), code - 128, WHEN[self.kin.stage(early[0])]
        )

    def _report(self, sentence: str) -> None:
        if sentence:
            self.sentence = sentence
            self.deadline.report(sentence)

    # --- the thread

    def run(self, end: int) -> None:
        """Watch until something can be read from `end`."""
        poll, fds = select.poll(), {}
        poll.register(end, select.POLLIN)
        started = time.monotonic() + START_SECONDS
        while True:
            for rank, process in self._find_new_ranks().items():
                with contextlib.suppress(OSError):
                    fds[fd := os.pidfd_open(process.pid)] = rank
                    poll.register(fd, select.POLLIN)
            starting = len(self.ranks) < self.nproc and time.monotonic() < started
            seconds = FIND_SECONDS if starting else LOOK_SECONDS
            events = [fd for fd, _ in poll.poll(seconds * 1000)]
            if gone := [fds[fd] for fd in events if fd in fds]:
                self._gone.append(gone)
            for fd in set(events) & set(fds):
                poll.unregister(fd)
                os.close(fd)
                del fds[fd]
            if end in events:
                break
            sentence = self._describe_stopped() or self._describe_endless()
            if sentence and not self.kin.is_reporting():
                if self.kin.verdict:
                    self.sentence = sentence
                else:
                    self.kin.mark_verdict(sentence)
                    self._report(sentence)
                self.kin.kill()
                break
        for fd in fds:
            os.close(fd)

    def _find_new_ranks(self) -> Mapping[int, psutil.Process]:
        if self.mpirun is None or len(self.ranks) == self.nproc:
            return {}
        try:
            children = self.mpirun.children(recursive=True)
        except psutil.Error:
            return {}
        known = {process.pid for process in self.ranks.values()}
        others = [process for process in children if process.pid not in known]
        new = {r: p for r, p in siblings.find_ranks(others).items() if r not in self.ranks}
        self.ranks |= new
        return new

    def _describe_stopped(self) -> str:
        """A sentence on processes that have been stopped for too long; empty if none."""
        watched = {process.pid: (self.name(rank), rank) for rank, process in self.ranks.items()}
        if self.mpirun is not None:
            watched[self.mpirun.pid] = siblings.describe_process("mpirun", self.mpirun.pid), -1
            if len(self.ranks) < self.nproc:
                watched |= self._list_unnamed(self.mpirun, watched)
        now, late = time.monotonic(), []
        for pid, (name, rank) in watched.items():
            if not siblings.is_stopped(pid):
                self._since.pop(pid, None)
                continue
            stage = self.kin.stage(rank)
            met = stage == siblings.MET
            limit = self.deadline.seconds + (LATER_SECONDS if met else JOIN_SECONDS)
            if now - self._since.setdefault(pid, now) >= limit and (self.deadline.ends or not met):
                when = WHEN[stage] if rank >= 0 else ""
                late.append(f"{name} is stopped (SIGSTOP) {when}".rstrip())
        if not late:
            return ""
        return (
            f"{'; '.join(late)}, for longer than {self.deadline.seconds:g} s (--timeout). "
            f"{siblings.WHO_STOPS}"
        )

    def _list_unnamed(
        self, starter: psutil.Process, known: Mapping[int, object]
    ) -> dict[int, tuple[str, int]]:
        """Return children of the starter that will become ranks; only the last has a known rank."""
        missing = [rank for rank in range(self.nproc) if rank not in self.ranks]
        name = f"rank {missing[0]}" if len(missing) == 1 else "a rank that is starting"
        with contextlib.suppress(psutil.Error):
            return {
                process.pid: (siblings.describe_process(name, process.pid), -1)
                for process in starter.children()
                if process.pid not in known
            }
        return {}

    def _describe_endless(self) -> str:
        """A sentence on ranks that have not ended long after they were asked to; empty if none."""
        if self.end_requested is None or time.monotonic() - self.end_requested < END_SECONDS:
            return ""
        living = [rank for rank, process in self.ranks.items() if process.is_running()]
        names = ", ".join(map(self.name, living)) or "the ranks"
        return f"{names} did not end within {END_SECONDS:g} s and was killed"


def describe_death(name: str, number: int, when: str = "") -> str:
    """Return a sentence on a process that a signal has ended, and what to do."""
    cause = f"signal {number}"
    with contextlib.suppress(ValueError):
        cause = f"{signal.Signals(number).name} ({number})"
    return f"{name} was killed by {cause} {when}".rstrip() + f". {WHO_KILLS}"


@contextlib.contextmanager
def watch_ranks(watch: Watch) -> Iterator[Watch]:
    """Run the watch in a thread while the context lasts."""
    if watch.ranks:  # started from here: store all pids for all ranks
        pids = {rank: process.pid for rank, process in watch.ranks.items()}
        (watch.kin.folder / "pids").write_text(json.dumps(pids))
    end, ending = os.pipe()
    thread = threading.Thread(target=watch.run, args=(end,), daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        os.close(ending)  # POLLHUP
        thread.join()
        os.close(end)
