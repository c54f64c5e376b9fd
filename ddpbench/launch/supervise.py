"""The ranks of a launch watched by the process that started them: no torch, no part in the run.

The ranks have watchdogs, which know more; but only once they have met, and until they leave. What
is stopped before, after, or in spite of them is named and ended from here, and so is what asks for
an end and does not get it. A rank that was killed is named where no other has done so.
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

from ddpbench.launch import family
from ddpbench.launch.family import Family
from ddpbench.records.visible import tell

# Between looks, as long as ranks start, and later.
FIND_SECONDS, START_SECONDS, LOOK_SECONDS = 0.05, 10.0, 0.5
# For the ranks to find out by themselves, beyond the deadline: as they meet, and once their
# watchdogs run. And for them to end after a signal.
JOIN_SECONDS, LATER_SECONDS, END_SECONDS = 1.0, 4.0, 20.0
WHEN = {"": "before it had joined the others", family.JOINS: "while it joined the others",
        family.MET: "while the ranks worked", family.LEFT: "at its end"}  # fmt: skip
WHO_KILLS = "Next: look in `dmesg` whether memory ran out, or see who ends it"


@dataclass(frozen=True)
class Deadline:
    """How long ranks may be stopped: --timeout; ends: whether also once they have met (--watchdog);
    say: what is done with the sentence that names who it was."""

    seconds: float = 60.0
    ends: bool = True
    say: Callable[[str], None] = tell


@dataclass
class Watch:
    """All that is seen of the ranks of one launch."""

    kin: Family
    nproc: int
    deadline: Deadline
    starter: str = ""  # of the ranks, where it is a process of its own: "mpirun"
    root: psutil.Process | None = None  # that process, or this one, whose children are ranks
    ranks: dict[int, psutil.Process] = field(default_factory=dict)
    sentence: str = ""  # the verdict from here
    asked: float | None = None  # when all were asked to end
    _since: dict[int, float] = field(default_factory=dict)  # pid → since when it is stopped
    _gone: list[list[int]] = field(default_factory=list)  # ranks that ended, those seen at once

    def name(self, rank: int) -> str:
        """ "rank 1 (host, pid 7)"."""
        return family.named(f"rank {rank}", self.ranks[rank].pid)

    def ask(self) -> None:
        """The ranks have been asked to end: who is stopped cannot, and is killed."""
        self.asked = self.asked or time.monotonic()
        for each in self.ranks.values():
            with contextlib.suppress(psutil.Error):
                if family.is_stopped(each.pid):
                    each.kill()

    def code(self, code: int) -> int:
        """The exit code of the launch, 5 where something was killed or stopped; says what, unless
        a rank has. code: of the starter, below 0: it was killed, above 128: one of the ranks."""
        if not self.sentence and not self.kin.told:
            self._say(self._ended(code))
        return 5 if self.sentence or not 0 <= code <= 130 or code in (128, 129) else code

    def killed(self, rank: int, number: int) -> None:
        """Name a rank that this signal has ended, unless a rank has."""
        if not self.sentence and not self.kin.told:
            self._say(_death(self.name(rank), number, WHEN[self.kin.stage(rank)]))

    def _ended(self, code: int) -> str:
        if code < 0 and self.root is not None:
            return _death(family.named(self.starter, self.root.pid), -code)
        if code <= 130:
            return ""
        missing = [rank for rank in range(self.nproc) if rank not in self.ranks]
        if len(missing) == 1:
            return _death(f"rank {missing[0]}", code - 128, WHEN[""])
        early = [r for r in next(iter(self._gone), []) if self.kin.stage(r) != family.LEFT]
        if missing or not early:
            return _death("one of the ranks", code - 128, WHEN[""] if missing else "")
        return _death(
            " or ".join(map(self.name, early)), code - 128, WHEN[self.kin.stage(early[0])]
        )

    def _say(self, sentence: str) -> None:
        if sentence:
            self.sentence = sentence
            self.deadline.say(sentence)

    # --- the thread

    def run(self, end: int) -> None:
        """Watch until something can be read from `end`."""
        poll, fds = select.poll(), {}
        poll.register(end, select.POLLIN)
        soon = time.monotonic() + START_SECONDS
        while True:
            for rank, each in self._find().items():
                with contextlib.suppress(OSError):
                    fds[fd := os.pidfd_open(each.pid)] = rank
                    poll.register(fd, select.POLLIN)
            starts = len(self.ranks) < self.nproc and time.monotonic() < soon
            seconds = FIND_SECONDS if starts else LOOK_SECONDS
            events = [fd for fd, _ in poll.poll(seconds * 1000)]
            if gone := [fds[fd] for fd in events if fd in fds]:
                self._gone.append(gone)
            for fd in set(events) & set(fds):
                poll.unregister(fd)
                os.close(fd)
                del fds[fd]
            if end in events:
                break
            sentence = self._stopped() or self._endless()
            if sentence and not self.kin.is_telling():
                if self.kin.told:
                    self.sentence = sentence
                else:
                    self.kin.mark_told(sentence)
                    self._say(sentence)
                self.kin.kill()
                break
        for fd in fds:
            os.close(fd)

    def _find(self) -> Mapping[int, psutil.Process]:
        """The ranks not yet known."""
        if self.root is None or len(self.ranks) == self.nproc:
            return {}
        try:
            children = self.root.children(recursive=True)
        except psutil.Error:
            return {}
        known = {each.pid for each in self.ranks.values()}
        others = [each for each in children if each.pid not in known]
        new = {r: p for r, p in family.ranks_of(others).items() if r not in self.ranks}
        self.ranks |= new
        return new

    def _stopped(self) -> str:
        """A sentence on what has been stopped for too long, "" nothing."""
        watched = {each.pid: (self.name(rank), rank) for rank, each in self.ranks.items()}
        if self.starter and self.root is not None:
            watched[self.root.pid] = (family.named(self.starter, self.root.pid), -1)
            if len(self.ranks) < self.nproc:
                watched |= self._nameless(watched)
        now, late = time.monotonic(), []
        for pid, (who, rank) in watched.items():
            if not family.is_stopped(pid):
                self._since.pop(pid, None)
                continue
            stage = self.kin.stage(rank)
            met = stage == family.MET
            limit = self.deadline.seconds + (LATER_SECONDS if met else JOIN_SECONDS)
            if now - self._since.setdefault(pid, now) >= limit and (self.deadline.ends or not met):
                when = WHEN[stage] if rank >= 0 else ""
                late.append(f"{who} is stopped (SIGSTOP) {when}".rstrip())
        if not late:
            return ""
        return (
            f"{'; '.join(late)}, for longer than {self.deadline.seconds:g} s (--timeout). "
            f"{family.WHO_STOPS}"
        )

    def _nameless(self, known: Mapping[int, object]) -> dict[int, tuple[str, int]]:
        """Processes of the starter that are to become ranks: which, is known of the last."""
        assert self.root is not None
        missing = [rank for rank in range(self.nproc) if rank not in self.ranks]
        name = f"rank {missing[0]}" if len(missing) == 1 else "a rank to be"
        with contextlib.suppress(psutil.Error):
            return {
                each.pid: (family.named(name, each.pid), -1)
                for each in self.root.children()
                if each.pid not in known
            }
        return {}

    def _endless(self) -> str:
        """A sentence on ranks that have not ended long after they were asked to."""
        if self.asked is None or time.monotonic() - self.asked < END_SECONDS:
            return ""
        living = [rank for rank, each in self.ranks.items() if each.is_running()]
        who = ", ".join(map(self.name, living)) or self.starter or "the ranks"
        return f"{who} did not end within {END_SECONDS:g} s and was killed"


def _death(who: str, number: int, when: str = "") -> str:
    name = f"signal {number}"
    with contextlib.suppress(ValueError):
        name = f"{signal.Signals(number).name} ({number})"
    return f"{who} was killed by {name} {when}".rstrip() + f". {WHO_KILLS}"


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[Watch]:
    """Watch meanwhile."""
    if watch.ranks:  # they were forked: they are told who the others are
        pids = {rank: each.pid for rank, each in watch.ranks.items()}
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
